#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! This crate contains what all engines on disk share: the store's folder, the queue for the store lock, and the
//! store's identity.
//!
//! A store is a folder that only its owner can read:
//!
//! ```text
//! queue      the lock file: one process at a time, first come first served (never unlinked)
//! head       the newest revision, to detect an engine that has lost commits
//! journal    the newest commits, which the engine does not have yet (only in front of some engines)
//! store.id   engine, layout and id; written last, so it distinguishes a damaged store from a new one
//! creating   exists only while the store is being created
//! ballast    disk space that only a release may use
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
