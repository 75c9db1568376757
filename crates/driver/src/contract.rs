//! The contract between a store and the programs, and the two drivers that need no backend: that of every engine that keeps a store in
//! a folder, and that of a store in memory.

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use kv::{Error, ErrorKind, Operation, Result, Revision, Store};
use kv_local::{Engine, OpenOptions};
use kv_mvcc::MvccStore;

use crate::error::{self, ConfigError};
use crate::place::{Settings, StorePlace, absolute_path};

/// A kind of store, as the programs see it. A program is made with a list of them, [`Drivers`](crate::Drivers), and knows a
/// store by what its driver says, never by its name.
#[async_trait]
pub trait Driver: Debug + Send + Sync {
    /// The facts on which the programs' decisions depend.
    fn facts(&self) -> DriverFacts;

    /// The form of its URLs, for help and errors, such as `redb:///path`; a remark about them may follow after a blank.
    /// `None` for a store that users cannot name.
    fn url_form(&self) -> Option<String>;

    /// The place that a URL names. `scheme` is in lower case and either the driver's name or begins with it and `+`; `rest` is
    /// all after `://`.
    ///
    /// # Errors
    /// The fault of the URL. No error repeats what may be a secret.
    fn place_of_url(&self, scheme: &str, rest: &str) -> error::Result<StorePlace>;

    /// The place that settings name, whose type is this driver's or that leave it to this driver.
    ///
    /// # Errors
    /// The fault of the settings. No error repeats what may be a secret.
    fn place_of_settings(&self, settings: &Settings) -> error::Result<StorePlace>;

    /// The URL of a place, or its description if it has none.
    fn url(&self, place: &StorePlace) -> String;

    /// Opens the store at a place.
    ///
    /// With [`Blocking::InPlace`](kv_mvcc::Blocking) a store that is shared sends nothing yet, and `wait` is the time that
    /// all its calls have together, beginning now; otherwise it is asked whether it is there and lets us in.
    ///
    /// # Errors
    /// `Missing` if there is none and the options make none; `Locked` if its lock was not free in time; `Unsupported` for a
    /// place of another kind; any other of the engine's.
    async fn open(&self, place: &StorePlace, options: &OpenOptions) -> Result<Box<dyn Opened>>;

    /// The engine of a store in a folder, by which it is looked at without its lock, shrunk, upgraded, replaced; `None` for any
    /// other store.
    fn engine(&self) -> Option<&dyn Engine> {
        None
    }
}

/// The facts about a driver's stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverFacts {
    /// The name, in lower case: in URLs, reports and metrics.
    pub name: &'static str,
    /// Its `datastore_type` in configuration.
    pub datastore_type: &'static str,
    /// The machines that use one store.
    pub scope: Scope,
    /// The number of large transactions that are worth having under way at once.
    pub writes_in_flight: usize,
    /// The most keys that a long reader reads in one opening, so that other processes get the store in between.
    pub keys_in_a_turn: usize,
}

impl DriverFacts {
    /// The facts about stores of this name and scope: 8 writes in flight, and 16,384 keys in a turn.
    pub const fn new(name: &'static str, scope: Scope) -> Self {
        Self { name, datastore_type: name, scope, writes_in_flight: 8, keys_in_a_turn: 16_384 }
    }

    /// With another `datastore_type` than its name.
    #[must_use]
    pub const fn with_datastore_type(mut self, datastore_type: &'static str) -> Self {
        self.datastore_type = datastore_type;
        self
    }

    /// With this number of writes in flight.
    #[must_use]
    pub const fn with_writes_in_flight(mut self, writes: usize) -> Self {
        self.writes_in_flight = writes;
        self
    }

    /// With this bound on the keys in a turn.
    #[must_use]
    pub const fn with_keys_in_a_turn(mut self, keys: usize) -> Self {
        self.keys_in_a_turn = keys;
        self
    }
}

/// The machines that use one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// None: the store ends with the process that made it.
    Process,
    /// One: the store is a folder, which one process at a time has open. Its nodes need not be registered.
    Machine,
    /// Many: the store is a service. A node has to be registered before it gets addresses; a write whose sender dies may still be
    /// carried out.
    Cluster,
}

