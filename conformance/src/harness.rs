//! Defines the traits that the author of a store implements to run the conformance suite on the store.

use std::error::Error;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kv::{ErrorKind, Operation, Store};

/// An error of a test harness or a test fixture.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Says whether other clients may write to a store while a test case uses the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tenancy {
    /// Other clients may write to the store while the test case runs. A test case on a shared store uses only keys with
    /// its prefix, does not compact, and does not expect consecutive revisions.
    Shared,
    /// Only the test case uses the store. A test case on an exclusive store may read every key, count revisions,
    /// compact and close the store, and kill the store's processes.
    Exclusive,
}

/// An action that a test case may need and that not every test environment supports.
///
/// An ability describes the test environment of a store, not the rules that the store follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Ability {
    /// The harness can make a store that has never been written to, not just one whose keys were deleted.
    New,
    /// The harness can close and reopen the store ([`Fixture::reopen`]).
    Reopen,
    /// The harness can close the store while the test case still has handles on it ([`Fixture::close`]).
    Close,
    /// The harness can measure the disk space that the store occupies ([`Fixture::stored_bytes`]).
    Measure,
    /// Another process can open the store by its address ([`Fixture::address`], [`Harness::join`]). The suite runs its
    /// own executable as a child process; see [`play_role`](crate::play_role).
    Processes,
    /// The suite can crash the store by killing the process that has it open, because the store has no server process.
    /// A harness that lists `Embedded` must also list [`Processes`](Self::Processes), [`Reopen`](Self::Reopen) and
    /// [`Close`](Self::Close).
    Embedded,
    /// The harness can put a store's files into a folder that the test case chooses ([`Harness::address_in`]).
    Folder,
    /// The suite can copy and damage a store's files in a folder; the store must detect the damage. A harness that
    /// lists `Damage` must also list [`Folder`](Self::Folder) and [`Embedded`](Self::Embedded).
    Damage,
    /// The harness can mark a store in a folder as written by a later program version ([`Harness::make_newer`]).
    Format,
    /// The suite can mount a small file system in a new mount namespace. `Mount` requires that the commands `unshare`
    /// and `mount` are installed and permitted.
    Mount,
    /// The suite can trace the system calls of a process with `strace`. `Trace` requires that the command `strace` is
    /// installed and permitted to trace processes.
    Trace,
    /// The harness can put the store on a simulated disk that can lose power ([`Fixture::cut_power_after`],
    /// [`Fixture::restore_power`]).
    PowerLoss,
    /// The suite can reach the store over TCP, directly or through proxies ([`Fixture::servers`],
    /// [`Fixture::connect`]).
    Network,
    /// The store delivers the progress reports of a watch within a second ([`kv::Progress`]).
    Progress,
    /// The suite can send signals to the store's server processes and restart them ([`Fixture::servers`],
    /// [`Fixture::restart`]).
    Servers,
    /// The harness can make a store with three servers ([`Scene::Cluster`]).
    Cluster,
    /// The harness can restore a store from an earlier copy of its data ([`Fixture::take_copy`],
    /// [`Fixture::put_back`]).
    Copies,
    /// The harness can make a store with a small space quota ([`Scene::Quota`]).
    Quota,
    /// The harness can make a store with users and permissions ([`Scene::Logins`]).
    Logins,
    /// The harness can make a store that uses TLS ([`Scene::Tls`]).
    Tls,
}

impl Ability {
    /// The message that explains why test cases that need this ability cannot run.
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

/// The kind of store that a test case needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Scene {
    /// An ordinary store; [`Harness::fresh`] makes such stores.
    Plain,
    /// A store with three servers, any two of which are a quorum. The harness must list [`Ability::Servers`] in
    /// addition to [`Ability::Cluster`].
    Cluster,
    /// A store with a quota of 4 to 64 MiB, whose fixture implements [`Fixture::make_room`].
    Quota,
    /// A store with logins that expire at most two seconds after their last use. The users from [`Fixture::strangers`]
    /// have no login or a wrong password. A [guest](Fixture::guest) user may read and write only keys that begin with
    /// `open/`.
    Logins,
    /// A store whose server and clients have TLS certificates. The handles from [`Fixture::strangers`] cannot connect:
    /// either the client has no valid certificate, or it does not trust the server's certificate.
    Tls,
}

/// A server process of a store under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Server {
    /// The address at which clients connect to the server.
    pub address: SocketAddr,
    /// The process id of the server, if the suite may send signals to the process ([`Ability::Servers`]).
    pub process: Option<u32>,
}

