//! Reading many values: what was written one after the other by one scan, which takes a fraction of the time that it takes to
//! look up each.

use std::cmp::Ordering;
use std::mem::take;
use std::ops::ControlFlow;

use kv::{Result, Value};

use crate::codec::{self, Damage, Place, Pointer};
use crate::rows::{ROWS_PER_LOOK, Rows, lost_a_part};

/// How many rows a scan passes over on its way from one value to the next.
const MOST_BETWEEN: u32 = 16;

/// Adds to `found` the values of these pointers from the first on: that one, and those that a scan which begins there comes by
/// soon, until `is_over`.
///
/// # Errors
/// `Corrupt`; those of the table.
pub(crate) fn next_values(
    rows: &Rows<'_>,
    pointers: &[Pointer],
    found: &mut Vec<Value>,
    is_over: impl Fn() -> bool,
) -> Result<()> {
    let near = pointers.windows(2).take_while(|pair| is_near(pair[0].place, pair[1].place)).count();
    let run = &pointers[..pointers.len().min(near + 1)];
    match run {
        [] => Ok(()),
        [alone] => {
            found.push(rows.value(alone)?);
            Ok(())
        }
        [first, .., last] => {
            let (from, to) = (codec::value_key(first.place, 0), codec::value_key(last.place, last.chunks()));
            let mut scan = Scan { pointers: run, found, value: Vec::new(), chunks: 0, between: 0 };
            scan.take_whole();
            let (mut looked, mut stopped, mut damage) = (0, false, None);
            rows.view().scan(&from, &to, &mut |key, row| {
                looked += 1;
                let flow = scan.row(key, row).unwrap_or_else(|found| {
                    damage = Some(found);
                    ControlFlow::Break(())
                });
                stopped = flow.is_break() || (looked % ROWS_PER_LOOK == 0 && scan.is_between() && is_over());
                if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            match (damage, scan.pointers.first()) {
                (Some(damage), _) => Err(rows.corrupt(damage)),
                (None, Some(missing)) if !stopped => Err(rows.corrupt(lost_a_part(missing.place))),
                (None, _) => Ok(()),
            }
        }
    }
}

/// True if a scan at one value probably reaches the other soon.
fn is_near(one: Place, other: Place) -> bool {
    let from = if one.revision == other.revision { one.sub } else { 0 };
    one < other && other.revision - one.revision <= 1 && other.sub - from <= MOST_BETWEEN
}

/// A scan for values.
struct Scan<'v> {
    /// The pointers whose values are not found yet.
    pointers: &'v [Pointer],
    found: &'v mut Vec<Value>,
    /// The part of the first value so far, and its number of rows.
    value: Vec<u8>,
    chunks: u32,
    /// How many rows were passed over since the last one that was wanted.
    between: u32,
}

impl Scan<'_> {
    /// True if nothing would be lost by an end here.
    fn is_between(&self) -> bool {
        self.chunks == 0
    }

    /// Takes the next row; breaks where it is better to look up the next value.
    fn row(&mut self, key: &[u8], row: &[u8]) -> Result<ControlFlow<()>, Damage> {
        let Some(pointer) = self.pointers.first() else { return Ok(ControlFlow::Break(())) };
        match key.cmp(codec::value_key(pointer.place, self.chunks).as_slice()) {
            Ordering::Less if self.between < MOST_BETWEEN => self.between += 1,
            Ordering::Equal => {
                let piece = codec::unseal(key, row)?;
                self.value.reserve_exact((pointer.len as usize).saturating_sub(self.value.len()));
                self.value.extend_from_slice(piece);
                (self.chunks, self.between) = (self.chunks + 1, 0);
                self.take_whole();
            }
            Ordering::Less => return Ok(ControlFlow::Break(())),
            Ordering::Greater => return Err(lost_a_part(pointer.place)),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Takes what is whole; an empty value has no row.
    fn take_whole(&mut self) {
        while let Some((pointer, rest)) = self.pointers.split_first() {
            if self.chunks != pointer.chunks() || self.value.len() != pointer.len as usize {
                return;
            }
            self.found.push(Value::new(take(&mut self.value)));
            (self.pointers, self.chunks) = (rest, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use kv::{ErrorKind, Op, Range, Store, StoreExt, Txn};

    use super::*;
    use crate::store::MvccStore;
    use crate::{MemoryTable, Options, Table, Write};

    /// Values of no row, of one and of several; some written anew, one after the other or all over the place.
    async fn filled(table: &MemoryTable) -> MvccStore {
        let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
        let value = |number: usize| number.to_le_bytes()[..1].repeat([0, 10, 300, 6139, 6140, 20_000][number % 6]);
        let key = |number: usize| format!("k{number:03}");
        for txn in 0..8 {
            let ops = (0..20).map(|sub| Op::put(key(20 * txn + sub), value(txn + sub)));
            store.txn(Txn::new().with_success(ops)).await.unwrap();
        }
        for number in (0..160).step_by(7).rev() {
            store.put(key(number), value(number + 1)).await.unwrap();
        }
        store.delete(Range::key(key(33))).await.unwrap();
        store
    }

    fn pointers(rows: &Rows<'_>) -> Vec<Pointer> {
        let mut pointers = Vec::new();
        rows.pointers(b"", None, &mut |_, pointer| {
            pointers.push(pointer);
            ControlFlow::Continue(())
        })
        .unwrap();
        pointers
    }

    /// All of them, and in how many steps.
    fn read(rows: &Rows<'_>, pointers: &[Pointer], is_over: bool) -> Result<(Vec<Value>, usize)> {
        let (mut found, mut steps) = (Vec::new(), 0);
        while found.len() < pointers.len() {
            let before = found.len();
            let rest = &pointers[before..];
            next_values(rows, rest, &mut found, || is_over)?;
            assert!(found.len() > before, "no step goes on");
            steps += 1;
        }
        Ok((found, steps))
    }

    #[tokio::test]
    async fn many_at_once_are_what_each_of_them_is() {
        let table = MemoryTable::new();
        let _store = filled(&table).await;
        let rows = Rows::of(&table, "memory").unwrap();
        let mut pointers = pointers(&rows);
        for turn in 0..5 {
            let each: Vec<Value> = pointers.iter().map(|pointer| rows.value(pointer).unwrap()).collect();
            let (found, steps) = read(&rows, &pointers, false).unwrap();
            assert_eq!(found, each);
            assert!(turn > 0 || steps < 60, "{steps} steps for 159 keys");
            assert_eq!(read(&rows, &pointers, true).unwrap().0, each);
            match turn {
                0 => pointers.reverse(),
                1 => pointers.sort_by_key(|pointer| pointer.place),
                2 => pointers.retain(|pointer| pointer.place.sub % 3 != 1),
                _ => pointers.sort_by_key(|pointer| (pointer.place.sub, pointer.place.revision)),
            }
        }
        assert!(read(&rows, &[], false).unwrap().0.is_empty());
    }

    #[tokio::test]
    async fn a_row_that_is_missing_or_damaged_is_found() {
        let mut tried = 0;
        for change in ["gone", "damaged"] {
            for victim in 0..400 {
                let table = MemoryTable::new();
                let store = filled(&table).await;
                let pointers_now = || pointers(&Rows::of(&table, "memory").unwrap());
                let keys_of =
                    |pointer: Pointer| (0..pointer.chunks()).map(move |chunk| codec::value_key(pointer.place, chunk));
                let keys: Vec<Vec<u8>> = pointers_now().into_iter().flat_map(keys_of).collect();
                let Some(key) = keys.get(victim) else { break };
                let write = match change {
                    "gone" => Write::Delete(key.clone()),
                    _ => Write::Put(key.clone(), vec![1; 30]),
                };
                table.commit(&[write]).unwrap();
                let pointers = pointers_now();
                let error = read(&Rows::of(&table, "memory").unwrap(), &pointers, false).unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::Corrupt), "{error}");
                assert!(store.list(Range::All).await.is_err());
                tried += 1;
            }
        }
        assert!(tried > 300, "only {tried} rows");
    }
}
