//! The plan of a run: the store, the amount, the seed.

use clap::ValueEnum;

use crate::sabotage::Sabotage;

/// The store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// In memory.
    Memory,
    /// sled, in a temporary folder.
    Sled,
    /// redb, in a temporary folder.
    Redb,
    /// An etcd of its own, in a temporary folder.
    Etcd,
}

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// The store.
    pub engine: Engine,
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
    /// So many operations on a store, by three workers on each of four nodes.
    pub fn new(engine: Engine, mode: Mode, ops: u64, seed: u64) -> Self {
        Self { engine, mode, ops, seed, nodes: 4, workers: 3, way: Reach::Files, sabotage: Sabotage::None }
    }

    /// The name of a node.
    pub(crate) fn node(number: usize) -> String {
        format!("node{number}")
    }
}
