//! The driver of every engine that keeps a store in a folder.

use std::fmt::Debug;
use std::path::Path;

use async_trait::async_trait;
use kv::{Error, ErrorKind, Operation};
use kv_local::{Engine, OpenOptions};

use crate::contract::{Driver, Facts, Opened, Scope};
use crate::error::{ConfigError, Result};
use crate::path::absolute;
use crate::place::Place;
use crate::settings::Settings;

/// The folder of stores that no configuration gives a path.
const DEFAULT_FOLDER: &str = "/var/lib/margay";

/// The driver of an engine that keeps a store in a folder. Its URL is `NAME:///path`, its `datastore_type` is the name, and its
/// default path is `/var/lib/margay/ipam.NAME`.
#[derive(Clone, Copy, Debug)]
pub struct LocalDriver<E> {
    engine: E,
    /// Without the name, which only the engine knows.
    facts: Facts,
}

impl<E> LocalDriver<E> {
    /// The driver of an engine.
    pub const fn new(engine: E) -> Self {
        Self { engine, facts: Facts::new("", Scope::Machine) }
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
    fn facts(&self) -> Facts {
        let name = self.engine.name();
        Facts { name, datastore_type: name, ..self.facts }
    }

    fn url_form(&self) -> Option<String> {
        Some(format!("{}:///path", self.engine.name()))
    }

    fn place_of_url(&self, scheme: &str, rest: &str) -> Result<Place> {
        if scheme != self.engine.name() {
            return Err(ConfigError::UnknownScheme(scheme.to_owned()));
        }
        absolute(scheme, rest).map(Place::Folder)
    }

    fn place_of_settings(&self, settings: &Settings) -> Result<Place> {
        match settings.path.as_str() {
            "" => Ok(Place::Folder(format!("{DEFAULT_FOLDER}/ipam.{}", self.engine.name()).into())),
            path if Path::new(path).is_absolute() => Ok(Place::Folder(path.into())),
            _ => Err(ConfigError::RelativePath { setting: settings.path_setting }),
        }
    }

    fn url(&self, place: &Place) -> String {
        match place {
            Place::Folder(path) => format!("{}://{}", self.engine.name(), path.display()),
            Place::Memory | Place::Cluster(_) => format!("no folder of {}", self.engine.name()),
        }
    }

    async fn open(&self, place: &Place, options: &OpenOptions) -> kv::Result<Box<dyn Opened>> {
        let Place::Folder(path) = place else {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Open, self.engine.name()));
        };
        Ok(Box::new(kv_local::open(self.engine, path, options).await?))
    }

    fn engine(&self) -> Option<&dyn Engine> {
        Some(&self.engine)
    }
}
