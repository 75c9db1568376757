//! Containers that get prefixes while their plugins are killed; the same on every store.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use datastore::Create;
use ipam_core::model::NewPool;
use ipnet::IpNet;
use serde_json::Value;

use crate::lab::Lab;
use crate::process::{Call, Outcome};
use crate::random::Random;

const CALLERS: u64 = 6;
const SPAN: Duration = Duration::from_secs(4);
const KILL_WITHIN: u64 = 60;
/// A slow machine goes on until each caller has had so many answers.
const FEWEST: u32 = 5;

/// Makes a pool of prefixes, and the store if it is not there.
pub(crate) fn pool(lab: &Lab, name: &str, cidr: &str, length: u8) {
    let pool = NewPool::new(name, cidr.parse().unwrap()).with_prefix_length(length);
    lab.with_ipam(Create::IfMissing, async |ipam, deadline| {
        ipam.create_pool(&pool, None, deadline).await.unwrap();
    });
}

/// The first prefix of a result.
pub(crate) fn prefix(outcome: &Outcome) -> IpNet {
    let prefixes = &outcome.json()["margay.io/prefixes"];
    let prefix: IpNet = prefixes[0].as_str().unwrap_or_else(|| panic!("{outcome:?}")).parse().unwrap();
    assert!(outcome.cidrs().iter().any(|cidr| cidr.parse::<IpNet>().unwrap().trunc() == prefix), "{outcome:?}");
    prefix
}

/// Containers are made and removed again and again, by plugins that are killed half of the time; a runtime sends a DEL
/// after each ADD. No two that are there at once may have the same prefix.
pub(crate) fn no_prefix_twice(conf: &Value) {
    let live = Mutex::new(BTreeSet::new());
    let caller = |number: u64| {
        let mut random = Random::new(11, number);
        let mut answered = 0;
        let begun = Instant::now();
        for round in 0.. {
            if begun.elapsed() > SPAN && answered >= FEWEST || begun.elapsed() > 20 * SPAN {
                break;
            }
            let container = format!("p{number}-{round}");
            let mut had = None;
            let call = Call::new("ADD", &container, conf);
            let mut child = call.start(call.command());
            if random.once_in(2) {
                sleep(Duration::from_millis(random.below(KILL_WITHIN)));
                child.kill().unwrap();
            }
            let output = child.wait_with_output().unwrap();
            // A kill that comes too late leaves the whole answer.
            if output.status.success() && !output.stdout.is_empty() {
                let own = prefix(&Outcome::new(output, &call));
                assert!(live.lock().unwrap().insert(own), "{own} twice: {container}");
                had = Some(own);
                answered += 1;
            }
            if let Some(own) = had {
                live.lock().unwrap().remove(&own);
            }
            Call::new("DEL", &container, conf).ok();
        }
        assert!(answered >= FEWEST, "caller {number}: {answered} ADDs were answered");
    };
    let caller = &caller;
    thread::scope(|scope| (0..CALLERS).for_each(|number| drop(scope.spawn(move || caller(number)))));
}
