//! The seam: what an engine must offer so that everything else can stand on it. [`Merge`] adds the rows of an overlay to a scan.

use std::fmt::Debug;
use std::iter::Peekable;
use std::ops::ControlFlow;

use kv::Result;

/// The largest value of one row, in bytes. Larger values are cut into several rows above this seam.
///
/// sled writes 17 rows as one page and puts a page of more than 128 KiB in a file of its own, which it never syncs and
/// which makes a commit 18 times as slow.
pub const MAX_ROW_BYTES: usize = 6 * 1024;

/// A change of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Set the row.
    Put(Vec<u8>, Vec<u8>),
    /// Remove the row, if it is there.
    Delete(Vec<u8>),
}

impl Write {
    /// The key of the row.
    pub fn key(&self) -> &[u8] {
        match self {
            Self::Put(key, _) | Self::Delete(key) => key,
        }
    }

    /// The new value of the row; `None` if it is removed.
    pub fn value(&self) -> Option<&[u8]> {
        match self {
            Self::Put(_, value) => Some(value),
            Self::Delete(_) => None,
        }
    }
}

/// The callback of a scan, with each row's key and value; the scan stops on `Break`.
pub type Visit<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>;

/// An ordered table of rows on some engine. Calls block; they are made on threads that may.
///
/// `examples/sqlite` in the source tree shows a whole one. An engine must see to it that
///
/// 1. a commit is atomic, and durable (against power loss too) when it returns `Ok`;
/// 2. a view is a consistent snapshot: it shows all of a commit or nothing, and no later one;
/// 3. no view shows a commit that is not durable yet;
/// 4. rows are ordered by unsigned byte comparison of their keys.
///
/// The caller's duty in return: after a commit that failed it makes no other one before [`Table::recover`] has succeeded.
pub trait Table: Debug + Send + Sync + 'static {
    /// A snapshot of the table. It is short-lived: a view may hold up commits, and other views, as long as it exists. No
    /// thread holds two at once.
    ///
    /// # Errors
    /// `Io`, `Corrupt`.
    fn view(&self) -> Result<Box<dyn View + '_>>;

    /// Applies all writes or none; no row is named twice. Only one commit runs at a time: callers see to that.
    ///
    /// # Errors
    /// `NoSpace` or `CommitIo` if the engine failed and what it did is not known.
    fn commit(&self, writes: &[Write]) -> Result<()>;

    /// Makes the table usable again after a failed commit, by reopening the engine: afterwards views show what is
    /// really there, all of that commit or nothing of it.
    ///
    /// # Errors
    /// `Io`, `Corrupt`; then it can be tried again.
    fn recover(&self) -> Result<()>;
}

/// A snapshot of a [`Table`].
pub trait View {
    /// The value of a row.
    ///
    /// # Errors
    /// `Io`, `Corrupt`.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// Calls `visit` with the rows from `from` (inclusive) to `to` (exclusive), ascending, until it breaks.
    ///
    /// # Errors
    /// `Io`, `Corrupt`.
    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()>;
}

/// The rows of an overlay that the scan has not reached, ascending; `None` in place of a value says that the row was removed.
pub(crate) struct Merge<I: Iterator>(Peekable<I>);

impl<'o, V, I: Iterator<Item = (&'o [u8], Option<V>)>> Merge<I> {
    pub(crate) fn new(overlay: I) -> Self {
        Self(overlay.peekable())
    }

    /// Shows the rows that the overlay has before `key`, or all that are left.
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

    /// The overlay's version of the row that the scan has reached: `None` if it has none.
    pub(crate) fn instead_of(&mut self, key: &[u8]) -> Option<Option<V>> {
        self.0.next_if(|(row, _)| *row == key).map(|(_, value)| value)
    }
}
