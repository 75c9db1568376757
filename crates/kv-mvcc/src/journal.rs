//! Puts a journal in front of an engine's table. With the journal, each commit needs only one sync, regardless of the
//! number of pages that the engine would write.
//!
//! A commit appends one record to a journal file of fixed size, and syncs this file once. The rows of the commit stay
//! in memory, in an overlay that hides the engine's older rows. When the journal file is full, a checkpoint moves all
//! rows of the overlay to the engine in one commit. After the checkpoint, the next record starts at the front of the
//! journal file. Opening the table reads the journal records that the engine does not have yet, at most a few hundred
//! KiB, usually without moving them to the engine. A process that commits once and exits rarely writes to the engine,
//! because its commit goes to the journal.
//!
//! The following rules make the journal safe against crashes:
//!
//! - Journal records are numbered without gaps. Each checkpoint also writes a row to the engine with the numbers of the
//!   last journal record and of the checkpoint, which show after a restart which journal records the engine already
//!   has.
//! - The front of the journal file is overwritten only after a durable checkpoint. A reader of the journal stops at a
//!   truncated record, whose checksum is wrong, or at an old record, whose number does not follow the previous record's
//!   number.
//! - A killed process may leave a journal record or a checkpoint that is readable but not durable. Once a journal
//!   record or a checkpoint is durable, [`Medium::note`] saves the record's or checkpoint's number in a note, which a
//!   power failure may destroy. Before any view can show rows, opening a table syncs all journal records and
//!   checkpoints that are not known to be durable.
//!
//! The header of a journal record contains the length of the record's body (4 bytes), the number of the record (8
//! bytes), and a CRC-32 over length, number and body (4 bytes). For each write, the record's body contains the lengths
//! of the key and the value (4 bytes each), and the bytes of the key and the value. The value length
//! `REMOVED_VALUE_LEN` marks a removed row. All numbers in the journal are little endian.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Bound, ControlFlow};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use kv::{Error, ErrorKind, Operation, Result};

use crate::error::io_kind;
use crate::table::{Merge, Table, View, Visit, Write};

/// The size of a journal file in bytes.
pub const JOURNAL_BYTES: u64 = 256 * 1024;

/// The key of the engine's row that records the number of the last checkpoint, and the number of the last journal
/// record that this checkpoint contains. The journal's row sorts after all other rows of the table.
const JOURNAL_ROW_KEY: &[u8] = b"\xffjournal";

/// The storage of a journal, usually a file.
pub trait Medium: fmt::Debug + Send + Sync + 'static {
    /// Reads journal bytes into `buffer` from `offset` on, and returns the number of bytes read. Only at the end of the
    /// medium may `read` fill less than the whole `buffer`.
    ///
    /// # Errors
    /// Any I/O error.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes `bytes` at `offset`, which is entirely within the first [`JOURNAL_BYTES`] bytes of the medium. Until
    /// [`Medium::sync`] returns, the write is not durable and a power failure may undo it.
    ///
    /// # Errors
    /// Any I/O error.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes all bytes that were written to the medium durable.
    ///
    /// # Errors
    /// Any I/O error.
    fn sync(&self) -> io::Result<()>;

    /// Returns the numbers that [`Medium::note`] saved last, or zeros if none were saved. After a power failure,
    /// `noted` may return numbers that were saved earlier than the last ones.
    fn noted(&self) -> DurableParts;

    /// Saves the numbers of the newest durable record and checkpoint. The saved record and checkpoint numbers must
    /// survive a process crash, but not a power failure.
    fn note(&self, noted: DurableParts);
}

/// The numbers of the newest journal record and the newest checkpoint that are known to be durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurableParts {
    /// The number of the newest durable journal record.
    pub record: u64,
    /// The number of the newest durable checkpoint.
    pub checkpoint: u64,
}

/// A table with a journal in front of it.
pub struct JournaledTable {
    table: Box<dyn Table>,
    medium: Box<dyn Medium>,
    bytes: u64,
    store: String,
    overlay: RwLock<Arc<RowOverlay>>,
    end: Mutex<JournalEnd>,
}

#[derive(Clone, Copy, Debug, Default)]
struct JournalEnd {
    durable: DurableParts,
    tail: u64,
}

