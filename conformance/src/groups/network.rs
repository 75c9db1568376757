//! Simulates a good or bad network between the test clients and the store.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use kv::wrap::{Fault, FaultyStore};
use kv::{Error, Operation, Store};

use crate::expect::{Checked, holds};
use crate::history::Summary;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NetworkQuality {
    Good,
    /// The network loses, delays and holds back requests and answers, and disconnects watches.
    Bad,
}

impl NetworkQuality {
    /// Wraps a store; clients of the wrapper reach the store through the simulated network.
    pub(crate) fn between(self, store: Arc<dyn Store>, seed: u64) -> FaultyStore<Arc<dyn Store>> {
        let random = Mutex::new(Rng::with_seed(seed));
        FaultyStore::new(store, move |operation| {
            let mut random = random.lock().unwrap_or_else(PoisonError::into_inner);
            match (self, operation) {
                (Self::Good, _) => None,
                (Self::Bad, Operation::Watch) => random.bool().then_some(Fault::Disconnect),
                (Self::Bad, _) => fault(random.u8(..100)),
            }
        })
    }
}

fn fault(chance: u8) -> Option<Fault> {
    match chance {
        0..=3 => Some(Fault::ReplyLost),
        4..=6 => Some(Fault::RequestLost),
        7..=8 => Some(Fault::NotSent),
        9..=10 => Some(Fault::Held),
        11..=13 => Some(Fault::Delay(Duration::from_millis(1))),
        _ => None,
    }
}

/// Returns true if the simulated network made the error, and false if the store did.
pub(crate) fn is_injected(error: &Error) -> bool {
    error.store() == "faulty"
}

/// Checks that the simulated network was bad enough: of the calls with unknown outcome, some have happened and some
/// have not.
#[track_caller]
pub(crate) fn left_doubts(summary: &Summary) -> Checked {
    let both = summary.happened > 0 && summary.vanished > 0;
    holds("calls of unknown outcome in the history that happened, and others that did not", both, summary)
}
