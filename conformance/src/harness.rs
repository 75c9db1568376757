//! Defines the traits that the author of a store implements to test the store.

use std::error::Error;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kv::{ErrorKind, Operation, Store};

/// An error of a harness or a fixture.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Says whether other clients may write to a store at the same time as a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tenancy {
    /// Other clients may write to the store as well. A case uses only its prefix, does not compact, and does not
    /// expect consecutive revisions.
    Shared,
    /// Only the case uses the store. The case may read every key, count revisions, compact and close the store, and
    /// kill its processes.
    Exclusive,
}

/// An action that a case may need and that not every environment supports.
///
/// An ability describes the environment of a store, not the rules that the store follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Ability {
    /// Make a store that was never written to, as opposed to a store that was emptied.
    New,
    /// Close and reopen the store ([`Fixture::reopen`]).
    Reopen,
    /// Close the store while handles are held ([`Fixture::close`]).
    Close,
    /// Measure the space that the store occupies ([`Fixture::stored_bytes`]).
    Measure,
    /// Open the store in another process by its address ([`Fixture::address`], [`Harness::join`]). The suite runs its
    /// own executable as a child process; see [`play_role`](crate::play_role).
    Processes,
    /// A process that has joined a store is the only process with the data, so killing that process is a crash of the
    /// store. Requires [`Processes`](Self::Processes), [`Reopen`](Self::Reopen) and [`Close`](Self::Close).
    Embedded,
    /// Put a store's files into a folder that the case chooses ([`Harness::address_in`]).
    Folder,
    /// Copy and damage a store's files in a folder that the case chooses; the store must distinguish damage from data.
    /// Requires [`Folder`](Self::Folder) and [`Embedded`](Self::Embedded).
    Damage,
    /// Make a store in a folder look like a store of a later version of the program ([`Harness::make_newer`]).
    Format,
    /// Mount a small file system that other processes do not see. `unshare` and `mount` must be installed and allowed.
    Mount,
    /// Trace the system calls of a process. `strace` must be installed and allowed.
    Trace,
    /// Put the store on a disk that can lose power ([`Fixture::cut_power_after`], [`Fixture::restore_power`]).
    PowerLoss,
    /// Reach the store over TCP, at the servers' addresses and at addresses of proxies ([`Fixture::servers`],
    /// [`Fixture::connect`]).
    Network,
    /// Report the progress of a watch soon ([`kv::Progress`]).
    Progress,
    /// Send signals to the server processes of the store, and restart the servers ([`Fixture::servers`],
    /// [`Fixture::restart`]).
    Servers,
    /// Make a store with three servers ([`Scene::Cluster`]).
    Cluster,
    /// Restore a store from an older copy ([`Fixture::take_copy`], [`Fixture::put_back`]).
    Copies,
    /// Make a store with little space ([`Scene::Quota`]).
    Quota,
    /// Make a store with users and permissions ([`Scene::Logins`]).
    Logins,
    /// Make a store that uses TLS ([`Scene::Tls`]).
    Tls,
}

impl Ability {
    /// The reason why a case that needs this ability cannot run without the ability.
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

/// The kind of store that a case needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Scene {
    /// An ordinary store; [`Harness::fresh`] makes such stores.
    Plain,
    /// A store with three servers, any two of which are a quorum. Requires [`Ability::Servers`] as well.
    Cluster,
    /// A store with space for 4 to 64 MiB, and [`Fixture::make_room`].
    Quota,
    /// A store with logins that expire at most two seconds after their last use. The users in [`Fixture::strangers`]
    /// have no login or a wrong password. A [guest](Fixture::guest) may read and write only keys that begin with
    /// `open/`.
    Logins,
    /// A server and clients with certificates. The users in [`Fixture::strangers`] have or expect different
    /// certificates.
    Tls,
}

/// A server process of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Server {
    /// The address for clients.
    pub address: SocketAddr,
    /// The process id, if the suite may send signals to it ([`Ability::Servers`]).
    pub process: Option<u32>,
}

/// A user to whom a store refuses access, at least to some keys.
#[derive(Debug)]
pub struct RefusedUser {
    /// A description of the user in a few words.
    pub name: &'static str,
    /// The user's handle on the store.
    pub store: Arc<dyn Store>,
    /// The user's secrets, which must not appear in any text.
    pub secrets: Vec<String>,
}

