//! Kills plugin processes while workloads must keep their sticky addresses, on any kind of store.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::process::{Call, Outcome};
use crate::random::Random;

const WORKLOADS: u64 = 6;
const SPAN: Duration = Duration::from_secs(3);
/// Maximum time in milliseconds between the start of a plugin call and its kill. A plugin call takes a few milliseconds
/// when run alone, and tens of milliseconds when run concurrently with other calls.
const KILL_WITHIN: u64 = 60;
/// Minimum number of successful ADDs for each workload. On a slow machine, the test runs longer, until each workload
/// has had enough ADDs.
const FEWEST: u32 = 5;

/// Returns a plugin call for a container that belongs to a workload.
pub fn call(verb: &str, container: &str, workload: &str, conf: &Value) -> Call {
    Call::new(verb, container, conf)
        .with("CNI_ARGS", &format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={workload}"))
}

/// Runs a plugin call to completion, or kills it at a random moment. Returns the assigned address if the call printed a
/// result.
fn perhaps_killed(call: &Call, random: &mut Random) -> Option<IpAddr> {
    let mut child = call.start(call.command());
    if random.once_in(2) {
        sleep(Duration::from_millis(random.below(KILL_WITHIN)));
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    // A call that is killed too late has already printed its complete result.
    let is_answered = output.status.success() && !output.stdout.is_empty();
    is_answered.then(|| Outcome::new(output, call).address())
}

/// Repeatedly adds and deletes containers of several workloads. Kills half of the ADDs and half of the containers'
/// first DELs. The DEL that follows a killed DEL is never killed: it stands for the retry of a container runtime. Each
/// workload must keep its address, and no two workloads may have the same address. Returns the addresses of the
/// workloads, which are all released and still kept for their workloads.
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
