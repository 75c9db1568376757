//! Keeps the list of drivers with which a program is built, finds the driver of a store, and advises users on the kinds
//! of stores.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::contract::{Driver, DriverFacts, Scope};
use crate::error::{ConfigError, ConfigResult};
use crate::place::{Access, ClusterAddress, Settings, StorePlace};

/// The name of the default engine, whose driver is used if no store is configured.
pub const DEFAULT_ENGINE: &str = "sled";

/// The `datastore_type` of an embedded store with the default engine.
const LOCAL_DATASTORE_TYPE: &str = "local";

/// The drivers with which a program is built, in the order in which help and error messages list them; cheap to clone.
#[derive(Clone, Debug)]
pub struct Drivers(Arc<[&'static dyn Driver]>);

impl Drivers {
    /// Creates a list of drivers; their names must be distinct.
    pub fn new(drivers: impl IntoIterator<Item = &'static dyn Driver>) -> Self {
        Self(drivers.into_iter().collect())
    }

    /// Returns this list of drivers with `driver` added.
    #[must_use]
    pub fn with(&self, driver: &'static dyn Driver) -> Self {
        Self::new(self.iter().chain([driver]))
    }

    /// Iterates over the drivers in this list.
    pub fn iter(&self) -> impl Iterator<Item = &'static dyn Driver> {
        self.0.iter().copied()
    }

    /// The driver with the name `name`; `None` if the list has no such driver.
    pub fn named(&self, name: &str) -> Option<&'static dyn Driver> {
        self.iter().find(|driver| driver.facts().name == name)
    }

    /// Iterates over the drivers that keep stores in folders.
    pub fn local(&self) -> impl Iterator<Item = &'static dyn Driver> {
        self.iter().filter(|driver| driver.facts().scope == Scope::Machine)
    }

    fn local_named(&self, name: &str) -> Option<&'static dyn Driver> {
        self.local().find(|driver| driver.facts().name == name)
    }

    /// The driver that a `datastore_type` in a configuration selects; `None` if the type is unknown.
    pub fn of_type(&self, datastore_type: &str) -> Option<&'static dyn Driver> {
        if datastore_type == LOCAL_DATASTORE_TYPE {
            return self.default_driver().ok();
        }
        // A configuration cannot select a store in memory.
        let named = |driver: &&dyn Driver| driver.facts().datastore_type == datastore_type;
        self.iter().filter(|driver| driver.facts().scope != Scope::Process).find(named)
    }

    /// The driver named [`DEFAULT_ENGINE`], or else the first driver that keeps stores in folders.
    ///
    /// # Errors
    /// The error `UnknownType` if the program has no driver that keeps stores in folders.
    pub fn default_driver(&self) -> ConfigResult<&'static dyn Driver> {
        let default = self.named(DEFAULT_ENGINE);
        default.or_else(|| self.local().next()).ok_or_else(|| ConfigError::UnknownType(LOCAL_DATASTORE_TYPE.to_owned()))
    }

    /// Derives a store's location from settings for the driver `driver`.
    ///
    /// # Errors
    /// See [`Driver::place_of_settings`].
    pub fn of_settings(&self, driver: &'static dyn Driver, settings: &Settings) -> ConfigResult<Location> {
        Ok(self.at(driver, driver.place_of_settings(settings)?))
    }

    /// Parses a store URL, and returns the store's location.
    ///
    /// # Errors
    /// An unknown URL scheme, or the error of [`Driver::place_of_url`], without text that may be a secret.
    pub fn parse(&self, url: &str) -> ConfigResult<Location> {
        let Some((scheme, rest)) = url.split_once("://") else {
            let in_memory = url.strip_suffix(':').and_then(|name| self.named(name));
            let in_memory = in_memory.filter(|driver| driver.facts().scope == Scope::Process);
            let not_a_url = || ConfigError::NotAUrl { path: url.starts_with('/').then(|| url.to_owned()) };
            return Ok(self.at(in_memory.ok_or_else(not_a_url)?, StorePlace::Memory));
        };
        let lower = scheme.to_ascii_lowercase();
        let unknown = || ConfigError::UnknownScheme(scheme.to_owned());
        let driver = self.named(lower.split('+').next().unwrap_or_default()).ok_or_else(unknown)?;
        match driver.place_of_url(&lower, rest) {
            Err(ConfigError::UnknownScheme(_)) => Err(unknown()),
            place => Ok(self.at(driver, place?)),
        }
    }

    /// Returns the driver of the store in a folder, or `None` if the folder has no store of a known engine. If the
    /// folder has a file `store.id`, the returned driver is that of the engine named in `store.id`. Returns `None` if
    /// the program has no driver for the engine named in `store.id`. Without the file `store.id`, the returned driver
    /// is the first one whose engine's files are in the folder.
    pub fn found_in(&self, folder: &Path) -> Option<&'static dyn Driver> {
        match kv_local::engine_in(folder) {
            Some(engine) => self.local_named(&engine),
            None => self.with_files_in(folder).next(),
        }
    }

    /// Returns those drivers whose engine has files in a folder.
    pub fn with_files_in(&self, folder: &Path) -> impl Iterator<Item = &'static dyn Driver> {
        let has_files = |driver: &&dyn Driver| {
            driver.engine().is_some_and(|engine| fs::symlink_metadata(folder.join(engine.entry())).is_ok())
        };
        self.local().filter(has_files)
    }

    /// Returns the location of the store that is, or will be created, in a folder. If a store exists in the folder, the
    /// location has this store's driver. If no store exists in the folder, the location has the driver that the
    /// folder's file name extension names, or else the default driver.
    ///
    /// # Errors
    /// `UnknownType` if the program has no driver that keeps stores in folders.
    pub fn in_folder(&self, folder: impl Into<PathBuf>) -> ConfigResult<Location> {
        let folder = folder.into();
        let is_extension = |driver: &&dyn Driver| folder.extension().is_some_and(|it| it == driver.facts().name);
        let driver = self.found_in(&folder).or_else(|| self.local().find(is_extension));
        let driver = driver.map_or_else(|| self.default_driver(), Ok)?;
        Ok(self.at_folder(driver, folder))
    }

    /// Returns the location of the store in a folder, for the driver with the name `name`.
    ///
    /// # Errors
    /// `UnknownType` if no driver that keeps stores in folders has this name.
    pub fn of_engine(&self, name: &str, folder: impl Into<PathBuf>) -> ConfigResult<Location> {
        let driver = self.local_named(name).ok_or_else(|| ConfigError::UnknownType(name.to_owned()))?;
        Ok(self.at_folder(driver, folder))
    }

    /// Returns the location of the store in a folder, for the driver `driver`.
    pub fn at_folder(&self, driver: &'static dyn Driver, folder: impl Into<PathBuf>) -> Location {
        self.at(driver, StorePlace::Folder(folder.into()))
    }

    /// Returns the location of the store that programs use if no store is configured.
    ///
    /// # Errors
    /// See [`default_driver`](Self::default_driver).
    pub fn default_location(&self) -> ConfigResult<Location> {
        self.of_settings(self.default_driver()?, &Settings::default())
    }

    /// Returns the location of a store in the memory of this process.
    pub fn memory(&self) -> Location {
        self.at(&crate::MEMORY, StorePlace::Memory)
    }

    /// Lists the values of `datastore_type` that a configuration can contain, for example `sled, redb or etcdv3`.
    pub fn types(&self) -> String {
        either(self.iter().filter(|driver| driver.facts().scope != Scope::Process).map(|it| it.facts().datastore_type))
    }

    /// Lists the names of the drivers that keep stores in folders, each between `before` and `after`, for example `sled
    /// or redb`.
    pub fn local_names(&self, before: &str, after: &str) -> String {
        either(self.local().map(|driver| format!("{before}{}{after}", driver.facts().name)))
    }

    /// Lists the URL form of each driver, for example `sled:///path, redb:///path or etcd://host:port`.
    pub fn urls(&self) -> String {
        let forms = self.iter().filter_map(Driver::url_form);
        either(forms.map(|form| form.split(' ').next().unwrap_or_default().to_owned()))
    }

    /// Lists the URL form of each driver, with any remark about the form.
    pub fn url_forms(&self) -> String {
        self.iter().filter_map(Driver::url_form).collect::<Vec<_>>().join(", ")
    }

    fn at(&self, driver: &'static dyn Driver, place: StorePlace) -> Location {
        Location::new(self.clone(), driver, place)
    }
}

