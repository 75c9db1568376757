//! A store in memory.

use async_trait::async_trait;
use kv_local::OpenOptions;

use crate::contract::{Driver, Facts, Opened, Scope};
use crate::error::{ConfigError, Result};
use crate::place::Place;
use crate::settings::Settings;

/// The driver of `memory:`, a store that is gone when it is closed: for tests, conformance and benchmarks only.
pub static MEMORY: Memory = Memory;

/// See [`MEMORY`].
#[derive(Clone, Copy, Debug)]
pub struct Memory;

#[async_trait]
impl Driver for Memory {
    fn facts(&self) -> Facts {
        Facts::new("memory", Scope::Process)
    }

    fn url_form(&self) -> Option<String> {
        None
    }

    /// `memory:` has no `//`, and names no place.
    fn place_of_url(&self, scheme: &str, _rest: &str) -> Result<Place> {
        Err(ConfigError::UnknownScheme(scheme.to_owned()))
    }

    fn place_of_settings(&self, _settings: &Settings) -> Result<Place> {
        Err(ConfigError::MemoryStore)
    }

    fn url(&self, _place: &Place) -> String {
        "memory:".to_owned()
    }

    async fn open(&self, _place: &Place, _options: &OpenOptions) -> kv::Result<Box<dyn Opened>> {
        Ok(Box::new(kv_mvcc::memory()))
    }
}
