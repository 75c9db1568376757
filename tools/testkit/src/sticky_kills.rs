//! Workloads that keep their addresses while their plugins are killed; the same on every store.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::process::{Call, Outcome};
use crate::random::Random;

const WORKLOADS: u64 = 6;
const SPAN: Duration = Duration::from_secs(3);
/// A call takes some milliseconds alone and tens of them in a crowd.
const KILL_WITHIN: u64 = 60;
/// A slow machine goes on until each workload has had so many answers.
const FEWEST: u32 = 5;

/// A call of a container of a workload.
pub fn call(verb: &str, container: &str, workload: &str, conf: &Value) -> Call {
    Call::new(verb, container, conf)
        .with("CNI_ARGS", &format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={workload}"))
}

/// Runs a call to its end, or kills it at any moment. The answer, if there was one.
fn perhaps_killed(call: &Call, random: &mut Random) -> Option<IpAddr> {
    let mut child = call.start(call.command());
    if random.once_in(2) {
        sleep(Duration::from_millis(random.below(KILL_WITHIN)));
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    // A kill that comes too late leaves the whole answer.
    let is_answered = output.status.success() && !output.stdout.is_empty();
    is_answered.then(|| Outcome::new(output, call).address())
}

/// A workload is made and removed again and again, by plugins that are killed half of the time; a runtime sends a DEL
/// after each ADD that it has no answer of, and repeats a DEL. Each workload must get one address for ever, and no two the
/// same. Returns the addresses; each waits for its workload then.
pub fn workloads_keep_their_addresses(conf: &Value) -> BTreeSet<IpAddr> {
    let workload = |number: u64| {
        let mut random = Random::new(7, number);
        let name = format!("web-{number}");
        let (mut own, mut kept) = (None, 0);
        let begun = Instant::now();
        for round in 0.. {
            if begun.elapsed() > SPAN && kept >= FEWEST || begun.elapsed() > 20 * SPAN {
                break;
            }
            let container = format!("c{number}-{round}");
            if let Some(ip) = perhaps_killed(&call("ADD", &container, &name, conf), &mut random) {
                assert_eq!(*own.get_or_insert(ip), ip, "{name}, {container}");
                kept += 1;
            }
            perhaps_killed(&call("DEL", &container, &name, conf), &mut random);
            call("DEL", &container, &name, conf).ok();
        }
        assert!(kept >= FEWEST, "{name}: {kept} ADDs were answered");
        own.unwrap()
    };
    let all: Vec<IpAddr> = thread::scope(|scope| {
        let running: Vec<_> = (0..WORKLOADS).map(|number| scope.spawn(move || workload(number))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let addresses: BTreeSet<IpAddr> = all.iter().copied().collect();
    assert_eq!(addresses.len(), all.len(), "{all:?}");
    addresses
}
