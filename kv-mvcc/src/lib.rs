//! Revisions, history and watches on top of any ordered table.

mod codec;
mod entries;
mod error;
pub mod local;
mod memory;
mod open;
mod options;
mod pinned;
mod rows;
mod stage;
mod store;
mod sweep;
mod table;
mod verify;
mod watch;
mod writer;

pub use memory::{MemoryTable, memory};
pub use options::{Clock, Options, Retention};
pub use store::{MvccStore, Status};
pub use table::{MAX_ROW_BYTES, Table, View, Visit, Write};
pub use verify::Verified;
