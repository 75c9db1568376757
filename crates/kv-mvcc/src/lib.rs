#![doc = include_str!("../README.md")]
//!
//! # How it works
//!
//! Turns a key-value engine into a [`kv::Store`] with history, watches and transactions. An engine implements
//! [`Table`]: ordered rows, views, and durable commits. [`MvccStore`] turns a [`Table`] into a store. `codec.rs`
//! documents the layout of a table. A table contains one row for each live key, one log row for each change in the
//! history, each value once, and one row with the state of the store.
//!
//! - **Reads** (`read.rs`) read one revision through a series of short-lived views of the table. To read an older
//!   revision, a read undoes the changes that the log has after that revision.
//! - **Writes** (`writer.rs`, `stage.rs`) pass through one queue; writes that are queued at the same time share a
//!   commit.
//! - **Watches** (`watch.rs`) are cursors on the log.
//! - **Expired history** is removed a few rows with each commit (`writer.rs`), because no task runs in the background.
//! - **Leases** (`leases.rs`) are stored as rows in stores of format 2.
//!
//! The crate `kv-local` adds a folder on disk, and a queue of the processes that wait for the lock on that folder. A
//! [`journal`] between the store and the engine reduces the cost of each commit to a single sync. [`memory`] provides a
//! store in memory for tests.

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
