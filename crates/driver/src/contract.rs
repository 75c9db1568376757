//! Defines the traits that a kind of store must implement, and the drivers of stores in folders and in memory.

use std::fmt::{self, Debug};
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use kv::{Error, ErrorKind, Operation, Result, Revision, Store};
use kv_local::{Engine, OpenOptions};
use kv_mvcc::MvccStore;

use crate::error::{self, ConfigError};
use crate::place::{Settings, StorePlace, absolute_path};

/// A kind of store, for example etcd or redb, as programs use it. Each program is built with a list of drivers, its
/// [`Drivers`](crate::Drivers). Programs base decisions on the driver's [facts](DriverFacts), and never on the driver's
/// name.
#[async_trait]
pub trait Driver: Debug + Send + Sync {
    /// The facts that a program may assume about the stores of this driver.
    fn facts(&self) -> DriverFacts;

    /// The form of this driver's store URLs for help and error messages, for example `redb:///path`, perhaps with a
    /// remark after a space. The URL form is `None` if users cannot select the driver's stores by a URL.
    fn url_form(&self) -> Option<String>;

    /// Parses a URL of one of this driver's stores. The argument `scheme` is the driver's name in lower case, alone or
    /// followed by `+` and a suffix; `rest` is the text after `://`.
    ///
    /// # Errors
    /// An error that says what is wrong with the URL, without text that may be a secret.
    fn place_of_url(&self, scheme: &str, rest: &str) -> error::ConfigResult<StorePlace>;

    /// Derives the place of a store from settings whose `datastore_type` is this driver's type or is not set.
    ///
    /// # Errors
    /// An error that says what is wrong with the settings, without text that may be a secret.
    fn place_of_settings(&self, settings: &Settings) -> error::ConfigResult<StorePlace>;

    /// Returns the URL of the store at the given place, or a description if the store has no URL.
    fn url(&self, place: &StorePlace) -> String;

    /// Opens the store at the given place, which must be of this driver's kind.
    ///
    /// With [`Blocking::InPlace`](kv_mvcc::Blocking), opening a cluster's store sends no request. With
    /// `Blocking::InPlace`, the option `wait` limits the total time of all store calls, counted from the call of
    /// `open`. Without [`Blocking::InPlace`](kv_mvcc::Blocking), opening a cluster's store checks that the cluster
    /// answers and accepts the login.
    ///
    /// # Errors
    /// The error `Missing` if there is no store and the options do not allow creating it. `Locked` if the store lock
    /// did not become free in time. The error `Unsupported` if the driver cannot open stores of the place's kind. Any
    /// other store error from opening the store.
    async fn open(&self, place: &StorePlace, options: &OpenOptions) -> Result<Box<dyn Opened>>;

    /// The engine of this driver's stores, if the driver keeps stores in folders; `None` for other kinds of stores.
    /// With the driver's engine, a program can inspect a store without the store lock, and can shrink, upgrade and
    /// replace a store.
    fn engine(&self) -> Option<&dyn Engine> {
        None
    }
}

/// Facts about the stores of one driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverFacts {
    /// The driver's name in URLs, reports and metrics, always in lower case.
    pub name: &'static str,
    /// The value of `datastore_type` that selects the driver in a configuration.
    pub datastore_type: &'static str,
    /// Which processes and machines share a store of this driver.
    pub scope: Scope,
    /// The number of large transactions that a program should send concurrently.
    pub writes_in_flight: usize,
    /// Maximum number of keys that a long reader reads before it yields the store to waiting processes.
    pub keys_in_a_turn: usize,
}

impl DriverFacts {
    /// Creates the facts for a driver with this name and scope, with default values: 8 large transactions sent
    /// concurrently, and 16,384 keys that a long reader reads in one turn.
    pub const fn new(name: &'static str, scope: Scope) -> Self {
        Self { name, datastore_type: name, scope, writes_in_flight: 8, keys_in_a_turn: 16_384 }
    }

    /// Sets the `datastore_type` that selects the driver, if it differs from the driver's name.
    #[must_use]
    pub const fn with_datastore_type(mut self, datastore_type: &'static str) -> Self {
        self.datastore_type = datastore_type;
        self
    }

    /// Sets the number of large transactions that a program should send concurrently.
    #[must_use]
    pub const fn with_writes_in_flight(mut self, writes: usize) -> Self {
        self.writes_in_flight = writes;
        self
    }

    /// Sets the maximum number of keys that a long reader reads before it yields the store to waiting processes.
    #[must_use]
    pub const fn with_keys_in_a_turn(mut self, keys: usize) -> Self {
        self.keys_in_a_turn = keys;
        self
    }
}

