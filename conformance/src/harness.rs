//! The traits that the author of a store implements to have it judged.

use std::error::Error;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kv::{ErrorKind, Operation, Store};

/// A fault of an environment.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Whether a store has one user at a time, or others write to it meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tenancy {
    /// Others may write as well: a case keeps inside a prefix, does not compact, and does not count on revisions that
    /// follow each other.
    Shared,
    /// Nobody else uses the store: a case may read every key, count revisions, compact, close and kill.
    Exclusive,
}

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
    /// Keep a store's files below a folder that the case chooses ([`Harness::address_in`]).
    Folder,
    /// Copy and damage the files below such a folder, of a store that tells damage from data. Goes together with
    /// [`Folder`](Self::Folder) and [`Embedded`](Self::Embedded).
    Damage,
    /// Turn a store below a folder into one of a later version of the program ([`Harness::make_newer`]).
    Format,
    /// Mount a small file system that no other process sees: `unshare` and `mount` are there and may be used.
    Mount,
    /// Trace the system calls of a process: `strace` is there and may be used.
    Trace,
    /// Keep the store on a disk that loses power ([`Fixture::cut_power_after`], [`Fixture::restore_power`]).
    PowerLoss,
    /// Reach the store over TCP, also at another address than its own ([`Fixture::servers`], [`Fixture::connect`]).
    Network,
    /// Report the progress of a watch soon ([`kv::Progress`]).
    Progress,
    /// Let the suite send signals to the processes that serve the store, and start them again
    /// ([`Fixture::servers`], [`Fixture::restart`]).
    Servers,
    /// Make a store on three servers ([`Scene::Cluster`]).
    Cluster,
    /// Put a store back to an older copy of itself ([`Fixture::take_copy`], [`Fixture::put_back`]).
    Copies,
    /// Make a store with little room ([`Scene::Quota`]).
    Quota,
    /// Make a store with users and permissions ([`Scene::Logins`]).
    Logins,
    /// Make a store behind TLS ([`Scene::Tls`]).
    Tls,
}

impl Ability {
    /// Why a case that needs this does not run where it is missing.
    pub fn missing(self) -> &'static str {
        match self {
            Self::New => "this environment has no new stores",
            Self::Reopen => "this environment cannot open a store again",
            Self::Close => "this environment cannot close a store",
            Self::Measure => "this environment cannot measure a store",
            Self::Progress => "this store does not report the progress of its watches",
            Self::Processes => "this environment has no other processes",
            Self::Embedded => "no process holds the data by itself",
            Self::Folder => "this environment does not say where a store is kept",
            Self::Damage => "this environment has no files to damage",
            Self::Format => "this environment has no stores of a later version",
            Self::Mount => "this environment may not mount a file system",
            Self::Trace => "this environment cannot trace system calls",
            Self::PowerLoss => "this environment cannot cut the power",
            Self::Network => "this environment's stores are not reached over TCP",
            Self::Servers => "this environment's stores have no servers that could be killed",
            Self::Cluster => "this environment has no clusters",
            Self::Copies => "this environment cannot put a store back to an older copy",
            Self::Quota => "this environment cannot limit the room of a store",
            Self::Logins => "this environment's stores have no logins",
            Self::Tls => "this environment's stores have no TLS",
        }
    }
}

/// Surroundings in which a case wants its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Scene {
    /// Nothing special: a store of [`Harness::fresh`].
    Plain,
    /// Three servers, any two of which are a quorum. Needs [`Ability::Servers`] as well.
    Cluster,
    /// Room for 4 to 64 MiB, and [`Fixture::make_room`].
    Quota,
    /// Logins that run out two seconds after their last use at the latest, and [`Fixture::strangers`]: without a login,
    /// with a wrong password. A [guest](Fixture::guest) may read and write keys that begin with `open/`, and no others.
    Logins,
    /// Server and clients show certificates; [`Fixture::strangers`] do or expect something else.
    Tls,
}

/// A process that serves a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Server {
    /// Where clients reach it.
    pub address: SocketAddr,
    /// Its process, if the suite may send it signals ([`Ability::Servers`]).
    pub process: Option<u32>,
}