/// Makes stores for test cases.
///
/// Cases run in parallel, so several tasks may call `fresh` at the same time. The method `fresh` runs on a tokio
/// runtime and must not block its thread.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The abilities of this environment. A case that needs an ability outside this list is ignored, with the reason.
    /// The list of ignored cases that the caller passes to [`main`](crate::main) must contain such a case.
    fn abilities(&self) -> &[Ability];

    /// Says whether other clients use the stores as well. If other clients do, cases that need an exclusive store are
    /// ignored.
    ///
    /// By default, the environment is exclusive. [`PrefixHarness`](crate::PrefixHarness) makes a shared environment.
    fn tenancy(&self) -> Tenancy {
        Tenancy::Exclusive
    }

    /// Makes an empty store for exclusive use.
    ///
    /// # Errors
    /// The reason why the store could not be made. The case that needs the store fails.
    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError>;

    /// Makes an empty store for exclusive use in a special scene. The suite never calls this method with
    /// [`Scene::Plain`], or with a scene whose [`Ability`] is not listed.
    ///
    /// # Errors
    /// The reason why the store could not be made.
    async fn fresh_in(&self, scene: Scene) -> Result<Box<dyn Fixture>, BoxError> {
        Err(format!("the harness lists {scene:?} but cannot make it").into())
    }

    /// Opens the store at an address that came from this process or another process, and creates the store if it does
    /// not exist. Waits at most `wait` while another process has the store. Requires [`Ability::Processes`].
    ///
    /// # Errors
    /// The error of opening the store: `Locked` if another process had the store during the whole wait, `Corrupt`, and
    /// so on.
    async fn join(&self, address: &str, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        let _ = wait;
        Err(kv::Error::new(ErrorKind::Unsupported, Operation::Open, address.to_owned())
            .with_detail("the harness lists Processes but cannot join"))
    }

    /// The address of a store, existing or not, whose files are all in this folder. Requires [`Ability::Folder`].
    ///
    /// # Errors
    /// If the folder cannot be part of an address.
    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        Err(format!("the harness lists Folder but has no address for {}", folder.display()).into())
    }

    /// Makes the store at the [address](Self::address_in) for this folder look like a store of a later version. The
    /// store is not open during this call. Requires [`Ability::Format`].
    ///
    /// # Errors
    /// The reason why the store could not be changed.
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

/// A store for one case, with everything that must live as long as the store, for example a temporary folder or a
/// server.
///
/// Dropping the fixture takes the store down. Async work of the cleanup belongs in [`finish`](Self::finish). A method
/// whose [`Ability`] the harness does not list is never called.
#[async_trait]
pub trait Fixture: Debug + Send + Sync {
    /// Returns a handle on the store of the case.
    fn store(&self) -> Arc<dyn Store>;

