//! The definition of a case.

use std::fmt;

use futures::future::BoxFuture;

use crate::expect::Checked;
use crate::harness::{Ability, Scene, Tenancy};
use crate::subject::Subject;

/// A topic of cases. Each topic has a file of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Group {
    /// Single reads and writes.
    Basic,
    /// The revision counter.
    Revisions,
    /// Transactions.
    Txn,
    /// Reading ranges.
    Range,
    /// Reads of the past, and compaction.
    History,
    /// Watches.
    Watch,
    /// Several clients at the same time.
    Concurrency,
    /// Sizes, counts and invalid input.
    Limits,
    /// The state after a crash, on a full disk, and with damaged files.
    Durability,
    /// Several processes that use one store.
    Processes,
    /// Failures of networks and servers.
    Faults,
}

/// Whether a case runs beside other cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    /// Runs beside other cases.
    Light,
    /// Runs alone, because it needs much of the machine or checks the whole process.
    Heavy,
}

/// A test of the suite, with the rules that it judges.
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
    /// The name of the case: a letter for the group, two digits, and what is tested.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The topic of the case.
    pub fn group(&self) -> Group {
        self.group
    }

    /// The numbers of the rules that the case judges. A failure breaks the first one, unless it names another.
    pub fn rules(&self) -> &'static [&'static str] {
        self.rules
    }

    /// The abilities that the environment must have.
    pub fn needs(&self) -> &'static [Ability] {
        self.needs
    }

    /// The least tenancy that the case needs. A case that can share a store can also run on an exclusive one.
    pub fn tenancy(&self) -> Tenancy {
        self.tenancy
    }

    /// The scene in which the case needs its store.
    pub fn scene(&self) -> Scene {
        self.scene
    }

    /// Why the case cannot run in an environment with these abilities; `None` if it can.
    pub fn ignored_because(&self, abilities: &[Ability]) -> Option<&'static str> {
        self.needs.iter().find(|need| !abilities.contains(need)).map(|need| need.missing())
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("rules", &self.rules).finish_non_exhaustive()
    }
}