/// Joins names with commas, and writes "or" before the last name.
fn either(names: impl Iterator<Item = impl Into<String>>) -> String {
    let mut names: Vec<String> = names.map(Into::into).collect();
    match (names.pop(), names.is_empty()) {
        (Some(last), false) => format!("{} or {last}", names.join(", ")),
        (last, _) => last.unwrap_or_default(),
    }
}

/// The location of a store: the place of the store, and the driver that opens the store. `Display` prints a location as
/// a store URL that [`Drivers::parse`] can parse.
#[derive(Clone)]
pub struct Location {
    drivers: Drivers,
    driver: &'static dyn Driver,
    place: StorePlace,
}

impl Location {
    /// Creates the location of a store from its place, the driver that opens the store, and all drivers of the program.
    pub(crate) fn new(drivers: Drivers, driver: &'static dyn Driver, place: StorePlace) -> Self {
        Self { drivers, driver, place }
    }

    /// The driver that opens the store.
    pub fn driver(&self) -> &'static dyn Driver {
        self.driver
    }

    /// All drivers with which the program is built, including the location's own driver.
    pub fn drivers(&self) -> &Drivers {
        &self.drivers
    }

    /// What a program may assume about the store at this location, according to its driver.
    pub fn facts(&self) -> DriverFacts {
        self.driver.facts()
    }

    /// Where the store at this location is: in memory, in a folder or on a cluster.
    pub fn place(&self) -> &StorePlace {
        &self.place
    }

    /// The store's folder, if the store is in a folder; `None` for a store in memory or on a cluster.
    pub fn path(&self) -> Option<&Path> {
        match &self.place {
            StorePlace::Folder(path) => Some(path),
            StorePlace::Memory | StorePlace::Cluster(_) => None,
        }
    }

    /// The address of the store's cluster; `None` for a store that is not on a cluster.
    pub fn cluster(&self) -> Option<&ClusterAddress> {
        match &self.place {
            StorePlace::Cluster(address) => Some(address),
            StorePlace::Memory | StorePlace::Folder(_) => None,
        }
    }

    /// Returns true if many machines share the store at this location (see [`Scope::Cluster`]).
    pub fn is_shared(&self) -> bool {
        self.facts().scope == Scope::Cluster
    }

    /// Returns the location of the store in folder `path`, opened by the driver of `self`.
    #[must_use]
    pub fn moved_to(&self, path: impl Into<PathBuf>) -> Self {
        Self { place: StorePlace::Folder(path.into()), ..self.clone() }
    }

    /// Returns this location with its cluster's credentials replaced by the result of `change`. A location without a
    /// cluster is returned unchanged.
    ///
    /// # Errors
    /// Any error that the function `change` returns.
    pub fn with_access<E>(self, change: impl FnOnce(Access) -> Result<Access, E>) -> Result<Self, E> {
        let place = match self.place {
            StorePlace::Cluster(ClusterAddress { access, endpoints, discovery_srv }) => {
                StorePlace::Cluster(ClusterAddress { endpoints, discovery_srv, access: change(access)? })
            }
            place => place,
        };
        Ok(Self { place, ..self })
    }

    /// Returns the store's address with sorted and distinct endpoints, so that it can serve as a key in files about the
    /// store.
    pub fn in_order(&self) -> String {
        match &self.place {
            StorePlace::Cluster(address) => self.driver.url(&StorePlace::Cluster(address.in_order())),
            place => self.driver.url(place),
        }
    }

    /// Returns true if both locations name the same store. The comparison ignores credentials and the order of
    /// endpoints.
    pub fn is_same_store(&self, other: &Self) -> bool {
        match (&self.place, &other.place) {
            (StorePlace::Cluster(one), StorePlace::Cluster(two)) => {
                let is_same_driver = self.facts().name == other.facts().name;
                let (one, two) = (one.in_order(), two.in_order());
                is_same_driver && one.endpoints == two.endpoints && one.discovery_srv == two.discovery_srv
            }
            _ => self == other,
        }
    }
}

