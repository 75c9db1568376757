#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! All engines that keep a store on disk share the folder, the queue in front of it, and its identity.
//!
//! A store is a folder, private to its owner:
//!
//! ```text
//! queue      the lock file: one process at a time, first come first served (never unlinked)
//! head       the newest revision, to notice an engine that comes back with less
//! journal    the newest commits, which the engine does not have yet (only in front of some engines)
//! store.id   engine, layout and id; written last, so it tells a damaged store from a new one
//! creating   there only while the store is being made
//! ballast    room on the disk that only a release may use
//! ...        the engine's own file or folder
//! ```

mod errors;
mod folder;
mod maintenance;
mod open;
mod queue;
mod reserved_space;
mod revision_file;
mod store_folder;
#[cfg(feature = "testing")]
pub mod testing;

pub use errors::store_of;
pub use maintenance::{
    FolderReplacement, FolderStaging, FormatUpgrade, LockHolder, QueueFile, StorePeek, check_creatable,
    create_blocking, newest, peek, preview_upgrade_blocking, shrink_blocking, upgrade_blocking, waiting,
};
pub use open::{CommitLog, Create, Engine, OpenOptions, Sharing, SpareSpace, open, open_blocking};
pub use store_folder::engine_in;
