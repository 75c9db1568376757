//! Tests that `margay gc` for departed nodes can be killed in the middle of a run and run again.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use datastore::Location;
use kv::{Op, Txn};
use serde_json::json;

use crate::common::Lab;
use crate::gone::{held, in_order, on, pool, run};

const BLOCKS: usize = 200;
const ADDRESSES: usize = 16;
/// Minimum number of kills that must hit the middle of a run of `gc`, and maximum number of kills in the test.
const IN_THE_MIDDLE: u32 = 3;
const MOST_KILLS: u32 = 60;

/// Writes full blocks of a node with their affinities and handles, one handle for each block.
fn fill(location: &Location, node: &str) {
    let rows = (0..BLOCKS).flat_map(|number| {
        let (cidr, key) = (network(number, '/'), network(number, '-'));
        let handle = format!("net.c{number}");
        let held = json!({"handle_id": handle, "secondary": {"node": node, "timestamp": "2026-01-01 00:00:00 +0000 UTC"}});
        let block = json!({"cidr": cidr, "affinity": format!("host:{node}"), "allocations": vec![0; ADDRESSES],
            "unallocated": [], "attributes": [held], "sequenceNumber": 5, "sequenceNumberForAllocation": {}, "deleted": false});
        [
            (format!("/calico/ipam/v2/assignment/ipv4/block/{key}"), block.to_string()),
            (format!("/calico/ipam/v2/host/{node}/ipv4/block/{key}"), r#"{"state":"confirmed","deleted":false}"#.to_owned()),
            (format!("/calico/ipam/v2/handle/{handle}"), json!({"block": {cidr: ADDRESSES}, "deleted": false}).to_string()),
        ]
    });
    let rows: Vec<_> = rows.collect();
    on(location, async |ipam| {
        for some in rows.chunks(100) {
            let puts = some.iter().map(|(key, value)| Op::put(key.as_str(), value.as_str()));
            ipam.store().txn(Txn::new().with_success(puts)).await.unwrap();
        }
    });
}

fn network(number: usize, sign: char) -> String {
    let first = number * ADDRESSES;
    format!("198.19.{}.{}{sign}28", first / 256, first % 256)
}

/// Runs `margay`, kills it after `time`, and returns whether it had ended before the kill.
fn run_for(location: &Location, args: &str, time: Option<Duration>) -> bool {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &location.to_string()]).args(args.split(' ')).env_clear();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap();
    if let Some(time) = time {
        thread::sleep(time);
        child.kill().unwrap();
    }
    child.wait().unwrap().success()
}

/// The time after which the next run of `margay gc` is killed. A kill that comes too early or too late does not hit the
/// middle of a run, so the time is adapted to the machine.
struct Patience {
    time: Duration,
    kills: u32,
    in_the_middle: u32,
}

impl Patience {
    /// The first kill comes after half of the time that a whole run of `margay gc` takes.
    fn new(whole: Duration) -> Self {
        Self { time: whole / 2, kills: 0, in_the_middle: 0 }
    }

    fn is_over(&self) -> bool {
        assert!(self.kills < MOST_KILLS, "{} of {MOST_KILLS} kills came in the middle of a run", self.in_the_middle);
        self.in_the_middle >= IN_THE_MIDDLE
    }

    /// Adapts the time until the next kill, from the number of addresses (`left`) that the killed run has not freed.
    fn learn(&mut self, left: usize) {
        self.kills += 1;
        let factor = match left {
            0 => 0.7,
            all if all == BLOCKS * ADDRESSES => 1.3,
            _ => {
                self.in_the_middle += 1;
                [0.9, 1.15][(self.kills % 2) as usize]
            }
        };
        self.time = self.time.mul_f64(factor);
    }
}

#[test]
fn move_node_is_carried_on_when_killed() {
    for lab in Lab::each() {
        let at = &lab.location;
        pool(&lab, "198.19.0.0/19 --block-size 28");
        fill(at, "one");
        let mut names = ("one", "two");
        let command = |(from, to): (&str, &str)| format!("gc --node {from} --move-to {to} --apply");
        let began = Instant::now();
        assert!(run_for(at, &command(names), None));
        let mut patience = Patience::new(began.elapsed());
        names = ("two", "one");
        while !patience.is_over() {
            run_for(at, &command(names), Some(patience.time));
            let (left, moved) = (held(at, names.0).len(), held(at, names.1).len());
            assert_eq!(left + moved, BLOCKS * ADDRESSES, "every address is one's or the other's");
            patience.learn(left);
            in_order(at);
            run(at, &command(names)).answer();
            assert_eq!((held(at, names.0).len(), held(at, names.1).len()), (0, BLOCKS * ADDRESSES));
            names = (names.1, names.0);
        }
        in_order(at);
    }
}

#[test]
fn free_node_is_carried_on_when_killed() {
    for lab in Lab::each() {
        let at = &lab.location;
        pool(&lab, "198.19.0.0/19 --block-size 28");
        let command = "gc --node dead --free --apply";
        fill(at, "dead");
        let began = Instant::now();
        assert!(run_for(at, command, None));
        let mut patience = Patience::new(began.elapsed());
        assert_eq!(held(at, "dead").len(), 0);
        while !patience.is_over() {
            fill(at, "dead");
            run_for(at, command, Some(patience.time));
            patience.learn(held(at, "dead").len());
            in_order(at);
            run(at, command).answer();
            let counts = run(at, "ipam check -o json").json()["counts"].clone();
            let left = ["held", "blocks", "handles", "affinities"].map(|name| counts[name].as_u64());
            assert_eq!(left, [Some(0); 4], "{counts}");
        }
    }
}
