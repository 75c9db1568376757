//! Keeps the list of drivers that a program is built with, finds the driver for a store's location, and gives advice
//! that names the kinds of stores that the program supports.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::contract::{Driver, DriverFacts, Scope};
use crate::error::{ConfigError, ConfigResult};
use crate::place::{Access, ClusterAddress, Settings, StorePlace};

/// The name of the driver of the default store, which is used if no store is configured.
pub const DEFAULT_ENGINE: &str = "sled";

/// The `datastore_type` of a store on this machine that uses the default engine.
const LOCAL_DATASTORE_TYPE: &str = "local";

/// The drivers that a program is built with, in the order in which help and errors list the drivers. A `Drivers` is
/// cheap to clone.
#[derive(Clone, Debug)]
pub struct Drivers(Arc<[&'static dyn Driver]>);

impl Drivers {
    /// Creates a list of drivers with distinct names.
    pub fn new(drivers: impl IntoIterator<Item = &'static dyn Driver>) -> Self {
        Self(drivers.into_iter().collect())
    }

    /// Returns a list of these drivers and `driver`.
    #[must_use]
    pub fn with(&self, driver: &'static dyn Driver) -> Self {
        Self::new(self.iter().chain([driver]))
    }

    /// Iterates over the program's drivers.
    pub fn iter(&self) -> impl Iterator<Item = &'static dyn Driver> {
        self.0.iter().copied()
    }

    /// The driver with the name `name`; `None` if the program has no such driver.
    pub fn named(&self, name: &str) -> Option<&'static dyn Driver> {
        self.iter().find(|driver| driver.facts().name == name)
    }

    /// Iterates over the drivers of stores in folders.
    pub fn local(&self) -> impl Iterator<Item = &'static dyn Driver> {
        self.iter().filter(|driver| driver.facts().scope == Scope::Machine)
    }

    fn local_named(&self, name: &str) -> Option<&'static dyn Driver> {
        self.local().find(|driver| driver.facts().name == name)
    }

    /// The driver of a `datastore_type` in configuration; `None` for an unknown type.
    pub fn of_type(&self, datastore_type: &str) -> Option<&'static dyn Driver> {
        if datastore_type == LOCAL_DATASTORE_TYPE {
            return self.default_driver().ok();
        }
        // Configuration cannot select a store in memory.
        let named = |driver: &&dyn Driver| driver.facts().datastore_type == datastore_type;
        self.iter().filter(|driver| driver.facts().scope != Scope::Process).find(named)
    }

    /// The driver named [`DEFAULT_ENGINE`], or else the first driver of stores in folders.
    ///
    /// # Errors
    /// `UnknownType` if the program has no driver of stores in folders.
    pub fn default_driver(&self) -> ConfigResult<&'static dyn Driver> {
        let default = self.named(DEFAULT_ENGINE);
        default.or_else(|| self.local().next()).ok_or_else(|| ConfigError::UnknownType(LOCAL_DATASTORE_TYPE.to_owned()))
    }

    /// Derives the location of a store from settings for the driver `driver`.
    ///
    /// # Errors
    /// See [`Driver::place_of_settings`].
    pub fn of_settings(&self, driver: &'static dyn Driver, settings: &Settings) -> ConfigResult<Location> {
        Ok(self.at(driver, driver.place_of_settings(settings)?))
    }

    /// Parses a store URL.
    ///
    /// # Errors
    /// An unknown scheme, or the fault that [`Driver::place_of_url`] finds. No error contains text that may be a
    /// secret.
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

    /// Returns the driver of the store in a folder. The file `store.id` names the store's engine; the result is `None`
    /// if the program lacks a driver for this engine. Without `store.id`, returns the first driver whose engine's files
    /// are in the folder.
    pub fn found_in(&self, folder: &Path) -> Option<&'static dyn Driver> {
        match kv_local::engine_in(folder) {
            Some(engine) => self.local_named(&engine),
            None => self.with_files_in(folder).next(),
        }
    }

    /// Returns the drivers whose engines have files in a folder.
    pub fn with_files_in(&self, folder: &Path) -> impl Iterator<Item = &'static dyn Driver> {
        let has_files = |driver: &&dyn Driver| {
            driver.engine().is_some_and(|engine| fs::symlink_metadata(folder.join(engine.entry())).is_ok())
        };
        self.local().filter(has_files)
    }

    /// Returns the location of the store in a folder. The driver of the location is the driver of the existing store in
    /// the folder, or else the driver that the folder's extension names, or else the default driver.
    ///
    /// # Errors
    /// `UnknownType` if the program has no driver of stores in folders.
    pub fn in_folder(&self, folder: impl Into<PathBuf>) -> ConfigResult<Location> {
        let folder = folder.into();
        let is_extension = |driver: &&dyn Driver| folder.extension().is_some_and(|it| it == driver.facts().name);
        let driver = self.found_in(&folder).or_else(|| self.local().find(is_extension));
        let driver = driver.map_or_else(|| self.default_driver(), Ok)?;
        Ok(self.at_folder(driver, folder))
    }

    /// Returns the location of the store in a folder, with the driver named `name`.
    ///
    /// # Errors
    /// `UnknownType` if no driver of stores in folders has this name.
    pub fn of_engine(&self, name: &str, folder: impl Into<PathBuf>) -> ConfigResult<Location> {
        let driver = self.local_named(name).ok_or_else(|| ConfigError::UnknownType(name.to_owned()))?;
        Ok(self.at_folder(driver, folder))
    }

    /// Returns the location of the store in a folder, with the driver `driver`.
    pub fn at_folder(&self, driver: &'static dyn Driver, folder: impl Into<PathBuf>) -> Location {
        self.at(driver, StorePlace::Folder(folder.into()))
    }

    /// The location of the store that is used if no store is configured.
    ///
    /// # Errors
    /// See [`default_driver`](Self::default_driver).
    pub fn default_location(&self) -> ConfigResult<Location> {
        self.of_settings(self.default_driver()?, &Settings::default())
    }

    /// The location of a store in the memory of this process.
    pub fn memory(&self) -> Location {
        self.at(&crate::MEMORY, StorePlace::Memory)
    }

    /// Lists the `datastore_type`s that configuration can name, for example `sled, redb or etcdv3`.
    pub fn types(&self) -> String {
        either(self.iter().filter(|driver| driver.facts().scope != Scope::Process).map(|it| it.facts().datastore_type))
    }

    /// Lists the names of the drivers of stores in folders, each between `before` and `after`, for example `sled or
    /// redb`.
    pub fn local_names(&self, before: &str, after: &str) -> String {
        either(self.local().map(|driver| format!("{before}{}{after}", driver.facts().name)))
    }

    /// Lists one URL form for each driver, for example `sled:///path, redb:///path or etcd://host:port`.
    pub fn urls(&self) -> String {
        let forms = self.iter().filter_map(Driver::url_form);
        either(forms.map(|form| form.split(' ').next().unwrap_or_default().to_owned()))
    }

    /// Lists the URL forms of all drivers, with the remarks about each form.
    pub fn url_forms(&self) -> String {
        self.iter().filter_map(Driver::url_form).collect::<Vec<_>>().join(", ")
    }

    fn at(&self, driver: &'static dyn Driver, place: StorePlace) -> Location {
        Location::new(self.clone(), driver, place)
    }
}

