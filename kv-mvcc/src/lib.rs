//! Revisions, history and watches on top of any ordered table.

pub mod local;
mod table;

pub use table::{MAX_ROW_BYTES, Table, View, Visit, Write};
