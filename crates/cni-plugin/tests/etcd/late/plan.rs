//! The events of a round, drawn from its random numbers.

use crate::random::Random;

/// One round of so many is on the cluster.
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

/// How the plugins of a node take the lock that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostLocks {
    /// As they are configured to: one after the other.
    Shared,
    /// Each has one of its own, as if it had waited for the other's too long.
    Apart,
}

/// How an ADD comes to the moment at which etcd is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// That is any moment in its life.
    Any,
    /// It is the moment at which its pending commit is seen.
    Watched,
    /// It is stopped itself, when it has had the processor about as long as it takes to the answer before its commit: so it
    /// often sends its commit to an etcd that stands still.
    Stopped,
}

/// The fate of the ADDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// They are killed while etcd stands still.
    Killed,
    /// They stand still as etcd does, and are killed when it has read what they sent: their connections do not end before.
    Frozen,
    /// They give up by themselves.
    TimedOut,
}

/// The next calls of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Del,
    TwoDels,
    AddAgain,
}

/// The time of these calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// While etcd stands still; on a cluster they end then, too.
    Before,
    /// When etcd goes on.
    With,
    /// When etcd has read all that it was sent.
    After,
}

/// A round.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) place: Place,
    /// The member that is queried first, of three.
    pub(super) first: usize,
    /// True if the node has released its blocks before.
    pub(super) new_block: bool,
    pub(super) containers: Vec<String>,
    pub(super) locks: HostLocks,
    pub(super) pace: Pace,
    pub(super) fate: Fate,
    pub(super) next: Next,
    pub(super) when: When,
    /// True if the node releases its blocks while etcd still stands still. Only other members of a cluster can serve
    /// that.
    pub(super) gives_back: bool,
}

impl Plan {
    pub(super) fn draw(round: u64, random: &mut Random) -> Self {
        let place = if round % CLUSTER == CLUSTER - 1 { Place::Cluster } else { Place::One };
        let fate = *random.pick(&[Fate::Killed, Fate::Killed, Fate::Frozen, Fate::Frozen, Fate::TimedOut]);
        // An ADD that stands still would keep the lock.
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