/// An open store, as its driver hands it out.
#[async_trait]
pub trait Opened: Debug + Send + Sync {
    /// The store.
    fn store(&self) -> Arc<dyn Store>;

    /// The store as one whose files this process has open; `None` for any other.
    fn embedded(&self) -> Option<&MvccStore> {
        None
    }

    /// The store as a cluster's; `None` for any other.
    fn cluster(&self) -> Option<Arc<dyn ClusterStore>> {
        None
    }

    /// Checks that a usual commit finds room.
    ///
    /// # Errors
    /// `NoSpace` if it does not; any other error of the check.
    async fn check_room(&self) -> Result<()>;

    /// Waits for calls in flight and closes the store for all holders of a handle.
    ///
    /// # Errors
    /// The error of the engine. Everything that was acknowledged is durable all the same.
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

/// The part of a cluster's store that is about the cluster.
#[async_trait]
pub trait ClusterStore: Debug + Send + Sync {
    /// The cluster's id; `None` before the first answer. Nothing is sent.
    fn cluster_id(&self) -> Option<u64>;

    /// The report of a member about itself and its cluster; one small request.
    ///
    /// # Errors
    /// Any error of a call.
    async fn about(&self) -> Result<ClusterDescription>;
}

/// A cluster as one of its members describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterDescription {
    /// The cluster's id.
    pub cluster: u64,
    /// The endpoints through which it can be reached, those of SRV records included.
    pub endpoints: Vec<String>,
    /// The version of the server that the member runs.
    pub version: String,
    /// The newest revision that the member has.
    pub revision: Revision,
    /// The bytes of the member's database file.
    pub db_bytes: u64,
    /// How many of them are in use.
    pub db_bytes_in_use: u64,
    /// The bytes at which the member refuses writes; `None` if it does not say.
    pub db_quota_bytes: Option<u64>,
    /// The member's complaints, such as an alarm that is raised.
    pub problems: Vec<String>,
}

/// The folder of stores that no configuration gives a path.
const DEFAULT_FOLDER: &str = "/var/lib/margay";

/// The driver of an engine that keeps a store in a folder. Its URL is `NAME:///path`, its `datastore_type` is the name, and its
/// default path is `/var/lib/margay/ipam.NAME`.
#[derive(Clone, Copy, Debug)]
pub struct LocalDriver<E> {
    engine: E,
    /// Without the name, which only the engine knows.
    facts: DriverFacts,
}

impl<E> LocalDriver<E> {
    /// The driver of an engine.
    pub const fn new(engine: E) -> Self {
        Self { engine, facts: DriverFacts::new("", Scope::Machine) }
    }

    /// With this number of large transactions that are worth having under way at once: one commit is made of all that wait.
    #[must_use]
    pub const fn with_writes_in_flight(mut self, writes: usize) -> Self {
        self.facts = self.facts.with_writes_in_flight(writes);
        self
    }

    /// With this bound on the keys that a long reader reads in one opening; more for an engine that takes long to open.
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

    fn place_of_url(&self, scheme: &str, rest: &str) -> error::Result<StorePlace> {
        if scheme != self.engine.name() {
            return Err(ConfigError::UnknownScheme(scheme.to_owned()));
        }
        absolute_path(scheme, rest).map(StorePlace::Folder)
    }

    fn place_of_settings(&self, settings: &Settings) -> error::Result<StorePlace> {
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

/// The driver of `memory:`, a store that is gone when it is closed: for tests, conformance and benchmarks only.
pub static MEMORY: MemoryDriver = MemoryDriver;

/// See [`MEMORY`].
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

    /// `memory:` has no `//`, and names no place.
    fn place_of_url(&self, scheme: &str, _rest: &str) -> error::Result<StorePlace> {
        Err(ConfigError::UnknownScheme(scheme.to_owned()))
    }

    fn place_of_settings(&self, _settings: &Settings) -> error::Result<StorePlace> {
        Err(ConfigError::MemoryStore)
    }

    fn url(&self, _place: &StorePlace) -> String {
        "memory:".to_owned()
    }

    async fn open(&self, _place: &StorePlace, _options: &OpenOptions) -> Result<Box<dyn Opened>> {
        Ok(Box::new(kv_mvcc::memory()))
    }
}
