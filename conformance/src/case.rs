//! Defines the test cases of the suite.

use std::fmt;

use futures::future::BoxFuture;

use crate::expect::Checked;
use crate::harness::{Ability, Scene, Tenancy};
use crate::subject::Subject;

/// A topic of test cases. The cases of each topic are in a file of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Group {
    /// Cases about single reads and writes.
    Basic,
    /// Cases about the revision counter.
    Revisions,
    /// Cases about transactions.
    Txn,
    /// Cases about reads of ranges.
    Range,
    /// Cases about reads of the past, and compaction.
    History,
    /// Cases about watches.
    Watch,
    /// Cases with several clients at the same time.
    Concurrency,
    /// Cases about sizes, counts and invalid input.
    Limits,
    /// Cases about the state after a crash, on a full disk, and with damaged files.
    Durability,
    /// Cases with several processes that use one store.
    Processes,
    /// Cases about failures of networks and servers.
    Faults,
}

/// Says whether a case runs at the same time as other cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    /// The case runs at the same time as other cases.
    Light,
    /// The case runs alone, because the case needs much of the machine or checks the whole process.
    Heavy,
}

/// A test case of the suite, with the rules that the case judges.
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

    /// The numbers of the rules that the case judges. A failure breaks the first rule, unless the failure names a
    /// different rule.
    pub fn rules(&self) -> &'static [&'static str] {
        self.rules
    }

    /// The abilities that the environment must have.
    pub fn needs(&self) -> &'static [Ability] {
        self.needs
    }

    /// The least tenancy that the case needs. A case that can share a store can also run on an exclusive store.
    pub fn tenancy(&self) -> Tenancy {
        self.tenancy
    }

    /// The scene in which the case needs its store.
    pub fn scene(&self) -> Scene {
        self.scene
    }

    /// The reason why the case cannot run in an environment with these abilities; `None` if the case can run.
    pub fn ignored_because(&self, abilities: &[Ability]) -> Option<&'static str> {
        self.needs.iter().find(|need| !abilities.contains(need)).map(|need| need.missing())
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("rules", &self.rules).finish_non_exhaustive()
    }
}
