//! What is to be done: on which store, how much, from which seed.

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

/// What the workers are, and how they die.
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

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// The store.
    pub engine: Engine,
    /// What the workers are.
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
    /// What is broken on purpose; in one process only.
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
