//! What the author of a store implements to have it judged.

use std::error::Error;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kv::{ErrorKind, Operation, Store};

use crate::case::Tenancy;

/// Whatever went wrong in an environment.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Something that a case may need and that not every environment can do.
///
/// An ability says what the surroundings of a store allow, never which rules the store follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Ability {
    /// Hand out a store to which nothing was ever written, rather than one that was merely emptied.
    New,
    /// Close the store and open it again ([`Fixture::reopen`]).
    Reopen,
    /// Close the store under handles that are still held ([`Fixture::close`]).
    Close,
    /// Say how much room the store takes ([`Fixture::stored_bytes`]).
    Measure,
    /// Open the store in another process, by its address ([`Fixture::address`], [`Harness::join`]). The suite runs the
    /// program that it is in once more; see [`play_role`](crate::play_role).
    Processes,
    /// A process that has joined holds the data itself and alone: killing it is a crash of the store. Goes together
    /// with [`Processes`](Self::Processes), [`Reopen`](Self::Reopen) and [`Close`](Self::Close).
    Embedded,
    /// Whoever holds the data can be killed. Never listed: it comes with [`Embedded`](Self::Embedded).
    Crash,
    /// Keep a store's files below a folder that the case gives ([`Harness::address_in`]).
    Folder,
    /// Say which files have the data, so that they can be damaged ([`Fixture::files`]). Goes together with
    /// [`Folder`](Self::Folder).
    Damage,
    /// Turn a store into one of a later version of the program ([`Fixture::make_newer`]).
    Format,
    /// Mount a small file system that no other process sees: `unshare` and `mount` are there and may be used.
    Mount,
    /// Look at the system calls of a process: `strace` is there and may be used.
    Trace,
    /// Keep the store on a disk that loses power ([`Fixture::cut_power_after`], [`Fixture::restore_power`]).
    PowerLoss,
}

impl Ability {
    /// Why a case that needs this does not run where it is missing.
    pub fn missing(self) -> &'static str {
        match self {
            Self::New => "this environment has no new stores",
            Self::Reopen => "this environment cannot open a store again",
            Self::Close => "this environment cannot close a store",
            Self::Measure => "this environment cannot measure a store",
            Self::Processes => "this environment has no other processes",
            Self::Embedded => "no process holds the data by itself",
            Self::Crash => "this environment cannot kill whoever holds the data",
            Self::Folder => "this environment does not say where a store is kept",
            Self::Damage => "this environment has no files to damage",
            Self::Format => "this environment has no stores of a later version",
            Self::Mount => "this environment may not mount a file system",
            Self::Trace => "this environment cannot trace system calls",
            Self::PowerLoss => "this environment cannot cut the power",
        }
    }

    /// Whether an environment with these abilities has this one.
    pub(crate) fn is_among(self, abilities: &[Self]) -> bool {
        match self {
            Self::Crash => abilities.contains(&Self::Embedded),
            _ => abilities.contains(&self),
        }
    }
}

/// Makes stores for cases.
///
/// Cases run in parallel, so `fresh` is called from several tasks at once. It runs on a tokio runtime and must not block
/// its thread.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// What this environment can do. A case that needs anything else is ignored, with the reason shown, and has to stand
    /// in the list that the caller of [`main`](crate::main) gives.
    fn abilities(&self) -> &[Ability];

    /// Whether others use the stores as well. Cases that need a store of their own are then ignored.
    ///
    /// Nobody does unless told; [`Beside`](crate::Beside) makes an environment in which others do.
    fn tenancy(&self) -> Tenancy {
        Tenancy::Exclusive
    }

    /// An empty store that nobody else uses.
    ///
    /// # Errors
    /// Whatever kept it from being made; the case that asked fails.
    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError>;

    /// Opens the store that another process, or this one, knows by this address, and makes it if it is not there. While
    /// another one has it, this waits for so long and no longer. [`Ability::Processes`].
    ///
    /// # Errors
    /// What the store's own way of opening says: `Locked` if it was in use to the end, `Corrupt`, and so on.
    async fn join(&self, address: &str, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        let _ = wait;
        Err(kv::Error::new(ErrorKind::Unsupported, Operation::Open, address.to_owned())
            .with_detail("the harness lists Processes but cannot join"))
    }

    /// The address of a store, there or not, whose files are all below this folder. [`Ability::Folder`].
    ///
    /// # Errors
    /// If the folder cannot be named.
    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        Err(format!("the harness lists Folder but has no address for {}", folder.display()).into())
    }
}

