//! Defines the test cases of the conformance suite.

use std::fmt;

use futures::future::BoxFuture;

use crate::expect::Checked;
use crate::harness::{Ability, Scene, Tenancy};
use crate::subject::Subject;

/// The topic of a group of conformance cases. The test cases of each topic are in their own source files.
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
    /// Cases about reads of past revisions, and about compaction.
    History,
    /// Cases about watches.
    Watch,
    /// Cases in which several clients use one store at the same time.
    Concurrency,
    /// Cases about limits on sizes and counts, and about invalid input.
    Limits,
    /// Cases about a store after a crash, on a full disk, or with damaged files.
    Durability,
    /// Cases with several processes that use one store.
    Processes,
    /// Cases about failures of networks and servers.
    Faults,
}

/// Says whether a test case runs at the same time as other cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    /// The test case runs at the same time as other light cases.
    Light,
    /// The test case runs alone, because it loads the whole machine or checks the whole test process.
    Heavy,
}

/// A conformance case: a test that judges some of the rules in `SEMANTICS.md`.
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
    /// The name of the test case: a letter for its group, two digits, and what it tests.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The topic of the test case.
    pub fn group(&self) -> Group {
        self.group
    }

    /// The numbers of the rules that the test case judges. A failure of the test case counts against its first rule,
    /// unless the failure names a different rule.
    pub fn rules(&self) -> &'static [&'static str] {
        self.rules
    }

    /// The abilities that the test environment must have to run this case.
    pub fn needs(&self) -> &'static [Ability] {
        self.needs
    }

    /// Says whether this test case tolerates other clients that write to the store. A test case that tolerates a shared
    /// store also runs on an exclusive store.
    pub fn tenancy(&self) -> Tenancy {
        self.tenancy
    }

    /// The kind of store that the test case needs.
    pub fn scene(&self) -> Scene {
        self.scene
    }

    /// Returns why the test case cannot run in an environment that has only the given `abilities`; `None` if it can
    /// run.
    pub fn ignored_because(&self, abilities: &[Ability]) -> Option<&'static str> {
        self.needs.iter().find(|need| !abilities.contains(need)).map(|need| need.missing())
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("rules", &self.rules).finish_non_exhaustive()
    }
}
