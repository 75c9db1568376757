//! Decodes the rows of a view of the table, and reads many values efficiently. One scan reads all values that were
//! written one after another, which is several times faster than separate lookups.

use std::cmp::Ordering;
use std::mem::take;
use std::ops::ControlFlow;

use kv::{Error, Key, LeaseId, Operation, Result, Value};

use crate::codec::{self, Damage, LeaseRow, LogPosition, LogRow, Pointer, StateRow};
use crate::error::corrupt;
use crate::options::Retention;
use crate::table::{Table, View};

/// Number of rows that a scan reads before it checks the elapsed time again.
pub(crate) const ROWS_PER_TIME_CHECK: u32 = 64;

/// The callback of a scan of entries, called with each key and its pointer.
pub(crate) type VisitEntry<'a> = &'a mut dyn FnMut(&[u8], Pointer) -> ControlFlow<()>;
/// The callback of a scan of the log, called with the position, the content and the size in bytes of each log row.
pub(crate) type VisitLog<'a> = &'a mut dyn FnMut(LogPosition, LogRow, u64) -> ControlFlow<()>;

/// A page of keys that are attached to leases, each with its lease.
#[derive(Default)]
pub(crate) struct LeasedKeys {
    pub(crate) found: Vec<(LeaseId, Key)>,
    /// The row key at which the next page starts; `None` on the last page.
    pub(crate) next: Option<Vec<u8>>,
}

/// A view of the table that decodes the rows it reads.
pub(crate) struct Rows<'t> {
    view: Box<dyn View + 't>,
    store: &'static str,
}

impl<'t> Rows<'t> {
    pub(crate) fn of(table: &'t dyn Table, store: &'static str) -> Result<Self> {
        Ok(Self { view: table.view()?, store })
    }

    pub(crate) fn view(&self) -> &dyn View {
        &*self.view
    }

    pub(crate) fn corrupt(&self, damage: Damage) -> Error {
        corrupt(self.store, Operation::Range, damage.0)
    }

    pub(crate) fn state(&self) -> Result<StateRow> {
        match self.view.get(codec::STATE_KEY)? {
            Some(row) => codec::decode(codec::STATE_KEY, &row).map_err(|damage| self.corrupt(damage)),
            None => Err(self.corrupt(Damage("the row that says where the store stands is missing".to_owned()))),
        }
    }

    /// The limits on the history that are stored in the table, if any.
    pub(crate) fn retention(&self) -> Result<Option<Retention>> {
        match self.view.get(codec::RETENTION_KEY)? {
            Some(row) => {
                let kept = codec::decode::<codec::StoredRetention>(codec::RETENTION_KEY, &row);
                Ok(Some(kept.map_err(|damage| self.corrupt(damage))?.into()))
            }
            None => Ok(None),
        }
    }

    /// The live entry of a key; `None` if the key does not exist.
    pub(crate) fn pointer(&self, key: &[u8]) -> Result<Option<Pointer>> {
        let row_key = codec::current_key(key);
        match self.view.get(&row_key)? {
            Some(row) => codec::decode(&row_key, &row).map(Some).map_err(|damage| self.corrupt(damage)),
            None => Ok(None),
        }
    }

    /// Visits the live entries from `from` (inclusive) to `to` (exclusive; `None`: to the end), ascending.
    pub(crate) fn pointers(&self, from: &[u8], to: Option<&[u8]>, visit: VisitEntry<'_>) -> Result<()> {
        let from = codec::current_key(from);
        let to = to.map_or_else(|| codec::end_of(codec::CURRENT).to_vec(), codec::current_key);
        let mut damage = None;
        self.view.scan(&from, &to, &mut |row_key, row| match codec::decode(row_key, row) {
            Ok(pointer) => visit(row_key.get(1..).unwrap_or_default(), pointer),
            Err(found) => {
                damage = Some(found);
                ControlFlow::Break(())
            }
        })?;
        damage.map_or(Ok(()), |damage| Err(self.corrupt(damage)))
    }

    pub(crate) fn lease(&self, id: LeaseId) -> Result<Option<LeaseRow>> {
        let row_key = codec::lease_key(id);
        match self.view.get(&row_key)? {
            Some(row) => codec::decode(&row_key, &row).map(Some).map_err(|damage| self.corrupt(damage)),
            None => Ok(None),
        }
    }