/// A user to whom a store refuses access to some or all keys.
#[derive(Debug)]
pub struct RefusedUser {
    /// A description of the refused user in a few words.
    pub name: &'static str,
    /// The store handle of the user whose requests are refused.
    pub store: Arc<dyn Store>,
    /// The user's secrets, which no error or debug text may show.
    pub secrets: Vec<String>,
}

/// Makes stores for test cases.
///
/// The suite runs test cases in parallel, so several tasks may call [`fresh`](Self::fresh) at the same time. The method
/// [`fresh`](Self::fresh) runs on a tokio runtime and must not block its thread.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The abilities of this test environment. If a test case needs an ability that is not listed, the case is ignored,
    /// and the test output shows the reason. The list of ignored cases that the caller passes to [`main`](crate::main)
    /// must name every case that this environment cannot run.
    fn abilities(&self) -> &[Ability];

    /// Says whether other clients may use the stores of this harness. On shared stores, test cases that need an
    /// exclusive store are ignored.
    ///
    /// By default, the stores of a harness are exclusive. A [`PrefixHarness`](crate::PrefixHarness) makes shared
    /// stores.
    fn tenancy(&self) -> Tenancy {
        Tenancy::Exclusive
    }

    /// Makes an empty store for the exclusive use of one test case.
    ///
    /// # Errors
    /// Any error that prevents making the store. If the store cannot be made, the test case that needs it fails.
    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError>;

    /// Makes an empty store of a special kind for the exclusive use of one test case. The suite never calls `fresh_in`
    /// with [`Scene::Plain`], or with a scene whose [`Ability`] the harness does not list.
    ///
    /// # Errors
    /// Any error that prevents making the store.
    async fn fresh_in(&self, scene: Scene) -> Result<Box<dyn Fixture>, BoxError> {
        Err(format!("the harness lists {scene:?} but cannot make it").into())
    }

    /// Opens the store at an address that this process or another process has made, and creates the store if it does
    /// not exist. While another process has the store open, `join` waits at most `wait`. Requires
    /// [`Ability::Processes`].
    ///
    /// # Errors
    /// `Locked` if another process had the store open during the whole wait. Any error of opening the store, for
    /// example `Corrupt`.
    async fn join(&self, address: &str, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        let _ = wait;
        Err(kv::Error::new(ErrorKind::Unsupported, Operation::Open, address.to_owned())
            .with_detail("the harness lists Processes but cannot join"))
    }

    /// The address of a store whose files are all in `folder`; the store need not exist yet. Requires
    /// [`Ability::Folder`].
    ///
    /// # Errors
    /// An error if the folder's path cannot be part of a store address.
    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        Err(format!("the harness lists Folder but has no address for {}", folder.display()).into())
    }

    /// Makes the store in this folder (see [`address_in`](Self::address_in)) look as if a later version of the program
    /// had written it. The suite calls `make_newer` while the store is closed. Requires [`Ability::Format`].
    ///
    /// # Errors
    /// Any error that prevents changing the store's files.
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

/// A store for one test case, with everything that must live as long as the store, such as a temporary folder or a
/// server.
///
/// Dropping the fixture shuts the store down. Async cleanup belongs in [`finish`](Self::finish). The suite never calls
/// a method whose [`Ability`] the harness does not list.
#[async_trait]
pub trait Fixture: Debug + Send + Sync {
    /// Returns a handle on the store of the test case.
    fn store(&self) -> Arc<dyn Store>;

