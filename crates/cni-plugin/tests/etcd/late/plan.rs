//! Decides by random numbers what a test round does: how etcd stops, how the ADDs end, and what the runtime calls next.

use crate::random::Random;

/// Every `CLUSTER`th test round runs on the cluster of three etcd members.
const CLUSTER: u64 = 4;

/// Which etcd servers a test round uses.
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

/// How the plugins of a node use the host lock file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostLocks {
    /// All plugins use one lock file, and therefore run one after another.
    Shared,
    /// Each plugin has its own lock file, as if its wait for the host lock had timed out.
    Apart,
}

/// The point in an ADD's progress at which etcd is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// etcd is stopped at a random moment of the ADD.
    Any,
    /// etcd is stopped when the ADD has recorded its pending commit.
    Watched,
    /// First the ADD is stopped, at about the time when it has the answer to its last read before the commit; then etcd
    /// is stopped. Resuming a stopped ADD while etcd is still stopped often makes the ADD send its commit to a stopped
    /// etcd.
    Stopped,
}

/// How the ADDs of a test round end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The ADDs are killed while etcd is stopped.
    Killed,
    /// The ADDs are stopped together with etcd, so that their connections stay open, and are killed after etcd has read
    /// their requests.
    Frozen,
    /// The ADDs are stopped by their own time limit.
    TimedOut,
}

/// The plugin calls that the runtime sends after the ADDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Del,
    TwoDels,
    AddAgain,
}

/// Whether the runtime's next calls, after the ADDs, start before, at or after the moment when etcd resumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// The runtime's calls start while etcd is stopped. On a cluster, the runtime's calls end before the stopped member
    /// resumes.
    Before,
    /// The runtime's calls start at the moment when etcd continues.
    With,
    /// The runtime's calls start after etcd has read all data that was sent to it.
    After,
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) place: Place,
    /// The index of the cluster's etcd member that plugins query first.
    pub(super) first: usize,
    /// True if the node releases its blocks before the test round.
    pub(super) new_block: bool,
    pub(super) containers: Vec<String>,
    pub(super) locks: HostLocks,
    pub(super) pace: Pace,
    pub(super) fate: Fate,
    pub(super) next: Next,
    pub(super) when: When,
    /// True if the node releases its blocks while an etcd member is stopped. The node releases its blocks only on an
    /// etcd cluster, because the remaining members must process the release while one member is stopped.
    pub(super) gives_back: bool,
}

impl Plan {
    pub(super) fn draw(round: u64, random: &mut Random) -> Self {
        let place = if round % CLUSTER == CLUSTER - 1 { Place::Cluster } else { Place::One };
        let fate = *random.pick(&[Fate::Killed, Fate::Killed, Fate::Frozen, Fate::Frozen, Fate::TimedOut]);
        // A stopped ADD would keep the shared host lock, and all later calls would wait for it.
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
