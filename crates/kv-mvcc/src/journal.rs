//! A journal in front of a table: one sync for a commit, however the engine spreads its pages.
//!
//! A commit is one record, appended to a file of fixed size and synced once. Its rows stay in memory, over those of the
//! engine. When the file is full, all of them go to the engine in one commit, a checkpoint, and the next
//! record begins at the front again. An opening of the table reads the records that the engine does not have yet, a few
//! hundred KiB at the most. So most processes that open, commit once and end never write to the engine at all.
//!
//! The rules that keep this safe:
//!
//! - Records are numbered without a gap. The engine has a row that each checkpoint writes with its rows: the number
//!   of the last record in it, and the number of the checkpoint. So engine and journal always fit together.
//! - The front is written again only after a checkpoint that is durable. A record that was cut off does not have its
//!   checksum, and one that is left from before does not have the next number: both end what is read.
//! - A killed process may leave a record, or a checkpoint, that can be read and is not durable. Both are noted when
//!   they are durable, in a place that need not be durable itself ([`Medium::note`]); what is there and not noted is
//!   made durable before anybody sees it.
//!
//! A record is its length without this header (4 bytes), its number (8) and a CRC-32 over both and the rest (4), then for
//! each write the lengths of key and value (4 and 4) and the two. A length of `REMOVED_VALUE_LEN` is that of no value: the row is
//! removed. Numbers are little endian.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Bound, ControlFlow};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use kv::{Error, ErrorKind, Operation, Result};

use crate::error::io_kind;
use crate::table::{Merge, Table, View, Visit, Write};

/// How many bytes a journal has.
pub const JOURNAL_BYTES: u64 = 256 * 1024;

/// The engine's row that says how far it has got. No other row sorts behind it.
const JOURNAL_ROW_KEY: &[u8] = b"\xffjournal";

/// Where a journal is kept.
pub trait Medium: fmt::Debug + Send + Sync + 'static {
    /// Reads what is at `offset`; how many bytes were read is less than asked for only at the end.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes at `offset`, within [`JOURNAL_BYTES`]. It is durable after [`Medium::sync`].
    ///
    /// # Errors
    /// The system's.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes durable what was written.
    ///
    /// # Errors
    /// The system's.
    fn sync(&self) -> io::Result<()>;

    /// The newest note, or an older one: all zeros if that is not known.
    fn noted(&self) -> DurableParts;

    /// Notes what is durable. It outlives the process, and need not outlive a power loss.
    fn note(&self, noted: DurableParts);
}

/// The parts that are known to be durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurableParts {
    /// The number of the last record.
    pub record: u64,
    /// The number of the last checkpoint.
    pub checkpoint: u64,
}

/// A table with a journal in front.
pub struct JournaledTable {
    table: Box<dyn Table>,
    medium: Box<dyn Medium>,
    bytes: u64,
    store: String,
    overlay: RwLock<Arc<RowOverlay>>,
    end: Mutex<JournalEnd>,
}

/// Where the journal stands.
#[derive(Clone, Copy, Debug, Default)]
struct JournalEnd {
    durable: DurableParts,
    /// Where the next record goes.
    tail: u64,
}

impl JournaledTable {
    /// Puts the journal on `medium`, which may be new, in front of `table`. `store` names it in errors.
    ///
    /// # Errors
    /// `Corrupt` if the two do not belong together; those of the table and of the medium.
    pub fn open(table: Box<dyn Table>, medium: Box<dyn Medium>, store: &str) -> Result<Self> {
        Self::with_bytes(table, medium, store, JOURNAL_BYTES)
    }

    fn with_bytes(table: Box<dyn Table>, medium: Box<dyn Medium>, store: &str, bytes: u64) -> Result<Self> {
        let store = store.to_owned();
        let new = Self { table, medium, bytes, store, overlay: RwLock::default(), end: Mutex::default() };
        let (overlay, end) = new.load()?;
        Ok(Self { overlay: RwLock::new(Arc::new(overlay)), end: Mutex::new(end), ..new })
    }

    /// True if a table has been behind a journal. The journal had its whole length by then, since it is made durable first.
    ///
    /// # Errors
    /// Those of the table.
    pub fn has_begun(table: &dyn Table) -> Result<bool> {
        Ok(table.view()?.get(JOURNAL_ROW_KEY)?.is_some())
    }

    /// Gives the engine all rows that only the journal has.
    ///
    /// # Errors
    /// As [`Table::commit`].
    pub fn checkpoint(&self) -> Result<()> {
        self.move_to_table(&mut self.end(), &[])
    }

