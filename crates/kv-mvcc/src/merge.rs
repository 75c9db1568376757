//! Rows of an overlay, merged into a scan of what lies below.

use std::iter::Peekable;
use std::ops::ControlFlow;

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