impl JournaledTable {
    /// Opens a table with the journal on `medium`, which may be empty. `store` is the name of the store for error
    /// messages.
    ///
    /// # Errors
    /// `Corrupt` if the journal does not belong to the table; any error of the table or the medium.
    pub fn open(table: Box<dyn Table>, medium: Box<dyn Medium>, store: &str) -> Result<Self> {
        Self::with_bytes(table, medium, store, JOURNAL_BYTES)
    }

    fn with_bytes(table: Box<dyn Table>, medium: Box<dyn Medium>, store: &str, bytes: u64) -> Result<Self> {
        let store = store.to_owned();
        let new = Self { table, medium, bytes, store, overlay: RwLock::default(), end: Mutex::default() };
        let (overlay, end) = new.load()?;
        Ok(Self { overlay: RwLock::new(Arc::new(overlay)), end: Mutex::new(end), ..new })
    }

    /// True if the table has been opened with a journal before. A table that was used with a journal must come with a
    /// journal file of [`JOURNAL_BYTES`]: the file is extended to this length, and synced, before its first use.
    ///
    /// # Errors
    /// Any error of the table.
    pub fn has_begun(table: &dyn Table) -> Result<bool> {
        Ok(table.view()?.get(JOURNAL_ROW_KEY)?.is_some())
    }

    /// Moves all rows of the journal to the engine in one commit.
    ///
    /// # Errors
    /// Any error of [`Table::commit`].
    pub fn checkpoint(&self) -> Result<()> {
        self.move_to_table(&mut self.end(), &[])
    }

    fn end(&self) -> MutexGuard<'_, JournalEnd> {
        // The lock may be poisoned by a panic, but `recover` replaces the data under it after every panic.
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, operation: Operation) -> impl Fn(io::Error) -> Error {
        move |error| Error::new(io_kind(operation, &error), operation, self.store.clone()).with_source(error)
    }

    /// Reads the journal records that the engine does not have yet. Syncs all journal records and checkpoints that
    /// [`Medium::note`] has not recorded as durable.
    fn load(&self) -> Result<(RowOverlay, JournalEnd)> {
        let has = match self.table.view()?.get(JOURNAL_ROW_KEY)? {
            Some(row) => decode_noted(&row).ok_or_else(|| self.odd("its row of the journal is damaged"))?,
            None => DurableParts::default(),
        };
        let failed = self.failed(Operation::Open);
        let records = read_records(&*self.medium, self.bytes).map_err(&failed)?;
        // The first commit of a table is always a checkpoint, so a journal with records implies an earlier checkpoint.
        if records.first > has.record + 1 || (records.first > 0 && has.checkpoint == 0) {
            return Err(self.odd("its journal and the engine's files do not belong together"));
        }
        let noted = self.medium.noted();
        let last = records.last();
        if last > noted.record {
            // A failed sync may have marked dirty pages as clean in the page cache, so the records are written again.
            self.medium.write(0, &records.bytes).map_err(&failed)?;
            self.medium.sync().map_err(&failed)?;
        }
        let mut overlay = records.after(has.record).ok_or_else(|| self.odd("a record of its journal is damaged"))?;
        let record = last.max(has.record);
        let tail = records.bytes.len() as u64;
        let mut end = JournalEnd { durable: DurableParts { record, checkpoint: has.checkpoint }, tail };
        if has.checkpoint > noted.checkpoint {
            // The newest checkpoint in the engine may not be durable yet; the next commit to the engine makes it
            // durable.
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
        // Large commits and the first commit of a table bypass the journal. If the journal contained the first commit,
        // `load` would find a journal without a checkpoint and conclude that the engine has lost its rows.
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

    /// Moves the rows of the journal and the new `writes` to the engine in one commit.
    fn move_to_table(&self, end: &mut JournalEnd, writes: &[Write]) -> Result<()> {
        // Keeps the overlay locked during the commit, so that no view combines the new table with the old overlay.
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
        // The debug output omits the overlay, which can be large.
        f.debug_struct("JournaledTable").field("table", &self.table).field("store", &self.store).finish_non_exhaustive()
    }
}

impl Table for JournaledTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        // Without the overlay's lock, a checkpoint could move rows to the table after the table's view is opened and
        // before the overlay is read.
        let overlay = self.overlay.read().unwrap_or_else(PoisonError::into_inner);
        let table = self.table.view()?;
        Ok(Box::new(OverlayView { table, overlay: Arc::clone(&overlay) }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        self.append(&mut self.end(), writes)
    }

    fn recover(&self) -> Result<()> {
        let mut end = self.end();
        // Holding the overlay's lock keeps views from combining the new overlay with the old table, or the old overlay
        // with the new table.
        let mut overlay = self.overlay.write().unwrap_or_else(PoisonError::into_inner);
        self.table.recover()?;
        let (found, stands) = self.load()?;
        (*overlay, *end) = (Arc::new(found), stands);
        Ok(())
    }
}

/// The rows written since the last checkpoint, by row key; `None` stands for a removed row.
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

    /// Merges the overlay's writes with the later `writes`, and sorts the result by key.
    fn with(&self, writes: &[Write]) -> Vec<Write> {
        if self.0.is_empty() {
            // Sorts `writes` instead of filling a map: only large commits take this path, and sorting them is several
            // times faster.
            let mut writes = writes.to_vec();
            writes.sort_unstable_by(|one, other| one.key().cmp(other.key()));
            return writes;
        }
        let mut all = self.clone();
        all.apply(writes);
        all.into_writes()
    }

    fn into_writes(self) -> Vec<Write> {
        let write = |(key, value)| match value {
            Some(value) => Write::Put(key, value),
            None => Write::Delete(key),
        };
        self.0.into_iter().map(write).collect()
    }

    /// The overlay's rows from the key `from` (inclusive) to the key `to` (exclusive), for merging into a scan of the
    /// table. `from` must not be greater than `to`.
    fn between<'a>(
        &'a self,
        from: &[u8],
        to: &[u8],
    ) -> Merge<impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)> + use<'a>> {
        let range = self.0.range::<[u8], _>((Bound::Included(from), Bound::Excluded(to)));
        Merge::new(range.map(|(key, value)| (key.as_slice(), value.as_deref())))
    }
}