    fn end(&self) -> MutexGuard<'_, JournalEnd> {
        // After a panic the table recovers, which replaces what is there.
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, operation: Operation) -> impl Fn(io::Error) -> Error {
        move |error| Error::new(io_kind(operation, &error), operation, self.store.clone()).with_source(error)
    }

    /// Finds out what the engine does not have, and makes durable what is not known to be.
    fn load(&self) -> Result<(RowOverlay, JournalEnd)> {
        let has = match self.table.view()?.get(JOURNAL_ROW_KEY)? {
            Some(row) => decode_noted(&row).ok_or_else(|| self.odd("its row of the journal is damaged"))?,
            None => DurableParts::default(),
        };
        let failed = self.failed(Operation::Open);
        let records = read_records(&*self.medium, self.bytes).map_err(&failed)?;
        // The first commit of all is a checkpoint, so with records there is one.
        if records.first > has.record + 1 || (records.first > 0 && has.checkpoint == 0) {
            return Err(self.odd("its journal and the engine's files do not belong together"));
        }
        let noted = self.medium.noted();
        let last = records.last();
        if last > noted.record {
            // Pages that a failed sync has left clean in the system's memory must be written once more.
            self.medium.write(0, &records.bytes).map_err(&failed)?;
            self.medium.sync().map_err(&failed)?;
        }
        let mut overlay = records.after(has.record).ok_or_else(|| self.odd("a record of its journal is damaged"))?;
        let record = last.max(has.record);
        let tail = records.bytes.len() as u64;
        let mut end = JournalEnd { durable: DurableParts { record, checkpoint: has.checkpoint }, tail };
        if has.checkpoint > noted.checkpoint {
            // A commit makes durable what the engine shows.
            self.commit_to_table(&mut end, std::mem::take(&mut overlay).into_writes())?;
            end.tail = 0;
        } else if last <= has.record {
            end.tail = 0;
        }
        if end.durable != noted {
            self.medium.note(end.durable);
        }
        Ok((overlay, end))
    }

    fn odd(&self, what: &str) -> Error {
        Error::new(ErrorKind::Corrupt, Operation::Open, self.store.clone()).with_source(what)
    }

    fn append(&self, end: &mut JournalEnd, writes: &[Write]) -> Result<()> {
        let length = encoded_bytes(writes);
        // Rows that the engine never got look like rows that it has lost.
        if length > self.bytes || end.durable.checkpoint == 0 {
            return self.move_to_table(end, writes);
        }
        if end.tail + length > self.bytes {
            self.move_to_table(end, &[])?;
        }
        let number = end.durable.record + 1;
        let failed = self.failed(Operation::Txn);
        self.medium.write(end.tail, &encode_record(number, writes)).map_err(&failed)?;
        self.medium.sync().map_err(&failed)?;
        end.durable.record = number;
        end.tail += length;
        self.medium.note(end.durable);
        let mut overlay = self.overlay.write().unwrap_or_else(PoisonError::into_inner);
        Arc::make_mut(&mut overlay).apply(writes);
        Ok(())
    }

    /// Gives the engine the rows that the journal has, and `writes` on top.
    fn move_to_table(&self, end: &mut JournalEnd, writes: &[Write]) -> Result<()> {
        // Nobody may see rows of `writes` under those of the journal.
        let mut overlay = self.overlay.write().unwrap_or_else(PoisonError::into_inner);
        self.commit_to_table(end, overlay.with(writes))?;
        *overlay = Arc::default();
        end.tail = 0;
        self.medium.note(end.durable);
        Ok(())
    }

    fn commit_to_table(&self, end: &mut JournalEnd, mut writes: Vec<Write>) -> Result<()> {
        let now = DurableParts { checkpoint: end.durable.checkpoint + 1, ..end.durable };
        writes.push(Write::Put(JOURNAL_ROW_KEY.to_vec(), encode_noted(now)));
        self.table.commit(&writes)?;
        end.durable = now;
        Ok(())
    }
}

impl fmt::Debug for JournaledTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not its rows.
        f.debug_struct("Journaled").field("table", &self.table).field("store", &self.store).finish_non_exhaustive()
    }
}