/// Somebody whom a store does not let in, or not everywhere.
#[derive(Debug)]
pub struct RefusedUser {
    /// Its description in a few words.
    pub name: &'static str,
    /// The store, as this one sees it.
    pub store: Arc<dyn Store>,
    /// The secrets that must not be in any text.
    pub secrets: Vec<String>,
}

/// Makes stores for cases.
///
/// Cases run in parallel, so `fresh` is called from several tasks at once. It runs on a tokio runtime and must not
/// block its thread.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The abilities of this environment. A case that needs anything else is ignored, with the reason shown, and must
    /// be in the list that the caller of [`main`](crate::main) passes.
    fn abilities(&self) -> &[Ability];

    /// Whether others use the stores as well. Cases that need a store of their own are then ignored.
    ///
    /// The default is nobody; [`PrefixHarness`](crate::PrefixHarness) makes an environment in which others do.
    fn tenancy(&self) -> Tenancy {
        Tenancy::Exclusive
    }

    /// An empty store that nobody else uses.
    ///
    /// # Errors
    /// The reason why it could not be made; the case that needs it fails.
    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError>;

    /// An empty store that nobody else uses, in special surroundings. Never called with [`Scene::Plain`], or with a
    /// scene whose [`Ability`] is not listed.
    ///
    /// # Errors
    /// The reason why it could not be made.
    async fn fresh_in(&self, scene: Scene) -> Result<Box<dyn Fixture>, BoxError> {
        Err(format!("the harness lists {scene:?} but cannot make it").into())
    }

    /// Opens the store that another process, or this one, knows by this address, and makes it if it is not there. While
    /// another process has the store, this waits for at most that time. [`Ability::Processes`].
    ///
    /// # Errors
    /// The error of the store's own way of opening: `Locked` if it was in use to the end, `Corrupt`, and so on.
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

    /// Makes the store that [`address_in`](Self::address_in) names for this folder, and that nobody has open, look like
    /// one of a later version's. [`Ability::Format`].
    ///
    /// # Errors
    /// The reason why it could not be changed.
    fn make_newer(&self, folder: &Path) -> Result<(), BoxError> {
        Err(format!("the harness lists Format but cannot change {}", folder.display()).into())
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<H: Harness + ?Sized> Harness for Arc<H> {
    fn abilities(&self) -> &[Ability] {
        (**self).abilities()
    }

    fn tenancy(&self) -> Tenancy {
        (**self).tenancy()
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        (**self).fresh().await
    }

    async fn fresh_in(&self, scene: Scene) -> Result<Box<dyn Fixture>, BoxError> {
        (**self).fresh_in(scene).await
    }

    async fn join(&self, address: &str, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        (**self).join(address, wait).await
    }

    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        (**self).address_in(folder)
    }

    fn make_newer(&self, folder: &Path) -> Result<(), BoxError> {
        (**self).make_newer(folder)
    }
}

/// One store for one case, with all that has to live as long as it does: a temporary folder, a server.
///
/// Dropping it takes the store down; work that a drop cannot do is for [`finish`](Self::finish). A method whose
/// [`Ability`] the harness does not list is never called.
#[async_trait]
pub trait Fixture: Debug + Send + Sync {
    /// The store.
    fn store(&self) -> Arc<dyn Store>;

