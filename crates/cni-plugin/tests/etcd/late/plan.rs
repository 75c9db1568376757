//! The plan of a round, drawn from its random numbers.

use crate::random::Random;

/// One of this many rounds runs on the cluster.
const CLUSTER: u64 = 4;

/// The servers of a round.
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
    /// All use one lock, and so run one after another.
    Shared,
    /// Each has its own lock file, as if its wait for the host lock had timed out.
    Apart,
}

/// When etcd is stopped during an ADD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// At a random moment of the ADD.
    Any,
    /// When the ADD's pending commit is recorded.
    Watched,
    /// After the ADD itself was stopped, at about the processor time at which it has the answer before its commit. It
    /// then often sends its commit to a stopped etcd.
    Stopped,
}

/// How the ADDs end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Killed while etcd is stopped.
    Killed,
    /// Stopped together with etcd, and killed after etcd has read their requests, so that their connections stay open
    /// until then.
    Frozen,
    /// They run into their own time limit.
    TimedOut,
}

/// The runtime's next calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Del,
    TwoDels,
    AddAgain,
}

/// When the runtime's next calls run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// While etcd is stopped. On a cluster the calls also end before etcd continues.
    Before,
    /// At the moment when etcd continues.
    With,
    /// After etcd has read all that it was sent.
    After,
}

/// The plan of a round.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) place: Place,
    /// The index of the cluster's member that is queried first.
    pub(super) first: usize,
    /// True if the node releases its blocks before the round.
    pub(super) new_block: bool,
    pub(super) containers: Vec<String>,
    pub(super) locks: HostLocks,
    pub(super) pace: Pace,
    pub(super) fate: Fate,
    pub(super) next: Next,
    pub(super) when: When,
    /// True if the node releases its blocks while etcd is stopped. Only a cluster's other members can process that.
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
