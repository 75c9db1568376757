//! The plan of a run: the store, the amount, the seed.

use std::path::Path;

use clap::ValueEnum;
use datastore::{Driver, Drivers, Location, Scope};

use crate::Failure;
use crate::sabotage::Sabotage;

/// The kind of the workers, and their deaths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Tasks of this process, on a store that fails; a death is a dropped future.
    InProcess,
    /// Processes that SIGKILL ends.
    Processes,
}

/// How processes reach an embedded store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Reach {
    /// They open its files.
    #[default]
    Files,
    /// `margay serve` has the store. They connect to it, and open the files if it does not answer.
    Daemon,
    /// `margay serve` has the store, and they reach it by etcd's API alone.
    Api,
}

/// A plan.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// The stores of this program.
    drivers: Drivers,
    /// The kind of the store, which is made anew: in memory, in a temporary folder, or an etcd of its own.
    driver: &'static dyn Driver,
    /// The kind of the workers.
    pub mode: Mode,
    /// How many operations, at least.
    pub ops: u64,
    /// Where all random decisions come from.
    pub seed: u64,
    /// How many nodes.
    pub nodes: usize,
    /// How many workers on each.
    pub workers: usize,
    /// How processes reach an embedded store.
    pub way: Reach,
    /// The part that is broken on purpose; in one process only.
    pub sabotage: Sabotage,
}

impl Plan {
    /// A plan for `ops` operations on a store of this name, by three workers on each of four nodes.
    ///
    /// # Errors
    /// A name that none of these drivers has.
    pub fn new(drivers: &Drivers, store: &str, mode: Mode, ops: u64, seed: u64) -> Result<Self, Failure> {
        let driver = drivers.named(store).ok_or_else(|| {
            let names: Vec<_> = drivers.iter().map(|driver| driver.facts().name).collect();
            Failure(format!("there is no store {store:?}: name one of {}", names.join(", ")))
        })?;
        let (nodes, workers, way, sabotage) = (4, 3, Reach::Files, Sabotage::None);
        Ok(Self { drivers: drivers.clone(), driver, mode, ops, seed, nodes, workers, way, sabotage })
    }

    /// The name of the store.
    pub(crate) fn store(&self) -> &'static str {
        self.driver.facts().name
    }

    /// The machines that use the store.
    pub(crate) fn scope(&self) -> Scope {
        self.driver.facts().scope
    }

    /// The store in a folder.
    pub(crate) fn in_folder(&self, folder: &Path) -> Location {
        self.drivers.at_folder(self.driver, folder)
    }

    /// A store in memory.
    pub(crate) fn in_memory(&self) -> Location {
        self.drivers.memory()
    }

    /// The name of a node.
    pub(crate) fn node(number: usize) -> String {
        format!("node{number}")
    }
}