/// Which processes and machines share a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Only one process uses the store, which is lost when the process ends.
    Process,
    /// The processes of one machine share the store, a folder that only one process at a time can open. A node need not
    /// be registered to get addresses from a store on its own machine.
    Machine,
    /// Many machines share the store, which is a network service. A node must be registered before it can get addresses
    /// from a network store. A network store may carry out a write after the process that sent it has died.
    Cluster,
}

/// An open store, as returned by [`Driver::open`].
#[async_trait]
pub trait Opened: Debug + Send + Sync {
    /// Returns the interface for reads and writes on this store.
    fn store(&self) -> Arc<dyn Store>;

    /// The embedded store, if this process itself opened its files; `None` for any other store.
    fn embedded(&self) -> Option<&MvccStore> {
        None
    }

    /// The store's cluster operations; `None` if the store is not a cluster.
    fn cluster(&self) -> Option<Arc<dyn ClusterStore>> {
        None
    }

    /// Checks that the store has enough space for an ordinary commit.
    ///
    /// # Errors
    /// `NoSpace` if the store has too little space; otherwise any store error.
    async fn check_room(&self) -> Result<()>;

    /// Waits for calls in flight, and then closes the store for all handles.
    ///
    /// # Errors
    /// The engine's error; even if closing the store fails, every acknowledged commit is durable.
    async fn close(&self) -> Result<()>;
}

#[async_trait]
impl Opened for MvccStore {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn embedded(&self) -> Option<&MvccStore> {
        Some(self)
    }

    async fn check_room(&self) -> Result<()> {
        Self::check_room(self).await
    }

    async fn close(&self) -> Result<()> {
        Self::close(self).await
    }
}

/// Operations of a store on a cluster that are about the whole cluster.
#[async_trait]
pub trait ClusterStore: Debug + Send + Sync {
    /// The cluster's id, without a request to the cluster; `None` until the cluster has answered for the first time.
    fn cluster_id(&self) -> Option<u64>;

    /// Asks a cluster member for a description of itself and the cluster, with one small request.
    ///
    /// # Errors
    /// Any error of the request that `about` sends to the cluster.
    async fn about(&self) -> Result<ClusterDescription>;

    /// Asks all cluster members about themselves, in parallel, with one small request each.
    ///
    /// # Errors
    /// Any error of finding the cluster's members. The error of a single member is in its [`MemberReport`].
    async fn members(&self) -> Result<Vec<MemberReport>>;
}

/// The answer of one member of a cluster, or the reason why the member did not answer.
#[derive(Debug)]
pub struct MemberReport {
    /// The member's endpoint, from the configuration or from DNS.
    pub endpoint: String,
    /// The member's description of itself and the cluster.
    pub description: Result<ClusterDescription>,
}

/// The role of a member in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberRole {
    /// The member that orders all changes in the cluster.
    Leader,
    /// A voting member that follows the cluster's leader.
    Follower,
    /// A cluster member without a vote, which serves no clients.
    Learner,
    /// A cluster member that knows no leader at the moment.
    Leaderless,
}

/// The description of a cluster, as one of its members gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterDescription {
    /// The cluster's id.
    pub cluster: u64,
    /// The endpoints of the cluster's members, including endpoints from SRV records.
    pub endpoints: Vec<String>,
    /// The version of the member's server software.
    pub version: String,
    /// The role of the member in the cluster.
    pub role: MemberRole,
    /// The newest revision that the member knows.
    pub revision: Revision,
    /// The size of the member's database file, in bytes.
    pub db_bytes: u64,
    /// The number of bytes in the member's database file that hold data.
    pub db_bytes_in_use: u64,
    /// The database size at which the member refuses writes, in bytes; `None` if the member does not report this size.
    pub db_quota_bytes: Option<u64>,
    /// The problems that the member reports, for example a raised space quota alarm.
    pub problems: Vec<ClusterProblem>,
}

/// A problem that a member of a cluster reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterProblem {
    /// The kind of the problem.
    pub kind: ClusterProblemKind,
    /// The problem in words for an operator.
    pub text: String,
    /// The operator's next step; `None` if the driver knows no step for this problem.
    pub next_step: Option<&'static str>,
}

/// The kinds of problems that a member of a cluster reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClusterProblemKind {
    /// The database quota is used up, so the cluster refuses changes.
    NoSpace,
    /// The members' data differ, so the cluster refuses changes.
    Corrupt,
    /// Any other problem.
    Other,
}