/// A view of a table with the rows of an overlay on top.
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
/// The value length that marks a removed row in a journal record.
const REMOVED_VALUE_LEN: u32 = u32::MAX;
/// Number of bytes that one read of the journal requests; most journals are shorter and need only one read.
const READ_CHUNK_BYTES: usize = 64 * 1024;

fn encoded_bytes(writes: &[Write]) -> u64 {
    let bytes = |write: &Write| 8 + write.key().len() + write.value().map_or(0, <[u8]>::len);
    (RECORD_HEADER_BYTES + writes.iter().map(bytes).sum::<usize>()) as u64
}

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

/// The length of `bytes` as a 32-bit number. A length that does not fit into 32 bits becomes `REMOVED_VALUE_LEN - 1`,
/// which exceeds the size of any valid row or commit.
fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(REMOVED_VALUE_LEN - 1)
}

fn checksum(header: &[u8], body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(body);
    hasher.finalize()
}

/// The intact records that were read from a journal.
#[derive(Debug, Default)]
struct Records {
    /// The number of the first intact record; 0 if there are no records.
    first: u64,
    starts: Vec<usize>,
    bytes: Vec<u8>,
}

impl Records {
    /// The number of the last intact record; 0 if there are no records.
    fn last(&self) -> u64 {
        (self.first + self.starts.len() as u64).saturating_sub(1)
    }

    /// The rows of all journal records with a number above `number`; `None` if a record cannot be decoded.
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

/// Reads journal records from the start of the journal, until a record is damaged or its number does not follow the
/// previous one.
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

/// What a decoder finds at a position of the journal: a record, too few bytes, or nothing valid.
enum RecordEnd {
    Record {
        number: u64,
        length: usize,
    },
    /// The bytes read so far are too few to decide whether a record follows.
    Cut,
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

/// Encodes the row that the engine stores for the journal: two numbers and a CRC-32 over both numbers.
fn encode_noted(noted: DurableParts) -> Vec<u8> {
    let mut row = [noted.record.to_le_bytes(), noted.checkpoint.to_le_bytes()].concat();
    row.extend(crc32fast::hash(&row).to_le_bytes());
    row
}

/// Decodes the row that the engine stores for the journal; returns `None` if the row is damaged.
fn decode_noted(row: &[u8]) -> Option<DurableParts> {
    let (record, rest) = row.split_first_chunk()?;
    let (checkpoint, _) = rest.split_first_chunk()?;
    let noted = DurableParts { record: u64::from_le_bytes(*record), checkpoint: u64::from_le_bytes(*checkpoint) };
    (encode_noted(noted) == row).then_some(noted)
}

#[cfg(test)]
mod tests;