/// Joins names with commas, and with "or" before the last name.
fn either(names: impl Iterator<Item = impl Into<String>>) -> String {
    let mut names: Vec<String> = names.map(Into::into).collect();
    match (names.pop(), names.is_empty()) {
        (Some(last), false) => format!("{} or {last}", names.join(", ")),
        (last, _) => last.unwrap_or_default(),
    }
}

/// The place of a store, and the driver that opens it. `Display` prints a store URL that [`Drivers::parse`] can parse.
#[derive(Clone)]
pub struct Location {
    drivers: Drivers,
    driver: &'static dyn Driver,
    place: StorePlace,
}

impl Location {
    /// Creates the location of a store at the place `place` that `driver` opens, in a program with the drivers
    /// `drivers`.
    pub(crate) fn new(drivers: Drivers, driver: &'static dyn Driver, place: StorePlace) -> Self {
        Self { drivers, driver, place }
    }

    /// The driver that opens the store.
    pub fn driver(&self) -> &'static dyn Driver {
        self.driver
    }

    /// All drivers of the program.
    pub fn drivers(&self) -> &Drivers {
        &self.drivers
    }

    /// The facts about the driver's stores.
    pub fn facts(&self) -> DriverFacts {
        self.driver.facts()
    }

    /// The place of the store.
    pub fn place(&self) -> &StorePlace {
        &self.place
    }

    /// The folder of a store on this machine; `None` for other stores.
    pub fn path(&self) -> Option<&Path> {
        match &self.place {
            StorePlace::Folder(path) => Some(path),
            StorePlace::Memory | StorePlace::Cluster(_) => None,
        }
    }

    /// The address of a store on a cluster; `None` for other stores.
    pub fn cluster(&self) -> Option<&ClusterAddress> {
        match &self.place {
            StorePlace::Cluster(address) => Some(address),
            StorePlace::Memory | StorePlace::Folder(_) => None,
        }
    }

    /// Returns true if many machines share the store (see [`Scope::Cluster`]).
    pub fn is_shared(&self) -> bool {
        self.facts().scope == Scope::Cluster
    }

    /// Returns the location of the folder `path` with the driver of this location.
    #[must_use]
    pub fn moved_to(&self, path: impl Into<PathBuf>) -> Self {
        Self { place: StorePlace::Folder(path.into()), ..self.clone() }
    }

    /// Returns the location with the credentials for its cluster replaced by the result of `change`. A location of
    /// another kind is returned unchanged.
    ///
    /// # Errors
    /// The error of `change`.
    pub fn with_access<E>(self, change: impl FnOnce(Access) -> Result<Access, E>) -> Result<Self, E> {
        let place = match self.place {
            StorePlace::Cluster(ClusterAddress { access, endpoints, discovery_srv }) => {
                StorePlace::Cluster(ClusterAddress { endpoints, discovery_srv, access: change(access)? })
            }
            place => place,
        };
        Ok(Self { place, ..self })
    }

    /// Returns the store's address with the cluster's endpoints sorted and deduplicated. Files about a store can use
    /// this address as a key.
    pub fn in_order(&self) -> String {
        match &self.place {
            StorePlace::Cluster(address) => self.driver.url(&StorePlace::Cluster(address.in_order())),
            place => self.driver.url(place),
        }
    }

    /// Returns true if both locations are the same store. Credentials and the order of endpoints do not count.
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
    /// Returns one or two sentences of advice for a user whose configuration leads to no store.
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