impl fmt::Display for ClusterProblem {
    /// Formats the problem followed by the next step.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.next_step {
            Some(next_step) => write!(f, "{}: {next_step}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

/// The database quota in bytes that applies if a cluster's operator has set none, which is etcd's default.
pub const DEFAULT_QUOTA_BYTES: u64 = 2 << 30;
/// The share of a cluster's database quota in use, in percent, above which Margay warns.
pub const MAX_QUOTA_PERCENT_IN_USE: u64 = 60;

/// The parent folder of an embedded store for which the configuration has no path.
const DEFAULT_FOLDER: &str = "/var/lib/margay";

/// The driver of an engine that keeps a store in a folder. The URL of a `LocalDriver`'s store is `NAME:///path`, where
/// NAME is the engine's name. The `datastore_type` of a `LocalDriver` is the engine's name, and the default path is
/// `/var/lib/margay/ipam.NAME`.
#[derive(Clone, Copy, Debug)]
pub struct LocalDriver<E> {
    engine: E,
    /// The facts about the driver, except the name, which is the engine's name.
    facts: DriverFacts,
}

impl<E> LocalDriver<E> {
    /// Creates the driver for the stores of an engine.
    pub const fn new(engine: E) -> Self {
        Self { engine, facts: DriverFacts::new("", Scope::Machine) }
    }

    /// Sets the number of large transactions that a program should send concurrently. Sending transactions concurrently
    /// is useful because the store commits all waiting transactions together.
    #[must_use]
    pub const fn with_writes_in_flight(mut self, writes: usize) -> Self {
        self.facts = self.facts.with_writes_in_flight(writes);
        self
    }

    /// Sets the maximum number of keys that a long reader reads before it yields the store to waiting processes. An
    /// engine that is slow to open should allow more keys to be read before the store is yielded.
    #[must_use]
    pub const fn with_keys_in_a_turn(mut self, keys: usize) -> Self {
        self.facts = self.facts.with_keys_in_a_turn(keys);
        self
    }
}

#[async_trait]
impl<E: Engine + Copy + Debug + 'static> Driver for LocalDriver<E> {
    fn facts(&self) -> DriverFacts {
        let name = self.engine.name();
        DriverFacts { name, datastore_type: name, ..self.facts }
    }

    fn url_form(&self) -> Option<String> {
        Some(format!("{}:///path", self.engine.name()))
    }

    fn place_of_url(&self, scheme: &str, rest: &str) -> error::ConfigResult<StorePlace> {
        if scheme != self.engine.name() {
            return Err(ConfigError::UnknownScheme(scheme.to_owned()));
        }
        absolute_path(scheme, rest).map(StorePlace::Folder)
    }

    fn place_of_settings(&self, settings: &Settings) -> error::ConfigResult<StorePlace> {
        match settings.path.as_str() {
            "" => Ok(StorePlace::Folder(format!("{DEFAULT_FOLDER}/ipam.{}", self.engine.name()).into())),
            path if Path::new(path).is_absolute() => Ok(StorePlace::Folder(path.into())),
            _ => Err(ConfigError::RelativePath { setting: settings.path_setting }),
        }
    }

    fn url(&self, place: &StorePlace) -> String {
        match place {
            StorePlace::Folder(path) => format!("{}://{}", self.engine.name(), path.display()),
            StorePlace::Memory | StorePlace::Cluster(_) => format!("no folder of {}", self.engine.name()),
        }
    }

    async fn open(&self, place: &StorePlace, options: &OpenOptions) -> Result<Box<dyn Opened>> {
        let StorePlace::Folder(path) = place else {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Open, self.engine.name()));
        };
        Ok(Box::new(kv_local::open(self.engine, path, options).await?))
    }

    fn engine(&self) -> Option<&dyn Engine> {
        Some(&self.engine)
    }
}

/// The driver of `memory:`, a store in memory whose content is lost when it is closed. The memory driver is only for
/// tests, the conformance suite and benchmarks.
pub static MEMORY: MemoryDriver = MemoryDriver;

/// The type of [`MEMORY`], the driver of stores in memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryDriver;

#[async_trait]
impl Driver for MemoryDriver {
    fn facts(&self) -> DriverFacts {
        DriverFacts::new("memory", Scope::Process)
    }

    fn url_form(&self) -> Option<String> {
        None
    }

    /// Always returns an error: the URL `memory:` has no `//`, so [`Drivers::parse`](crate::Drivers::parse) handles it.
    fn place_of_url(&self, scheme: &str, _rest: &str) -> error::ConfigResult<StorePlace> {
        Err(ConfigError::UnknownScheme(scheme.to_owned()))
    }

    fn place_of_settings(&self, _settings: &Settings) -> error::ConfigResult<StorePlace> {
        Err(ConfigError::MemoryStore)
    }

    fn url(&self, _place: &StorePlace) -> String {
        "memory:".to_owned()
    }

    async fn open(&self, _place: &StorePlace, _options: &OpenOptions) -> Result<Box<dyn Opened>> {
        Ok(Box::new(kv_mvcc::memory()))
    }
}