impl Table for JournaledTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        // Both at once: a checkpoint moves rows from one to the other.
        let overlay = self.overlay.read().unwrap_or_else(PoisonError::into_inner);
        let table = self.table.view()?;
        Ok(Box::new(OverlayView { table, overlay: Arc::clone(&overlay) }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        self.append(&mut self.end(), writes)
    }

    fn recover(&self) -> Result<()> {
        let mut end = self.end();
        // No view may show the rows of one beside older ones of the other.
        let mut overlay = self.overlay.write().unwrap_or_else(PoisonError::into_inner);
        self.table.recover()?;
        let (found, stands) = self.load()?;
        (*overlay, *end) = (Arc::new(found), stands);
        Ok(())
    }
}

/// The changes of rows since the table was written: their value, or `None` if they were removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RowOverlay(BTreeMap<Vec<u8>, Option<Vec<u8>>>);

impl RowOverlay {
    fn apply(&mut self, writes: &[Write]) {
        writes.iter().for_each(|write| self.set(write.key(), write.value()));
    }

    fn set(&mut self, key: &[u8], value: Option<&[u8]>) {
        let value = value.map(<[u8]>::to_vec);
        match self.0.get_mut(key) {
            Some(row) => *row = value,
            None => drop(self.0.insert(key.to_vec(), value)),
        }
    }

    /// The writes that bring the table up to date, and these writes with them, ascending.
    fn with(&self, writes: &[Write]) -> Vec<Write> {
        if self.0.is_empty() {
            // A large commit passes the journal by, and a list is sorted in a fraction of the time that filling a map takes.
            let mut writes = writes.to_vec();
            writes.sort_unstable_by(|one, other| one.key().cmp(other.key()));
            return writes;
        }
        let mut all = self.clone();
        all.apply(writes);
        all.into_writes()
    }

    /// The writes that bring the table up to date.
    fn into_writes(self) -> Vec<Write> {
        let write = |(key, value)| match value {
            Some(value) => Write::Put(key, value),
            None => Write::Delete(key),
        };
        self.0.into_iter().map(write).collect()
    }

    /// The rows between `from` and `to`, to be merged into a scan of the table; `from` must not be behind `to`.
    fn between<'a>(
        &'a self,
        from: &[u8],
        to: &[u8],
    ) -> Merge<impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)> + use<'a>> {
        let range = self.0.range::<[u8], _>((Bound::Included(from), Bound::Excluded(to)));
        Merge::new(range.map(|(key, value)| (key.as_slice(), value.as_deref())))
    }
}

/// A view of a table through an overlay.
struct OverlayView<'t> {
    table: Box<dyn View + 't>,
    overlay: Arc<RowOverlay>,
}

impl View for OverlayView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        match self.overlay.0.get(key) {
            Some(value) => Ok(value.clone()),
            None => self.table.get(key),
        }
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        let mut over = self.overlay.between(from, to);
        let mut flow = ControlFlow::Continue(());
        self.table.scan(from, to, &mut |key, value| {
            flow = over.before(Some(key), visit);
            let below = (key != JOURNAL_ROW_KEY).then_some(value);
            if flow.is_continue()
                && let Some(value) = over.instead_of(key).unwrap_or(below)
            {
                flow = visit(key, value);
            }
            flow
        })?;
        if flow.is_continue() {
            let _ = over.before(None, visit);
        }
        Ok(())
    }
}

const RECORD_HEADER_BYTES: usize = 16;
const SUM_AT: usize = 12;
/// The length of the value of a row that is removed.
const REMOVED_VALUE_LEN: u32 = u32::MAX;
/// How much is read at once: most journals that are not read to their end hold less.
const READ_CHUNK_BYTES: usize = 64 * 1024;

/// How long a record of these writes is.
fn encoded_bytes(writes: &[Write]) -> u64 {
    let bytes = |write: &Write| 8 + write.key().len() + write.value().map_or(0, <[u8]>::len);
    (RECORD_HEADER_BYTES + writes.iter().map(bytes).sum::<usize>()) as u64
}

/// The record with this number.
fn encode_record(number: u64, writes: &[Write]) -> Vec<u8> {
    let mut record = vec![0; RECORD_HEADER_BYTES];
    for write in writes {
        record.extend(length(write.key()).to_le_bytes());
        record.extend(write.value().map_or(REMOVED_VALUE_LEN, length).to_le_bytes());
        record.extend(write.key());
        record.extend(write.value().unwrap_or_default());
    }
    let body = record.split_off(RECORD_HEADER_BYTES);
    record[..4].copy_from_slice(&length(&body).to_le_bytes());
    record[4..SUM_AT].copy_from_slice(&number.to_le_bytes());
    let sum = checksum(&record[..SUM_AT], &body);
    record[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
    record.extend(body);
    record
}

/// Larger than any row or commit can be.
fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(REMOVED_VALUE_LEN - 1)
}