    /// Opens a second handle on the store: a second client of a server, or a clone of the first handle.
    ///
    /// # Errors
    /// Any error that prevents opening the handle.
    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(self.store())
    }

    /// Closes and reopens the store. After `reopen` has returned, [`store`](Self::store) returns the reopened store.
    /// The test case drops all its handles and streams before it calls `reopen`. Requires [`Ability::Reopen`].
    ///
    /// # Errors
    /// Any error of closing or opening the store.
    async fn reopen(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Reopen but its fixture cannot do it".into())
    }

    /// Closes the store while the test case still has handles on it. Requires [`Ability::Close`].
    ///
    /// # Errors
    /// Any error of closing the store.
    async fn close(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Close but its fixture cannot do it".into())
    }

    /// Returns the number of bytes that the store occupies on the disk. Requires [`Ability::Measure`].
    ///
    /// # Errors
    /// Any error that prevents measuring the store.
    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Err("the harness lists Measure but its fixture cannot do it".into())
    }

    /// Returns the server processes of the store, always in the same order. Requires [`Ability::Network`].
    fn servers(&self) -> Vec<Server> {
        Vec::new()
    }

    /// Opens a handle that connects to the given addresses instead of the servers' own addresses. To `connect`, the
    /// suite passes the address of a proxy that it puts between client and server. The handle that `connect` returns
    /// should abandon a call after about 5 seconds and notice a dead connection within 3 seconds, to keep the test
    /// cases short. Requires [`Ability::Network`].
    ///
    /// # Errors
    /// Any error that prevents opening the handle. Opening a handle must succeed even if a server does not answer.
    async fn connect(&self, addresses: &[SocketAddr]) -> Result<Arc<dyn Store>, BoxError> {
        Err(format!("the harness lists Network but its fixture cannot connect to {addresses:?}").into())
    }

    /// Restarts a killed server at its old address, with its old data. `restart` may return before the restarted server
    /// is ready. Requires [`Ability::Servers`].
    ///
    /// # Errors
    /// Any error that prevents starting the server.
    async fn restart(&mut self, server: usize) -> Result<(), BoxError> {
        Err(format!("the harness lists Servers but its fixture cannot start server {server}").into())
    }

    /// Returns the index, in [`servers`](Self::servers), of the cluster's leader. Requires [`Ability::Cluster`].
    ///
    /// # Errors
    /// An error if the leader is unknown, for example because the cluster has none.
    async fn leader(&self) -> Result<usize, BoxError> {
        Err("the harness lists Cluster but its fixture does not know who leads".into())
    }

    /// Makes a copy of the store's data. Making the copy of the store may disconnect handles and watches, as a server
    /// restart does. Requires [`Ability::Copies`].
    ///
    /// # Errors
    /// Any error that prevents copying the store.
    async fn take_copy(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Copies but its fixture cannot take one".into())
    }

    /// Restores the store from the copy that [`take_copy`](Self::take_copy) made, while the test case still has handles
    /// on it. Requires [`Ability::Copies`].
    ///
    /// # Errors
    /// Any error that prevents restoring the store.
    async fn put_back(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Copies but its fixture cannot put one back".into())
    }

    /// Does what an operator must do for a store that was full, once its keys were deleted and compacted (for etcd:
    /// defragment, clear the alarm). Requires [`Ability::Quota`].
    ///
    /// # Errors
    /// Any error that prevents making room in the store.
    async fn make_room(&self) -> Result<(), BoxError> {
        Err("the harness lists Quota but its fixture cannot make room".into())
    }

    /// Opens handles of clients without access: the server rejects them, or they reject the server. The suite calls
    /// `strangers` only if the harness lists [`Ability::Logins`] or [`Ability::Tls`].
    ///
    /// # Errors
    /// Any error that prevents opening the handles.
    async fn strangers(&self) -> Result<Vec<RefusedUser>, BoxError> {
        Err("the harness lists Logins or Tls but its fixture knows no strangers".into())
    }

    /// Opens a handle for a guest user; see [`Scene::Logins`]. Requires [`Ability::Logins`].
    ///
    /// # Errors
    /// Any error that prevents opening the handle.
    async fn guest(&self) -> Result<Arc<dyn Store>, BoxError> {
        Err("the harness lists Logins but its fixture knows no guest".into())
    }

    /// Cleans up after a test case that passed, failed or panicked. The suite drops all handles of the test case before
    /// it calls `finish`. However, store calls that the test case dropped unfinished may still be running then.
    ///
    /// # Errors
    /// An error that describes what could not be cleaned up. Any error of the cleanup makes the test case fail.
    async fn finish(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// The address with which another process can [`join`](Harness::join) the store. Requires [`Ability::Processes`].
    ///
    /// # Errors
    /// An error if the store has no address that another process can use.
    fn address(&self) -> Result<String, BoxError> {
        Err("the harness lists Processes but its fixture has no address".into())
    }

    /// Cuts the power of the simulated disk after this number of further disk operations. After the power cut, every
    /// disk operation fails. Requires [`Ability::PowerLoss`].
    ///
    /// # Errors
    /// Any error that prevents arranging the power cut.
    fn cut_power_after(&mut self, operations: u32) -> Result<(), BoxError> {
        Err(format!("the harness lists PowerLoss but its fixture cannot cut it after {operations} operations").into())
    }

    /// Restores the power of the simulated disk and reopens the store. The random seed `seed` decides which unsynced
    /// writes survive; these writes may be torn at sector boundaries. After `restore_power` has returned,
    /// [`store`](Self::store) returns the reopened store. Requires [`Ability::PowerLoss`].
    ///
    /// # Errors
    /// Any error of opening the store.
    async fn restore_power(&mut self, seed: u64) -> Result<(), BoxError> {
        Err(format!("the harness lists PowerLoss but its fixture cannot give it back (seed {seed})").into())
    }
}