/// One store for one case, with all that has to live as long as it does: a temporary folder, a server.
///
/// Dropping it takes the store down; what cannot be done while dropping is for [`finish`](Self::finish). A method whose [`Ability`] the harness does not list is never called.
#[async_trait]
pub trait Fixture: Debug + Send + Sync {
    /// The store.
    fn store(&self) -> Arc<dyn Store>;

    /// Another handle on the same store, as far from the first one as the environment allows: another client of a server,
    /// or else a clone.
    ///
    /// # Errors
    /// Whatever kept it from being made.
    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(self.store())
    }

    /// Closes the store and opens it again; afterwards [`store`](Self::store) hands out the new one. All handles and
    /// streams that a case had have been dropped before. [`Ability::Reopen`].
    ///
    /// # Errors
    /// Whatever kept it from closing or opening.
    async fn reopen(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Reopen but its fixture cannot do it".into())
    }

    /// Closes the store while handles are held. [`Ability::Close`].
    ///
    /// # Errors
    /// Whatever kept it from closing.
    async fn close(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Close but its fixture cannot do it".into())
    }

    /// How many bytes the store takes where it is kept. [`Ability::Measure`].
    ///
    /// # Errors
    /// Whatever kept it from being measured.
    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Err("the harness lists Measure but its fixture cannot do it".into())
    }

    /// Clears up after the case, whether it passed, failed or panicked. All its handles have been dropped before; only
    /// calls that it gave up may still be on their way.
    ///
    /// # Errors
    /// Whatever could not be cleared up; the case fails.
    async fn finish(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// What another process gives to [`Harness::join`] to open this store. [`Ability::Processes`].
    ///
    /// # Errors
    /// If it has none.
    fn address(&self) -> Result<String, BoxError> {
        Err("the harness lists Processes but its fixture has no address".into())
    }

    /// The files that hold the data and that are the same from one opening to the next. [`Ability::Damage`].
    ///
    /// # Errors
    /// Whatever kept them from being found.
    fn files(&self) -> Result<Vec<PathBuf>, BoxError> {
        Err("the harness lists Damage but its fixture has no files".into())
    }

    /// Makes the store, which has been closed, look like one of a later version's. [`Ability::Format`].
    ///
    /// # Errors
    /// Whatever kept it from being changed.
    fn make_newer(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Format but its fixture cannot do it".into())
    }

    /// Lets the power fail after so many more operations of the disk: from then on each of them fails.
    /// [`Ability::PowerLoss`].
    ///
    /// # Errors
    /// Whatever kept it from being arranged.
    fn cut_power_after(&mut self, operations: u32) -> Result<(), BoxError> {
        Err(format!("the harness lists PowerLoss but its fixture cannot cut it after {operations} operations").into())
    }

    /// Gives the power back: of what was written and not synced some is there, as `seed` wants it, torn at sectors.
    /// Opens the store again; afterwards [`store`](Self::store) hands out the new one. [`Ability::PowerLoss`].
    ///
    /// # Errors
    /// Whatever kept the store from being opened.
    async fn restore_power(&mut self, seed: u64) -> Result<(), BoxError> {
        Err(format!("the harness lists PowerLoss but its fixture cannot give it back (seed {seed})").into())
    }
}