    /// Another handle on the same store, as far from the first one as the environment allows: another client of a
    /// server, or else a clone.
    ///
    /// # Errors
    /// The reason why it could not be made.
    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(self.store())
    }

    /// Closes the store and opens it again; afterwards [`store`](Self::store) hands out the new one. All handles and
    /// streams that a case had have been dropped before. [`Ability::Reopen`].
    ///
    /// # Errors
    /// The obstacle to closing or opening.
    async fn reopen(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Reopen but its fixture cannot do it".into())
    }

    /// Closes the store while handles are held. [`Ability::Close`].
    ///
    /// # Errors
    /// The obstacle to closing.
    async fn close(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Close but its fixture cannot do it".into())
    }

    /// How many bytes the store takes where it is kept. [`Ability::Measure`].
    ///
    /// # Errors
    /// The reason why it could not be measured.
    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Err("the harness lists Measure but its fixture cannot do it".into())
    }

    /// The servers of the store, always in the same order. [`Ability::Network`].
    fn servers(&self) -> Vec<Server> {
        Vec::new()
    }

    /// A handle that reaches the store at these addresses instead of its servers' own: the suite stands in between.
    /// It should give up on a call after about 5 seconds and notice within 3 seconds that a connection is dead, so that
    /// cases need not wait for long. [`Ability::Network`].
    ///
    /// # Errors
    /// The reason why it could not be made. It must not fail because nobody answers.
    async fn connect(&self, addresses: &[SocketAddr]) -> Result<Arc<dyn Store>, BoxError> {
        Err(format!("the harness lists Network but its fixture cannot connect to {addresses:?}").into())
    }

    /// Starts a server that was killed, at its old address and on its old data. It need not wait until it serves.
    /// [`Ability::Servers`].
    ///
    /// # Errors
    /// The reason why it could not be started.
    async fn restart(&mut self, server: usize) -> Result<(), BoxError> {
        Err(format!("the harness lists Servers but its fixture cannot start server {server}").into())
    }

    /// Which server leads the others. [`Ability::Cluster`].
    ///
    /// # Errors
    /// The reason why the leader could not be found out, such as that there is none.
    async fn leader(&self) -> Result<usize, BoxError> {
        Err("the harness lists Cluster but its fixture does not know who leads".into())
    }

    /// Keeps a copy of the store as it is. Handles and watches may be cut off, as by a restart. [`Ability::Copies`].
    ///
    /// # Errors
    /// The reason why it could not be made.
    async fn take_copy(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Copies but its fixture cannot take one".into())
    }

    /// Puts the store back to the copy, under the handles that are held. [`Ability::Copies`].
    ///
    /// # Errors
    /// The reason why it could not be put back.
    async fn put_back(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Copies but its fixture cannot put one back".into())
    }

    /// Does the operator's work after a store ran full and was emptied and compacted. [`Ability::Quota`].
    ///
    /// # Errors
    /// The fault.
    async fn make_room(&self) -> Result<(), BoxError> {
        Err("the harness lists Quota but its fixture cannot make room".into())
    }

    /// The clients that are kept out, by the server or by their own caution. [`Ability::Logins`], [`Ability::Tls`].
    ///
    /// # Errors
    /// The reason why the handles could not be made.
    async fn strangers(&self) -> Result<Vec<RefusedUser>, BoxError> {
        Err("the harness lists Logins or Tls but its fixture knows no strangers".into())
    }

    /// A guest: see [`Scene::Logins`]. [`Ability::Logins`].
    ///
    /// # Errors
    /// The reason why the handle could not be made.
    async fn guest(&self) -> Result<Arc<dyn Store>, BoxError> {
        Err("the harness lists Logins but its fixture knows no guest".into())
    }

    /// Clears up after the case, whether it passed, failed or panicked. All its handles have been dropped before; only
    /// calls that it abandoned may still be on their way.
    ///
    /// # Errors
    /// The parts that could not be cleared up; the case fails.
    async fn finish(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// The address that another process passes to [`Harness::join`] to open this store. [`Ability::Processes`].
    ///
    /// # Errors
    /// If it has none.
    fn address(&self) -> Result<String, BoxError> {
        Err("the harness lists Processes but its fixture has no address".into())
    }

    /// Lets the power fail after so many more operations of the disk: from then on each of them fails.
    /// [`Ability::PowerLoss`].
    ///
    /// # Errors
    /// The reason why it could not be arranged.
    fn cut_power_after(&mut self, operations: u32) -> Result<(), BoxError> {
        Err(format!("the harness lists PowerLoss but its fixture cannot cut it after {operations} operations").into())
    }

    /// Restores the power: some of the unsynced writes are there, as `seed` decides, torn at sectors.
    /// Opens the store again; afterwards [`store`](Self::store) hands out the new one. [`Ability::PowerLoss`].
    ///
    /// # Errors
    /// The reason why the store could not be opened.
    async fn restore_power(&mut self, seed: u64) -> Result<(), BoxError> {
        Err(format!("the harness lists PowerLoss but its fixture cannot give it back (seed {seed})").into())
    }
}