fn checksum(header: &[u8], body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(body);
    hasher.finalize()
}

/// The records of a journal.
#[derive(Debug, Default)]
struct Records {
    /// The number of the first one; 0 without any.
    first: u64,
    /// Where each one begins.
    starts: Vec<usize>,
    /// All of them.
    bytes: Vec<u8>,
}

impl Records {
    /// The number of the last one; 0 without any.
    fn last(&self) -> u64 {
        (self.first + self.starts.len() as u64).saturating_sub(1)
    }

    /// The rows of those after the record `number`; nothing if one of them cannot be read.
    fn after(&self, number: u64) -> Option<RowOverlay> {
        let mut overlay = RowOverlay::default();
        let skip = usize::try_from((number + 1).saturating_sub(self.first)).ok()?;
        let ends = self.starts.iter().skip(1).copied().chain([self.bytes.len()]);
        for (start, end) in self.starts.iter().zip(ends).skip(skip) {
            let mut body = self.bytes.get(start + RECORD_HEADER_BYTES..end)?;
            while !body.is_empty() {
                let (key, value) = (take_number(&mut body)?, take_number(&mut body)?);
                let key = take(&mut body, key)?;
                let value = if value == REMOVED_VALUE_LEN { None } else { Some(take(&mut body, value)?) };
                overlay.set(key, value);
            }
        }
        Some(overlay)
    }
}

fn take<'a>(bytes: &mut &'a [u8], length: u32) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length as usize)?;
    *bytes = rest;
    Some(taken)
}

fn take_number(bytes: &mut &[u8]) -> Option<u32> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*taken))
}

/// Reads the records that are whole and follow one another.
fn read_records(medium: &dyn Medium, capacity: u64) -> io::Result<Records> {
    let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
    let mut records = Records::default();
    let (mut bytes, mut end, mut at_end) = (Vec::new(), 0, false);
    loop {
        match next_record(&bytes[end..], &records) {
            RecordEnd::Record { number, length } => {
                if records.starts.is_empty() {
                    records.first = number;
                }
                records.starts.push(end);
                end += length;
            }
            RecordEnd::Cut if !at_end && bytes.len() < capacity => {
                let have = bytes.len();
                bytes.resize((have + READ_CHUNK_BYTES).min(capacity), 0);
                let read = medium.read(have as u64, &mut bytes[have..])?;
                bytes.truncate(have + read);
                at_end = read == 0;
            }
            RecordEnd::Cut | RecordEnd::Nothing => break,
        }
    }
    bytes.truncate(end);
    records.bytes = bytes;
    Ok(records)
}

/// The kind of the bytes behind a record.
enum RecordEnd {
    /// The next record.
    Record { number: u64, length: usize },
    /// Too few to tell.
    Cut,
    /// Not the next record.
    Nothing,
}

fn next_record(bytes: &[u8], records: &Records) -> RecordEnd {
    let Some((header, rest)) = bytes.split_first_chunk::<RECORD_HEADER_BYTES>() else { return RecordEnd::Cut };
    let [a, b, c, d, number @ .., s, t, u, v] = *header;
    let (body, number) = (u32::from_le_bytes([a, b, c, d]) as usize, u64::from_le_bytes(number));
    let is_next = number != 0 && (records.starts.is_empty() || number == records.last() + 1);
    if !is_next {
        return RecordEnd::Nothing;
    }
    let Some(body) = rest.get(..body) else { return RecordEnd::Cut };
    if checksum(&header[..SUM_AT], body) != u32::from_le_bytes([s, t, u, v]) {
        return RecordEnd::Nothing;
    }
    RecordEnd::Record { number, length: RECORD_HEADER_BYTES + body.len() }
}

/// The engine's row: two numbers and the CRC-32 of both.
fn encode_noted(noted: DurableParts) -> Vec<u8> {
    let mut row = [noted.record.to_le_bytes(), noted.checkpoint.to_le_bytes()].concat();
    row.extend(crc32fast::hash(&row).to_le_bytes());
    row
}

/// The contents of the engine's row; nothing if it is damaged.
fn decode_noted(row: &[u8]) -> Option<DurableParts> {
    let (record, rest) = row.split_first_chunk()?;
    let (checkpoint, _) = rest.split_first_chunk()?;
    let noted = DurableParts { record: u64::from_le_bytes(*record), checkpoint: u64::from_le_bytes(*checkpoint) };
    (encode_noted(noted) == row).then_some(noted)
}

#[cfg(test)]
mod tests;
