//! Defines [`Table`], the interface that an engine implements. [`Merge`] adds the rows of an overlay to a scan of the
//! table.

use std::fmt::Debug;
use std::iter::Peekable;
use std::ops::ControlFlow;

use kv::Result;

/// Maximum size of the value of a row in bytes. The store splits larger values over several rows.
///
/// A row's value is limited to 6 KiB because the engine sled stores 17 rows together as one page. sled writes a page of
/// more than 128 KiB to a separate file that it never syncs, and such a page makes a commit 18 times slower.
pub const MAX_ROW_BYTES: usize = 6 * 1024;

/// A write of one row of a table: a new value or a removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Writes a row: the first field is the key, the second field is the value.
    Put(Vec<u8>, Vec<u8>),
    /// Removes the row with the given key if the row exists.
    Delete(Vec<u8>),
}

impl Write {
    /// The key of the row that is written or removed.
    pub fn key(&self) -> &[u8] {
        match self {
            Self::Put(key, _) | Self::Delete(key) => key,
        }
    }

    /// The new value of the row; `None` if the write removes the row.
    pub fn value(&self) -> Option<&[u8]> {
        match self {
            Self::Put(_, value) => Some(value),
            Self::Delete(_) => None,
        }
    }
}

/// The callback of a scan, called with the key and the value of each row. The scan stops if the callback returns
/// `Break`.
pub type Visit<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>;

/// An ordered table of rows, implemented by an engine. All methods of a table may block the calling thread.
///
/// The folder `examples/sqlite` in the source tree contains an implementation. An engine must guarantee:
///
/// 1. a commit is atomic, and durable even against power loss once [`Table::commit`] returns `Ok`;
/// 2. a view is a consistent snapshot: a view shows each commit completely or not at all, and no later commits;
/// 3. no view shows a commit that could still be lost in a power failure;
/// 4. rows are ordered by unsigned byte comparison of their keys.
///
/// After a failed commit, the caller commits nothing more until [`Table::recover`] has succeeded.
pub trait Table: Debug + Send + Sync + 'static {
    /// Opens a view of the table that shows a consistent snapshot. Callers must drop a view soon, because an open view
    /// may block commits and other views. A thread must not open a second view before it drops the first.
    ///
    /// # Errors
    /// `Io` if reading fails; `Corrupt` if the table is damaged.
    fn view(&self) -> Result<Box<dyn View + '_>>;

    /// Commits all of the writes, or none of them. No two writes of a commit have the same key, and the caller never
    /// runs two commits at once.
    ///
    /// # Errors
    /// `NoSpace` or `CommitIo` if the engine failed; nevertheless, the rows may have been committed.
    fn commit(&self, writes: &[Write]) -> Result<()>;

    /// Makes the table usable after a failed commit by reopening the engine. After `recover`, views show the failed
    /// commit either completely or not at all.
    ///
    /// # Errors
    /// `Io` or `Corrupt` if the engine cannot be reopened; the caller can try again.
    fn recover(&self) -> Result<()>;
}

/// A read-only snapshot of a [`Table`].
pub trait View {
    /// Reads the value of a row; `None` if the row does not exist.
    ///
    /// # Errors
    /// `Io` if reading fails; `Corrupt` if the table is damaged.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// Calls `visit` with the rows from `from` (inclusive) to `to` (exclusive), in ascending order, until `visit`
    /// returns `Break`.
    ///
    /// # Errors
    /// `Io` if reading fails; `Corrupt` if the table is damaged.
    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()>;
}

/// The rows of an overlay, in ascending order, that have not been merged into a scan of the table yet. The value `None`
/// in an overlay stands for a removed row.
pub(crate) struct Merge<I: Iterator>(Peekable<I>);

impl<'o, V, I: Iterator<Item = (&'o [u8], Option<V>)>> Merge<I> {
    pub(crate) fn new(overlay: I) -> Self {
        Self(overlay.peekable())
    }

    /// Visits the rows of the overlay with keys before `key`, or all remaining rows if `key` is `None`.
    pub(crate) fn before(
        &mut self,
        key: Option<&[u8]>,
        visit: &mut dyn FnMut(&[u8], V) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        while let Some((row, value)) = self.0.next_if(|(row, _)| key.is_none_or(|key| *row < key)) {
            if let Some(value) = value {
                visit(row, value)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// The overlay's version of the row `key`; the outer `None` means that the overlay does not have this row.
    pub(crate) fn instead_of(&mut self, key: &[u8]) -> Option<Option<V>> {
        self.0.next_if(|(row, _)| *row == key).map(|(_, value)| value)
    }
}
