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

mod overlay;
mod record;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use kv::{Error, ErrorKind, Operation, Result};

use self::overlay::{Over, Overlay};
use crate::io_error::io_kind;
use crate::table::{Table, View, Write};

/// How many bytes a journal has.
pub const JOURNAL_BYTES: u64 = 256 * 1024;

/// The engine's row that says how far it has got. No other row sorts behind it.
const ROW: &[u8] = b"\xffjournal";

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
    fn noted(&self) -> Noted;

    /// Notes what is durable. It outlives the process, and need not outlive a power loss.
    fn note(&self, noted: Noted);
}

/// The parts that are known to be durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// The number of the last record.
    pub record: u64,
    /// The number of the last checkpoint.
    pub checkpoint: u64,
}

/// A table with a journal in front.
pub struct Journaled {
    table: Box<dyn Table>,
    medium: Box<dyn Medium>,
    bytes: u64,
    store: String,
    overlay: RwLock<Arc<Overlay>>,
    end: Mutex<End>,
}

/// Where the journal stands.
#[derive(Clone, Copy, Debug, Default)]
struct End {
    durable: Noted,
    /// Where the next record goes.
    tail: u64,
}

impl Journaled {
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
        Ok(table.view()?.get(ROW)?.is_some())
    }

    /// Gives the engine all rows that only the journal has.
    ///
    /// # Errors
    /// As [`Table::commit`].
    pub fn checkpoint(&self) -> Result<()> {
        self.move_to_table(&mut self.end(), &[])
    }

    fn end(&self) -> MutexGuard<'_, End> {
        // After a panic the table recovers, which replaces what is there.
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, operation: Operation) -> impl Fn(io::Error) -> Error {
        move |error| Error::new(io_kind(operation, &error), operation, self.store.clone()).with_source(error)
    }

    /// Finds out what the engine does not have, and makes durable what is not known to be.
    fn load(&self) -> Result<(Overlay, End)> {
        let has = match self.table.view()?.get(ROW)? {
            Some(row) => record::decode_noted(&row).ok_or_else(|| self.odd("its row of the journal is damaged"))?,
            None => Noted::default(),
        };
        let failed = self.failed(Operation::Open);
        let records = record::read_all(&*self.medium, self.bytes).map_err(&failed)?;
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
        let mut end = End { durable: Noted { record, checkpoint: has.checkpoint }, tail };
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

    fn append(&self, end: &mut End, writes: &[Write]) -> Result<()> {
        let length = record::encoded_bytes(writes);
        // Rows that the engine never got look like rows that it has lost.
        if length > self.bytes || end.durable.checkpoint == 0 {
            return self.move_to_table(end, writes);
        }
        if end.tail + length > self.bytes {
            self.move_to_table(end, &[])?;
        }
        let number = end.durable.record + 1;
        let failed = self.failed(Operation::Txn);
        self.medium.write(end.tail, &record::encode(number, writes)).map_err(&failed)?;
        self.medium.sync().map_err(&failed)?;
        end.durable.record = number;
        end.tail += length;
        self.medium.note(end.durable);
        let mut overlay = self.overlay.write().unwrap_or_else(PoisonError::into_inner);
        Arc::make_mut(&mut overlay).apply(writes);
        Ok(())
    }

    /// Gives the engine the rows that the journal has, and `writes` on top.
    fn move_to_table(&self, end: &mut End, writes: &[Write]) -> Result<()> {
        // Nobody may see rows of `writes` under those of the journal.
        let mut overlay = self.overlay.write().unwrap_or_else(PoisonError::into_inner);
        self.commit_to_table(end, overlay.with(writes))?;
        *overlay = Arc::default();
        end.tail = 0;
        self.medium.note(end.durable);
        Ok(())
    }

    fn commit_to_table(&self, end: &mut End, mut writes: Vec<Write>) -> Result<()> {
        let now = Noted { checkpoint: end.durable.checkpoint + 1, ..end.durable };
        writes.push(Write::Put(ROW.to_vec(), record::encode_noted(now)));
        self.table.commit(&writes)?;
        end.durable = now;
        Ok(())
    }
}

impl fmt::Debug for Journaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not its rows.
        f.debug_struct("Journaled").field("table", &self.table).field("store", &self.store).finish_non_exhaustive()
    }
}

impl Table for Journaled {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        // Both at once: a checkpoint moves rows from one to the other.
        let overlay = self.overlay.read().unwrap_or_else(PoisonError::into_inner);
        let table = self.table.view()?;
        Ok(Box::new(Over { table, overlay: Arc::clone(&overlay) }))
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
