//! The trait by which transactions and reads see a state of the store, and their evaluation on it.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};

use kv::{Compare, Content, Key, Kv, OpResult, Range, RangeResponse, Result, Revision, Target, TxnRange, Value};

use crate::codec::Pointer;
use crate::error::revision;
use crate::merge::Merge;
use crate::rows::VisitEntry;

/// Where some keys differ from the table: what is there instead, if anything.
pub(crate) type Overlay = BTreeMap<Key, Option<Pointer>>;

/// One state of the store.
pub(crate) trait Entries {
    /// The entry of a key.
    fn entry(&mut self, key: &[u8]) -> Result<Option<Pointer>>;

    /// The entries from `from` (inclusive) to `to` (exclusive; `None`: all the rest), ascending, until `visit` breaks.
    fn each(&mut self, from: &[u8], to: Option<&[u8]>, visit: VisitEntry<'_>) -> Result<()>;

    /// The value of an entry.
    fn value(&mut self, pointer: &Pointer) -> Result<Value>;

    /// The values of entries, in their order.
    fn values(&mut self, pointers: &[Pointer]) -> Result<Vec<Value>> {
        pointers.iter().map(|pointer| self.value(pointer)).collect()
    }
}

/// The part of an overlay from `from` to `to`, to be merged into a scan of the table.
pub(crate) fn overlaid<'o>(
    overlay: &'o Overlay,
    from: &[u8],
    to: Option<&[u8]>,
) -> Merge<impl Iterator<Item = (&'o [u8], Option<Pointer>)> + use<'o>> {
    let to = match to {
        // A map panics over a range that ends before it starts.
        Some(to) => Bound::Excluded(to.max(from)),
        None => Bound::Unbounded,
    };
    let range = overlay.range::<[u8], _>((Bound::Included(from), to));
    Merge::new(range.map(|(key, pointer)| (key.as_bytes(), *pointer)))
}

/// Visits the entries of any range; a single key is not scanned for.
pub(crate) fn each_in(
    entries: &mut dyn Entries,
    range: &Range,
    visit: &mut dyn FnMut(&[u8], Pointer) -> ControlFlow<()>,
) -> Result<()> {
    if let Range::Key(key) = range {
        if let Some(pointer) = entries.entry(key.as_bytes())? {
            // There is nothing more to stop.
            let _ = visit(key.as_bytes(), pointer);
        }
        return Ok(());
    }
    if range.is_empty() {
        return Ok(());
    }
    let (from, to) = range.bounds();
    entries.each(from.as_bytes(), to.as_ref().map(Key::as_bytes), visit)
}

/// The keys of a range and their pointers, ascending.
pub(crate) fn found_in(entries: &mut dyn Entries, range: &Range) -> Result<Vec<(Key, Pointer)>> {
    let mut found = Vec::new();
    each_in(entries, range, &mut |key, pointer| {
        found.push((Key::from(key), pointer));
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

/// Reads a range. The revision of the answer is for the caller to fill in.
pub(crate) fn read(entries: &mut dyn Entries, request: &TxnRange) -> Result<RangeResponse> {
    let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let wanted = if request.content == Content::CountOnly { 0 } else { limit };
    let mut count = 0;
    let mut found = Vec::new();
    each_in(entries, &request.range, &mut |key, pointer| {
        count += 1;
        if found.len() < wanted {
            found.push((Key::from(key), pointer));
        }
        ControlFlow::Continue(())
    })?;
    let more = request.content != Content::CountOnly && count > found.len() as u64;
    let kvs = match request.content {
        Content::Full => with_values(entries, found)?,
        Content::KeysOnly | Content::CountOnly => {
            found.into_iter().map(|(key, pointer)| kv_of(key, &pointer, Value::default())).collect()
        }
    };
    Ok(RangeResponse { revision: Revision::UNSET, kvs, count, more })
}

/// Entries with their values.
pub(crate) fn with_values(entries: &mut dyn Entries, found: Vec<(Key, Pointer)>) -> Result<Vec<Kv>> {
    let pointers: Vec<Pointer> = found.iter().map(|(_, pointer)| *pointer).collect();
    let values = entries.values(&pointers)?;
    Ok(found.into_iter().zip(values).map(|((key, pointer), value)| kv_of(key, &pointer, value)).collect())
}

/// True if all compares hold.
pub(crate) fn all_hold(entries: &mut dyn Entries, compares: &[Compare]) -> Result<bool> {
    for compare in compares {
        if !holds(entries, compare)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn holds(entries: &mut dyn Entries, compare: &Compare) -> Result<bool> {
    let found = found_in(entries, &compare.range)?;
    if found.is_empty() {
        return Ok(compare.holds(None));
    }
    for (key, pointer) in found {
        let value = match compare.target {
            Target::Value(_) => entries.value(&pointer)?,
            Target::Version(_) | Target::CreateRevision(_) | Target::ModRevision(_) | Target::Lease(_) => {
                Value::default()
            }
        };
        if !compare.holds(Some(&kv_of(key, &pointer, value))) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// An entry as callers know it.
pub(crate) fn kv_of(key: Key, pointer: &Pointer, value: Value) -> Kv {
    Kv {
        key,
        value,
        create_revision: revision(pointer.create_revision),
        mod_revision: revision(pointer.place.revision),
        version: pointer.version.cast_signed(),
        lease: pointer.lease,
    }
}

/// Says in all reads of a transaction which revision it was at.
pub(crate) fn stamp(results: &mut [OpResult], at: Revision) {
    for result in results {
        if let OpResult::Range(answer) = result {
            answer.revision = at;
        }
    }
}