    /// Opens a second handle on the store, as independent of the first handle as the environment allows: a second
    /// client of a server, or else a clone.
    ///
    /// # Errors
    /// The reason why the handle could not be made.
    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(self.store())
    }

    /// Closes and reopens the store. After this call [`store`](Self::store) returns the reopened store. The case has
    /// dropped all its handles and streams before. Requires [`Ability::Reopen`].
    ///
    /// # Errors
    /// The reason why the store could not be closed or opened.
    async fn reopen(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Reopen but its fixture cannot do it".into())
    }

    /// Closes the store while the case still has handles. Requires [`Ability::Close`].
    ///
    /// # Errors
    /// The reason why the store could not be closed.
    async fn close(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Close but its fixture cannot do it".into())
    }

    /// Measures the number of bytes that the store occupies. Requires [`Ability::Measure`].
    ///
    /// # Errors
    /// The reason why the store could not be measured.
    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Err("the harness lists Measure but its fixture cannot do it".into())
    }

    /// The servers of the store, always in the same order. Requires [`Ability::Network`].
    fn servers(&self) -> Vec<Server> {
        Vec::new()
    }

    /// Opens a handle that connects to these addresses instead of the servers' own addresses, so that the suite can
    /// put a proxy in between. The handle should abandon a call after about 5 seconds and notice a dead connection
    /// within 3 seconds, so that cases need not wait long. Requires [`Ability::Network`].
    ///
    /// # Errors
    /// The reason why the handle could not be made. The call must not fail because no server answers.
    async fn connect(&self, addresses: &[SocketAddr]) -> Result<Arc<dyn Store>, BoxError> {
        Err(format!("the harness lists Network but its fixture cannot connect to {addresses:?}").into())
    }

    /// Starts a killed server at its old address, with its old data. This method may return before the server is
    /// ready. Requires [`Ability::Servers`].
    ///
    /// # Errors
    /// The reason why the server could not be started.
    async fn restart(&mut self, server: usize) -> Result<(), BoxError> {
        Err(format!("the harness lists Servers but its fixture cannot start server {server}").into())
    }

    /// Returns the index of the leading server. Requires [`Ability::Cluster`].
    ///
    /// # Errors
    /// The reason why the leader is unknown, for example because the cluster has no leader.
    async fn leader(&self) -> Result<usize, BoxError> {
        Err("the harness lists Cluster but its fixture does not know who leads".into())
    }

    /// Takes a copy of the store. Taking a copy may disconnect handles and watches, as a restart does. Requires
    /// [`Ability::Copies`].
    ///
    /// # Errors
    /// The reason why the copy could not be made.
    async fn take_copy(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Copies but its fixture cannot take one".into())
    }

    /// Restores the store from the copy while the case still has handles. Requires [`Ability::Copies`].
    ///
    /// # Errors
    /// The reason why the store could not be restored.
    async fn put_back(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Copies but its fixture cannot put one back".into())
    }

    /// Does the operator's work after a store was full and was then emptied and compacted. Requires
    /// [`Ability::Quota`].
    ///
    /// # Errors
    /// The reason why the operator's work failed.
    async fn make_room(&self) -> Result<(), BoxError> {
        Err("the harness lists Quota but its fixture cannot make room".into())
    }

    /// Opens handles of clients without access, which the server or the clients' own checks reject. Requires
    /// [`Ability::Logins`] or [`Ability::Tls`].
    ///
    /// # Errors
    /// The reason why the handles could not be made.
    async fn strangers(&self) -> Result<Vec<RefusedUser>, BoxError> {
        Err("the harness lists Logins or Tls but its fixture knows no strangers".into())
    }

    /// Opens a handle of a guest; see [`Scene::Logins`]. Requires [`Ability::Logins`].
    ///
    /// # Errors
    /// The reason why the handle could not be made.
    async fn guest(&self) -> Result<Arc<dyn Store>, BoxError> {
        Err("the harness lists Logins but its fixture knows no guest".into())
    }

    /// Cleans up after a case that passed, failed or panicked. All handles of the case have been dropped. Only calls
    /// that the case abandoned may still be running.
    ///
    /// # Errors
    /// A description of the parts that could not be cleaned up. An error makes the case fail.
    async fn finish(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// The address with which another process can [join](Harness::join) the store. Requires [`Ability::Processes`].
    ///
    /// # Errors
    /// If the store has no address.
    fn address(&self) -> Result<String, BoxError> {
        Err("the harness lists Processes but its fixture has no address".into())
    }

    /// Cuts the power after this many more disk operations. After the cut, each disk operation fails. Requires
    /// [`Ability::PowerLoss`].
    ///
    /// # Errors
    /// The reason why the power cut could not be arranged.
    fn cut_power_after(&mut self, operations: u32) -> Result<(), BoxError> {
        Err(format!("the harness lists PowerLoss but its fixture cannot cut it after {operations} operations").into())
    }

    /// Restores the power and reopens the store. `seed` decides which unsynced writes survive; unsynced writes may be
    /// torn at sector boundaries. After this call [`store`](Self::store) returns the reopened store. Requires
    /// [`Ability::PowerLoss`].
    ///
    /// # Errors
    /// The reason why the store could not be opened.
    async fn restore_power(&mut self, seed: u64) -> Result<(), BoxError> {
        Err(format!("the harness lists PowerLoss but its fixture cannot give it back (seed {seed})").into())
    }
}