    /// Reads all leases, ordered by lease id as an unsigned number.
    pub(crate) fn leases(&self) -> Result<Vec<(LeaseId, LeaseRow)>> {
        let mut found = Vec::new();
        self.scan_rows(&[codec::LEASE], &codec::end_of(codec::LEASE), |row_key, row| {
            found.push((codec::lease_and_key(row_key)?.0, codec::decode(row_key, row)?));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    /// Reads the keys that are attached to a lease, in ascending order.
    pub(crate) fn leased(&self, id: LeaseId) -> Result<Vec<Key>> {
        let (from, mut found) = (codec::leased_key(id, &[]), Vec::new());
        // The scan ends before the first row of the next lease id, or, after the largest id, before the next row kind.
        let next =
            id.get().cast_unsigned().checked_add(1).map(|next| [&[codec::LEASED][..], &next.to_be_bytes()].concat());
        let end = next.unwrap_or_else(|| codec::end_of(codec::LEASED).to_vec());
        self.scan_rows(&from, &end, |row_key, row| {
            codec::unseal(row_key, row)?;
            found.push(Key::from(codec::lease_and_key(row_key)?.1));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    /// Reads at most `most` keys that have leases, each with its lease, from the row key `from` on.
    pub(crate) fn attached(&self, from: &[u8], most: usize) -> Result<LeasedKeys> {
        let LeasedKeys { mut found, mut next } = LeasedKeys::default();
        self.scan_rows(from, &codec::end_of(codec::LEASED), |row_key, row| {
            if found.len() >= most {
                next = Some(row_key.to_vec());
                return Ok(ControlFlow::Break(()));
            }
            codec::unseal(row_key, row)?;
            let (lease, key) = codec::lease_and_key(row_key)?;
            found.push((lease, Key::from(key)));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(LeasedKeys { found, next })
    }

    fn scan_rows(
        &self,
        from: &[u8],
        to: &[u8],
        mut visit: impl FnMut(&[u8], &[u8]) -> Result<ControlFlow<()>, Damage>,
    ) -> Result<()> {
        let mut damage = None;
        self.view.scan(from, to, &mut |row_key, row| match visit(row_key, row) {
            Ok(flow) => flow,
            Err(found) => {
                damage = Some(found);
                ControlFlow::Break(())
            }
        })?;
        damage.map_or(Ok(()), |damage| Err(self.corrupt(damage)))
    }

    /// Visits the log rows from position `from` to revision `newest`, the end of the log. A gap between revisions or
    /// log positions is reported as damage.
    pub(crate) fn log(&self, from: LogPosition, newest: u64, visit: VisitLog<'_>) -> Result<()> {
        // Revision 1 is the empty store and has no log rows.
        let mut next = from.max(LogPosition::first_of(2));
        let mut broken = false;
        let mut damage = None;
        self.view.scan(&codec::log_key(next), &codec::end_of(codec::LOG), &mut |row_key, row| match decode_log(
            row_key, row, next,
        ) {
            Ok((place, log_row)) => {
                next = place.next();
                let cost = codec::log_cost(row.len(), log_row.prev.as_ref());
                let flow = visit(place, log_row, cost);
                broken = flow.is_break();
                flow
            }
            Err(found) => {
                damage = Some(found);
                ControlFlow::Break(())
            }
        })?;
        // `next` is the position after the last log row; if it is the first position of a revision, the log ends with
        // the revision before.
        let reached = if next.sub > 0 { next.revision } else { next.revision - 1 };
        if damage.is_none() && !broken && reached < newest {
            damage = Some(Damage(format!("the log ends at revision {reached}, before the newest, {newest}")));
        }
        damage.map_or(Ok(()), |damage| Err(self.corrupt(damage)))
    }

    /// The time of the first change at or after log position `place`, in microseconds since 1970. The log must contain
    /// a change at or after `place`. `newest` is the revision at the end of the log.
    pub(crate) fn time_of(&self, place: LogPosition, newest: u64) -> Result<u64> {
        let mut time = 0;
        self.log(place, newest, &mut |_, row, _| {
            time = row.time;
            ControlFlow::Break(())
        })?;
        Ok(time)
    }

    pub(crate) fn value(&self, pointer: &Pointer) -> Result<Value> {
        let (place, len) = (pointer.place, pointer.len as usize);
        let mut value = Vec::with_capacity(len);
        if pointer.chunks() == 1 {
            // Most values fit into one row, which a single lookup finds faster than a scan.
            let row_key = codec::value_key(place, 0);
            if let Some(row) = self.view.get(&row_key)? {
                value.extend_from_slice(codec::unseal(&row_key, &row).map_err(|damage| self.corrupt(damage))?);
            }
        } else if pointer.chunks() > 1 {
            let mut damage = None;
            let (from, to) = (codec::value_key(place, 0), codec::value_key(place, pointer.chunks()));
            self.view.scan(&from, &to, &mut |row_key, row| match codec::unseal(row_key, row) {
                Ok(piece) => {
                    value.extend_from_slice(piece);
                    ControlFlow::Continue(())
                }
                Err(found) => {
                    damage = Some(found);
                    ControlFlow::Break(())
                }
            })?;
            damage.map_or(Ok(()), |damage| Err(self.corrupt(damage)))?;
        }
        if value.len() != len {
            return Err(self.corrupt(missing_value_part(place)));
        }
        Ok(Value::new(value))
    }
}

/// The damage report for a value of which a row is missing.
fn missing_value_part(place: LogPosition) -> Damage {
    Damage(format!("a value written at revision {} has lost a part", place.revision))
}

/// Decodes a log row, whose position must be `next` or the first position of the revision after `next`.
fn decode_log(row_key: &[u8], row: &[u8], next: LogPosition) -> Result<(LogPosition, LogRow), Damage> {
    let place = codec::log_place(row_key)?;
    if place == next || (next.sub > 0 && place == LogPosition::first_of(next.revision + 1)) {
        return Ok((place, codec::decode(row_key, row)?));
    }
    Err(Damage(format!("a change at revision {} is missing from the log", next.revision)))
}

/// Maximum number of unwanted rows that a scan reads past to reach the next wanted value.
const MAX_SKIPPED_ROWS: u32 = 16;

/// Reads the first value of `pointers`, and all following values that are close enough for the same scan. Appends the
/// values that were read to `found`, in the order of `pointers`. The scan stops early once `is_over` returns true.
///
/// # Errors
/// `Corrupt` if a row is missing or damaged; any error of the table.
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
            let mut scan = ValueScan { pointers: run, found, value: Vec::new(), chunks: 0, between: 0 };
            scan.take_whole();
            let (mut looked, mut stopped, mut damage) = (0, false, None);
            rows.view().scan(&from, &to, &mut |key, row| {
                looked += 1;
                let flow = scan.row(key, row).unwrap_or_else(|found| {
                    damage = Some(found);
                    ControlFlow::Break(())
                });
                stopped = flow.is_break() || (looked % ROWS_PER_TIME_CHECK == 0 && scan.is_between() && is_over());
                if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            match (damage, scan.pointers.first()) {
                (Some(damage), _) => Err(rows.corrupt(damage)),
                (None, Some(missing)) if !stopped => Err(rows.corrupt(missing_value_part(missing.place))),
                (None, _) => Ok(()),
            }
        }
    }
}

/// True if a scan that reads the value at position `one` will probably soon reach the value at position `other`.
fn is_near(one: LogPosition, other: LogPosition) -> bool {
    let from = if one.revision == other.revision { one.sub } else { 0 };
    one < other && other.revision - one.revision <= 1 && other.sub - from <= MAX_SKIPPED_ROWS
}

/// The state of a scan that reads values.
struct ValueScan<'v> {
    pointers: &'v [Pointer],
    found: &'v mut Vec<Value>,
    /// The part of the current value read so far, and the number of rows that it came from.
    value: Vec<u8>,
    chunks: u32,
    /// Number of unwanted rows that the scan has read since the last wanted row.
    between: u32,
}

impl ValueScan<'_> {
    /// True if no value is partly read, so that the scan can stop at this row.
    fn is_between(&self) -> bool {
        self.chunks == 0
    }

    /// Processes one row that the scan has read. Stops the scan if a separate lookup would find the next value faster.
    fn row(&mut self, key: &[u8], row: &[u8]) -> Result<ControlFlow<()>, Damage> {
        let Some(pointer) = self.pointers.first() else { return Ok(ControlFlow::Break(())) };
        match key.cmp(codec::value_key(pointer.place, self.chunks).as_slice()) {
            Ordering::Less if self.between < MAX_SKIPPED_ROWS => self.between += 1,
            Ordering::Equal => {
                let piece = codec::unseal(key, row)?;
                self.value.reserve_exact((pointer.len as usize).saturating_sub(self.value.len()));
                self.value.extend_from_slice(piece);
                (self.chunks, self.between) = (self.chunks + 1, 0);
                self.take_whole();
            }
            Ordering::Less => return Ok(ControlFlow::Break(())),
            Ordering::Greater => return Err(missing_value_part(pointer.place)),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Moves the values that the scan has read completely to the results. An empty value has no rows and so is complete
    /// at once.
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

    /// Creates a store whose values have zero, one or several rows, and overwrites some of the values, in sequence or
    /// at random positions.
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

    /// Reads all values of `pointers`; also returns the number of calls of `next_values`.
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
    async fn rows_read_together_match_single_reads() {
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
    async fn rows_missing_or_damaged_are_found() {
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