impl PartialEq for Location {
    fn eq(&self, other: &Self) -> bool {
        self.facts().name == other.facts().name && self.place == other.place
    }
}

impl Eq for Location {}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple(self.facts().name).field(&self.place).finish()
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.driver.url(&self.place))
    }
}

impl Drivers {
    /// Returns advice in one or two sentences, for a user whose configuration selects no store.
    pub fn advice(&self, error: &ConfigError) -> String {
        match error {
            ConfigError::UnknownType(_) => format!("set datastore_type to {}", self.types()),
            ConfigError::NoEndpoints => format!(
                "for an etcd cluster set etcd_endpoints (or ETCD_ENDPOINTS); for a store on this host \
                                  set \"datastore_type\" to {}",
                self.local_names("\"", "\"")
            ),
            ConfigError::EndpointsAndDiscovery => {
                "remove either the endpoints of etcd or the discovery domain from the configuration".into()
            }
            ConfigError::KeyWithoutCertificate => "set etcd_cert_file (or ETCD_CERT_FILE) as well".into(),
            ConfigError::CertificateWithoutKey => "set etcd_key_file (or ETCD_KEY_FILE) as well".into(),
            ConfigError::InlineAndFiles => {
                "set the key and the certificates all as text (etcdKey, etcdCert, etcdCACert), or all as files".into()
            }
            ConfigError::HalfInline => {
                "set both etcdCert and etcdKey, or set only a CA certificate in a file (etcdCACertFile)".into()
            }
            ConfigError::UnreadableConfigFile { .. } => {
                "name an existing file with --config, or name the store with --store URL".into()
            }
            ConfigError::ConfigFileSyntax { .. }
            | ConfigError::ConfigFileVersion(_)
            | ConfigError::ConfigFileKind(_) => {
                "write the file like Calico's calicoctl.cfg, name another file with --config, or use --store URL".into()
            }
            ConfigError::Kubernetes => format!(
                "keep the addresses in etcd (datastore_type etcdv3) or on this host (datastore_type {})",
                self.local_names("", "")
            ),
            ConfigError::Contradiction { .. } => {
                "remove DATASTORE_TYPE from the environment, or set datastore_type in the network configuration".into()
            }
            ConfigError::PathWithoutEmbedded => {
                format!("set the datastore type to {}, or remove the path", self.local_names("", ""))
            }
            ConfigError::RelativePath { .. } => "use a path that begins with /".into(),
            ConfigError::SecretInAddress => {
                "remove user and password from the address: addresses are printed in logs and process lists".into()
            }
            ConfigError::NotAUrl { path: Some(path) } => {
                format!("did you mean {}?", self.local_names("", &format!("://{path}")))
            }
            ConfigError::NotAUrl { path: None } | ConfigError::UnknownScheme(_) => {
                format!("use a store URL of one of these forms: {}", self.url_forms())
            }
            ConfigError::UrlPath(scheme) if scheme.ends_with("+unix") => {
                format!("write the URL with three slashes: {scheme}:///run/etcd/etcd.sock")
            }
            ConfigError::UrlPath(scheme) => {
                format!("write the URL with three slashes: {scheme}:///var/lib/margay/ipam.{scheme}")
            }
            ConfigError::UrlOptions(_) => "remove ? and # from the store URL, which ends with the path".into(),
            ConfigError::EtcdUrl => "write the URL as etcd://host:port[,host:port]".into(),
            ConfigError::MemoryStore => match self.default_location() {
                Ok(location) => format!("name a store that is kept on disk, such as {location}"),
                Err(_) => format!("use a store URL of one of these forms: {}", self.url_forms()),
            },
            ConfigError::SeveralStores(candidates) => match candidates.first() {
                Some(first) => format!("name one of these stores, for example with --store {}", first.store),
                None => "name one of these stores with --store URL".into(),
            },
            ConfigError::UnreadableConfiguration(_) => "repair the file, or name the store with --store URL".into(),
            ConfigError::InFile { error, .. } | ConfigError::InEnvironment(error) => {
                format!("{}; or name the store with --store URL", self.advice(error))
            }
        }
    }
}
