//! Work on a store's files as a whole: shrinking them, raising their format.

use std::path::Path;
use std::sync::Arc;

use kv::{Operation, Result};

use super::guarded::caught;
use super::open::{Create, Engine, Log, OpenOptions, Room, journaled, open_blocking};
use super::store_folder::{Found, StoreFolder};
use kv_mvcc::FORMAT_WITH_LEASES;
use kv_mvcc::journal::JOURNAL_BYTES;

/// The least room that a new store needs on its disk, in bytes, besides a journal. The ballast may be missing.
const LEAST_BYTES: u64 = 64 << 10;

/// Waits for the store lock and makes the files of the store of `engine` in the folder `path` as small as the engine can.
///
/// # Errors
/// Those of [`open_blocking`]; nothing is lost then.
pub fn shrink_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<Room> {
    let folder = StoreFolder::new(engine, path);
    let _lock = folder.take_lock(&options.clone().with_create(Create::Never))?;
    match folder.inspect()? {
        Found::Complete(_) | Found::Unnamed => {}
        Found::Nothing | Found::Unfinished => return Err(folder.place.missing()),
    }
    let entry = folder.path(engine.entry());
    if engine.log() == Log::Journal {
        // Records that only the journal has remove rows from the engine, too.
        let head = Arc::new(folder.open_head()?);
        let table = caught(&folder.place, Operation::Open, || engine.open(&entry, &folder.place.store))?;
        let table = journaled(&folder, head, table)?;
        caught(&folder.place, Operation::Compact, || table.checkpoint())?;
    }
    caught(&folder.place, Operation::Compact, || engine.shrink(&entry, &folder.place.store))
}

/// Fails where a store of `engine` could not be made in the folder `path`, as far as is known without making anything:
/// there is no permission, a file is in the way, what is in the folder is somebody else's, or the disk is full.
///
/// # Errors
/// Those with which making it would fail.
pub fn could_be_made(engine: &dyn Engine, path: &Path) -> Result<()> {
    let log_bytes = if engine.log() == Log::Journal { JOURNAL_BYTES } else { 0 };
    StoreFolder::new(engine, path).could_be_made(LEAST_BYTES + log_bytes)
}

/// The formats of a store before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upgraded {
    /// The format that its rows had.
    pub from: u32,
    /// The newest format, which they have now.
    pub to: u32,
}

/// Waits for the store lock and raises the store of `engine` in the folder `path` to the newest format. Every older format
/// that is still read has its step here: from 1 to 2 no row is written anew. A store that was raised is refused by programs that do not
/// know the format.
///
/// # Errors
/// Those of [`open_blocking`], among them `UnknownFormat` for a store that is newer; those of writing.
pub fn upgrade_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<Upgraded> {
    let store = open_blocking(engine, path, &options.clone().with_create(Create::Never))?;
    let from = store.status().format;
    if from < FORMAT_WITH_LEASES {
        store.raise_format(FORMAT_WITH_LEASES)?;
    }
    Ok(Upgraded { from, to: FORMAT_WITH_LEASES })
}

/// Makes an empty store of `engine` in the folder `path`, in the format that the options name. False if there is a store already,
/// which stays as it is. This blocks.
///
/// # Errors
/// Those of [`open_blocking`].
pub fn create_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<bool> {
    match StoreFolder::new(engine, path).inspect()? {
        Found::Complete(_) | Found::Unnamed => Ok(false),
        Found::Nothing | Found::Unfinished => {
            let store = open_blocking(engine, path, &options.clone().with_create(Create::IfMissing))?;
            // Another process may have made it meanwhile.
            Ok(store.status().format == options.format)
        }
    }
}

/// Says what [`upgrade_blocking`] would do, and writes nothing. This blocks.
///
/// # Errors
/// Those of [`open_blocking`].
pub fn would_upgrade_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<Upgraded> {
    let store = open_blocking(engine, path, &options.clone().with_create(Create::Never))?;
    Ok(Upgraded { from: store.status().format, to: FORMAT_WITH_LEASES })
}
