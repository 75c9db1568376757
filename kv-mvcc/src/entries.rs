//! What transactions and reads need of a state of the store, and how they are evaluated on it.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};

use kv::{
    Compare, Content, Key, Kv, LeaseId, OpResult, Range, RangeResponse, Result, Revision, Target, TxnRange, Value,
};

use crate::codec::Pointer;
use crate::error::revision;
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

/// The part of an overlay from `from` to `to`.
pub(crate) fn overlaid<'o>(
    overlay: &'o Overlay,
    from: &[u8],
    to: Option<&[u8]>,
) -> impl Iterator<Item = (&'o Key, &'o Option<Pointer>)> + use<'o> {
    let to = match to {
        // A map panics over a range that ends before it starts.
        Some(to) => Bound::Excluded(to.max(from)),
        None => Bound::Unbounded,
    };
    overlay.range::<[u8], _>((Bound::Included(from), to))
}

/// Calls `visit` with the entries of the table and of the overlay as one; fed by a scan of the table.
pub(crate) struct Merge<'o, I: Iterator<Item = (&'o Key, &'o Option<Pointer>)>> {
    overlay: std::iter::Peekable<I>,
}

impl<'o, I: Iterator<Item = (&'o Key, &'o Option<Pointer>)>> Merge<'o, I> {
    pub(crate) fn new(overlay: I) -> Self {
        Self { overlay: overlay.peekable() }
    }

    /// What the overlay has before `key`.
    pub(crate) fn before(&mut self, key: &[u8], visit: VisitEntry<'_>) -> ControlFlow<()> {
        while let Some((key, instead)) = self.overlay.next_if(|(other, _)| other.as_bytes() < key) {
            if let Some(pointer) = instead {
                visit(key.as_bytes(), *pointer)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// An entry of the table, or what the overlay has instead.
    pub(crate) fn entry(&mut self, key: &[u8], pointer: Pointer, visit: VisitEntry<'_>) -> ControlFlow<()> {
        match self.overlay.next_if(|(other, _)| other.as_bytes() == key) {
            Some((_, None)) => ControlFlow::Continue(()),
            Some((_, Some(instead))) => visit(key, *instead),
            None => visit(key, pointer),
        }
    }

    /// What the overlay has after the last entry of the table.
    pub(crate) fn rest(&mut self, visit: VisitEntry<'_>) -> ControlFlow<()> {
        for (key, instead) in self.overlay.by_ref() {
            if let Some(pointer) = instead {
                visit(key.as_bytes(), *pointer)?;
            }
        }
        ControlFlow::Continue(())
    }
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
        return Ok(absent_holds(compare));
    }
    for (_, pointer) in &found {
        let holds = match &compare.target {
            Target::Version(given) => compare.op.holds(&pointer.version.cast_signed(), given),
            Target::CreateRevision(given) => compare.op.holds(&revision(pointer.create_revision), given),
            Target::ModRevision(given) => compare.op.holds(&revision(pointer.place.revision), given),
            Target::Value(given) => compare.op.holds(&entries.value(pointer)?, given),
            Target::Lease(given) => compare.op.holds(&LeaseId::number(pointer.lease), given),
            // A target that this crate does not know holds for nothing, which is the safe side.
            _ => false,
        };
        if !holds {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A compare on a key that is not there: its numbers are 0, and it has no value that could compare.
fn absent_holds(compare: &Compare) -> bool {
    match &compare.target {
        Target::Version(given) | Target::Lease(given) => compare.op.holds(&0, given),
        Target::CreateRevision(given) | Target::ModRevision(given) => compare.op.holds(&Revision::UNSET, given),
        _ => false,
    }
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
