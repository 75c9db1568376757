//! Draws the plan of a round from the round's random numbers.

use crate::random::Random;

/// One of this many rounds runs on the cluster of three etcd members.
const CLUSTER: u64 = 4;

/// The etcd servers of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    One,
    Cluster,
}

impl Place {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::One => "one etcd",
            Self::Cluster => "cluster",
        }
    }
}

/// How the plugins of a node use the host lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostLocks {
    /// All plugins use one lock, and therefore run one after another.
    Shared,
    /// Each plugin has its own lock file, as if its wait for the host lock had timed out.
    Apart,
}

/// The moment of an ADD at which etcd is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// At a random moment of the ADD.
    Any,
    /// When the ADD's pending commit is recorded.
    Watched,
    /// After the ADD itself was stopped, at about the processor time at which the ADD has the answer to its last read
    /// before the commit. The ADD then often sends its commit to a stopped etcd.
    Stopped,
}

/// How the ADDs of a round end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The ADDs are killed while etcd is stopped.
    Killed,
    /// The ADDs are stopped together with etcd, and killed after etcd has read their requests, so their connections
    /// stay open until then.
    Frozen,
    /// The ADDs run into their own time limit.
    TimedOut,
}

/// The runtime's next plugin calls after the ADDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Del,
    TwoDels,
    AddAgain,
}

/// The moment at which the runtime's next calls run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// While etcd is stopped. On a cluster, the calls also end before etcd continues.
    Before,
    /// At the moment when etcd continues.
    With,
    /// After etcd has read all data that was sent to it.
    After,
}

/// The plan of a round.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) place: Place,
    /// The index of the cluster's etcd member that is queried first.
    pub(super) first: usize,
    /// True if the node releases its blocks before the round.
    pub(super) new_block: bool,
    pub(super) containers: Vec<String>,
    pub(super) locks: HostLocks,
    pub(super) pace: Pace,
    pub(super) fate: Fate,
    pub(super) next: Next,
    pub(super) when: When,
    /// True if the node releases its blocks while etcd is stopped. Only the other members of a cluster can process a
    /// release while one member is stopped.
    pub(super) gives_back: bool,
}

impl Plan {
    pub(super) fn draw(round: u64, random: &mut Random) -> Self {
        let place = if round % CLUSTER == CLUSTER - 1 { Place::Cluster } else { Place::One };
        let fate = *random.pick(&[Fate::Killed, Fate::Killed, Fate::Frozen, Fate::Frozen, Fate::TimedOut]);
        // A stopped ADD would keep a shared lock.
        let shared = random.once_in(4) && fate != Fate::Frozen;
        let containers = if random.once_in(3) { 2 + random.below(3) } else { 1 };
        Self {
            place,
            first: usize::try_from(random.below(3)).unwrap(),
            new_block: random.once_in(3),
            containers: (0..containers).map(|number| format!("r{round}x{number}")).collect(),
            locks: if shared { HostLocks::Shared } else { HostLocks::Apart },
            pace: *random.pick(&[Pace::Any, Pace::Stopped, Pace::Stopped, Pace::Stopped, Pace::Watched]),
            fate,
            next: *random.pick(&[Next::Del, Next::Del, Next::TwoDels, Next::AddAgain]),
            when: *random.pick(&[When::Before, When::Before, When::With, When::After]),
            gives_back: random.once_in(2),
        }
    }
}
