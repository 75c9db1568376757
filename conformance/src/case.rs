//! The parts of a case.

use std::fmt;

use futures::future::BoxFuture;

use crate::expect::Checked;
use crate::harness::{Ability, Scene, Tenancy};
use crate::subject::Subject;

/// A topic of cases; each is a file of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Group {
    /// Single reads and writes.
    Basic,
    /// The counter.
    Revisions,
    /// Transactions.
    Txn,
    /// Reading ranges.
    Range,
    /// Reading the past, and compaction.
    History,
    /// Watches.
    Watch,
    /// Several clients at once.
    Concurrency,
    /// Sizes, counts and bad input.
    Limits,
    /// The state after a crash, on a full disk, and with damaged files.
    Durability,
    /// Several processes with one store.
    Processes,
    /// Networks and servers that fail.
    Faults,
}

/// How a case gets on with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    /// It runs beside others.
    Light,
    /// It takes much of the machine, or checks the whole process, and runs alone.
    Heavy,
}

/// One case: what it is called, which rules it judges, and how to run it.
#[derive(Clone)]
pub struct Case {
    pub(crate) name: &'static str,
    pub(crate) group: Group,
    pub(crate) rules: &'static [&'static str],
    pub(crate) needs: &'static [Ability],
    pub(crate) scene: Scene,
    pub(crate) weight: Weight,
    pub(crate) tenancy: Tenancy,
    pub(crate) story: fn(Subject) -> BoxFuture<'static, Checked>,
}

impl Case {
    /// Its name: a letter for the group, two digits and what it does.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its topic.
    pub fn group(&self) -> Group {
        self.group
    }

    /// The numbers of the rules that it judges; a failure is one of the first unless it says otherwise.
    pub fn rules(&self) -> &'static [&'static str] {
        self.rules
    }

    /// The required abilities of the environment.
    pub fn needs(&self) -> &'static [Ability] {
        self.needs
    }

    /// The least that it requires of its store: a case that can run on a shared store can run on an exclusive one.
    pub fn tenancy(&self) -> Tenancy {
        self.tenancy
    }

    /// The surroundings in which it wants its store.
    pub fn scene(&self) -> Scene {
        self.scene
    }

    /// Why it cannot run in an environment with these abilities, if so.
    pub fn ignored_because(&self, abilities: &[Ability]) -> Option<&'static str> {
        self.needs.iter().find(|need| !abilities.contains(need)).map(|need| need.missing())
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("rules", &self.rules).finish_non_exhaustive()
    }
}
