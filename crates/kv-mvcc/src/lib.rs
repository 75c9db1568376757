#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! Revisions, history and watches on top of any ordered table.
//!
//! An engine offers a [`Table`]: rows in order, views, and commits that are durable. [`MvccStore`] makes a
//! [`kv::Store`] of it. The layout of a table is in `codec.rs`; in short, there is a row for each live key, a log of
//! all changes that are still history, each value once, and one row that says where the store stands.
//!
//! - **Reading** (`read.rs`) looks at one revision through short views, and undoes for itself what the log says has
//!   changed since.
//! - **Writing** (`writer.rs`, `stage.rs`) goes through one queue; what waits together is committed together.
//! - **Watching** (`watch.rs`) is a cursor on the log.
//! - **History** goes a few rows with each commit (`writer.rs`), since nothing runs in the background.
//! - **Leases** (`leases.rs`) are rows as well, in stores of format 2.
//!
//! Stores on disk share the crate `kv-local`: the folder, and the queue of the processes that want it. Between them and the
//! engine is a [`journal`], so that a commit is one sync. [`memory`] is a store
//! for tests.

mod codec;
mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod journal;
mod leases;
mod memory;
mod open;
mod options;
mod read;
mod rows;
mod stage;
mod store;
mod table;
mod watch;
mod writer;

pub use codec::{FORMAT, FORMAT_WITH_LEASES, revision_of};
pub use error::{ENGINE_GAVE_UP, caught, io_kind, unknown_io};
pub use memory::{MemoryTable, memory};
pub use options::{Blocking, Clock, Inspection, Options, Retention, SpaceReserve};
pub use store::{HistoryShare, OldestRevision, SnapshotPage};

pub use open::Verification;
pub use store::{MvccStore, StoreStatus};
pub use table::{MAX_ROW_BYTES, Table, View, Visit, Write};
pub use watch::Changes;
