//! The stores that a program is made with.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::contract::{Driver, Scope};
use crate::error::{ConfigError, Result};
use crate::location::Location;
use crate::place::Place;
use crate::settings::Settings;

/// The name of the driver whose store is meant when nothing is configured at all.
pub const DEFAULT_ENGINE: &str = "sled";

/// The `datastore_type` that leaves it to us which engine keeps a store on this machine.
const LOCAL: &str = "local";

/// The drivers that a program is made with, in the order in which help and errors name them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Drivers(Arc<[&'static dyn Driver]>);

impl Drivers {
    /// These drivers. Their names differ.
    pub fn new(drivers: impl IntoIterator<Item = &'static dyn Driver>) -> Self {
        Self(drivers.into_iter().collect())
    }

    /// These drivers, and one more.
    #[must_use]
    pub fn with(&self, driver: &'static dyn Driver) -> Self {
        Self::new(self.iter().chain([driver]))
    }

    /// The drivers.
    pub fn iter(&self) -> impl Iterator<Item = &'static dyn Driver> {
        self.0.iter().copied()
    }

    /// The driver of this name.
    pub fn named(&self, name: &str) -> Option<&'static dyn Driver> {
        self.iter().find(|driver| driver.facts().name == name)
    }

    /// The drivers of stores in folders.
    pub fn local(&self) -> impl Iterator<Item = &'static dyn Driver> {
        self.iter().filter(|driver| driver.facts().scope == Scope::Machine)
    }

    fn local_named(&self, name: &str) -> Option<&'static dyn Driver> {
        self.local().find(|driver| driver.facts().name == name)
    }

    /// The driver of a `datastore_type` that configuration may name.
    pub fn of_type(&self, datastore_type: &str) -> Option<&'static dyn Driver> {
        if datastore_type == LOCAL {
            return self.default_driver().ok();
        }
        // Nothing that is configured keeps a store in memory.
        let named = |driver: &&dyn Driver| driver.facts().datastore_type == datastore_type;
        self.iter().filter(|driver| driver.facts().scope != Scope::Process).find(named)
    }

    /// The driver of [`DEFAULT_ENGINE`], else the first of a store in a folder.
    ///
    /// # Errors
    /// `UnknownType` if the program is made without any store in folders.
    pub fn default_driver(&self) -> Result<&'static dyn Driver> {
        let default = self.named(DEFAULT_ENGINE);
        default.or_else(|| self.local().next()).ok_or_else(|| ConfigError::UnknownType(LOCAL.to_owned()))
    }

    /// The store that settings of this driver's type name.
    ///
    /// # Errors
    /// Every error of [`Driver::place_of_settings`].
    pub fn of_settings(&self, driver: &'static dyn Driver, settings: &Settings) -> Result<Location> {
        Ok(self.at(driver, driver.place_of_settings(settings)?))
    }

    /// The store at a URL.
    ///
    /// # Errors
    /// An unknown scheme, and the faults that [`Driver::place_of_url`] finds. No error repeats what may be a secret.
    pub fn parse(&self, url: &str) -> Result<Location> {
        let Some((scheme, rest)) = url.split_once("://") else {
            let in_memory = url.strip_suffix(':').and_then(|name| self.named(name));
            let in_memory = in_memory.filter(|driver| driver.facts().scope == Scope::Process);
            let not_a_url = || ConfigError::NotAUrl { path: url.starts_with('/').then(|| url.to_owned()) };
            return Ok(self.at(in_memory.ok_or_else(not_a_url)?, Place::Memory));
        };
        let lower = scheme.to_ascii_lowercase();
        let unknown = || ConfigError::UnknownScheme(scheme.to_owned());
        let driver = self.named(lower.split('+').next().unwrap_or_default()).ok_or_else(unknown)?;
        match driver.place_of_url(&lower, rest) {
            Err(ConfigError::UnknownScheme(_)) => Err(unknown()),
            place => Ok(self.at(driver, place?)),
        }
    }

    /// The driver of the store that is in a folder: of the engine that its file `store.id` names, which may be none of these; without
    /// that file of the engine whose files are there.
    pub fn found_in(&self, folder: &Path) -> Option<&'static dyn Driver> {
        match kv_local::engine_in(folder) {
            Some(engine) => self.local_named(&engine),
            None => self.with_files_in(folder).next(),
        }
    }

    /// The drivers whose engine has files in a folder.
    pub fn with_files_in(&self, folder: &Path) -> impl Iterator<Item = &'static dyn Driver> {
        let has_files = |driver: &&dyn Driver| {
            driver.engine().is_some_and(|engine| fs::symlink_metadata(folder.join(engine.entry())).is_ok())
        };
        self.local().filter(has_files)
    }

    /// The store in a folder: of the driver whose store is there, else of the one whose name is the folder's extension, else of
    /// the default one.
    ///
    /// # Errors
    /// `UnknownType` if the program is made without any store in folders.
    pub fn in_folder(&self, folder: impl Into<PathBuf>) -> Result<Location> {
        let folder = folder.into();
        let is_extension = |driver: &&dyn Driver| folder.extension().is_some_and(|it| it == driver.facts().name);
        let driver = self.found_in(&folder).or_else(|| self.local().find(is_extension));
        let driver = driver.map_or_else(|| self.default_driver(), Ok)?;
        Ok(self.at_folder(driver, folder))
    }

    /// The store in a folder of the driver of this name.
    ///
    /// # Errors
    /// `UnknownType` for a name that no driver of stores in folders has.
    pub fn of_engine(&self, name: &str, folder: impl Into<PathBuf>) -> Result<Location> {
        let driver = self.local_named(name).ok_or_else(|| ConfigError::UnknownType(name.to_owned()))?;
        Ok(self.at_folder(driver, folder))
    }

    /// The store of a driver in a folder.
    pub fn at_folder(&self, driver: &'static dyn Driver, folder: impl Into<PathBuf>) -> Location {
        self.at(driver, Place::Folder(folder.into()))
    }

    /// The store that is meant when nothing is configured at all.
    ///
    /// # Errors
    /// Every error of [`default_driver`](Self::default_driver).
    pub fn default_location(&self) -> Result<Location> {
        self.of_settings(self.default_driver()?, &Settings::default())
    }

    /// A store in the memory of this process.
    pub fn memory(&self) -> Location {
        self.at(&crate::MEMORY, Place::Memory)
    }

    /// The `datastore_type`s that configuration can name, as in `sled, redb or etcdv3`.
    pub fn types(&self) -> String {
        either(self.iter().filter(|driver| driver.facts().scope != Scope::Process).map(|it| it.facts().datastore_type))
    }

    /// The names of stores in folders, each between `before` and `after`, as in `sled or redb`.
    pub fn local_names(&self, before: &str, after: &str) -> String {
        either(self.local().map(|driver| format!("{before}{}{after}", driver.facts().name)))
    }

    /// A URL of each store, as in `sled:///path, redb:///path or etcd://host:port`.
    pub fn urls(&self) -> String {
        let forms = self.iter().filter_map(Driver::url_form);
        either(forms.map(|form| form.split(' ').next().unwrap_or_default().to_owned()))
    }

    /// The forms of store URLs.
    pub fn url_forms(&self) -> String {
        self.iter().filter_map(Driver::url_form).collect::<Vec<_>>().join(", ")
    }

    fn at(&self, driver: &'static dyn Driver, place: Place) -> Location {
        Location::new(self.clone(), driver, place)
    }
}

/// The members of a list of which one is meant.
fn either(names: impl Iterator<Item = impl Into<String>>) -> String {
    let mut names: Vec<String> = names.map(Into::into).collect();
    match (names.pop(), names.is_empty()) {
        (Some(last), false) => format!("{} or {last}", names.join(", ")),
        (last, _) => last.unwrap_or_default(),
    }
}
