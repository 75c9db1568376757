//! Tests that a DEL settles the pending commits of interrupted ADDs even if its configuration lists different etcd
//! endpoints than the ADD's.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::lab::{Lab, notes_about};
use crate::lost_replies::beside;
use crate::process::{Call, Outcome};
use crate::proxy::{LinkCondition, Proxy};
use crate::victim::Victim;
use conformance::patient;

// All test files share one network, node and folder of pending commits, so each test file must use container names of
// its own.
const BEFORE: &str = "notes-before";
const AGAIN: &str = "an earlier assignment was interrupted; sending its commit again";
const SOON: Duration = Duration::from_secs(20);

/// Kills an ADD that has recorded its pending commit, makes the ADD's etcd proxy unreachable, and returns the proxy's
/// address as a store URL.
fn broken_off(lab: &Lab, container: &str) -> String {
    let proxy = Proxy::to(lab.etcds[0].address()).unwrap();
    let store = format!("etcd://{}", proxy.address());
    let conf = lab.conf_at(&[format!("http://{}", proxy.address())]);
    Call::new("ADD", BEFORE, &conf).ok();
    proxy.set(LinkCondition::Slow(Duration::from_millis(300)));
    let victim = Victim::start(Call::new("ADD", container, &conf), Path::new("/no-such-store"));
    let begun = Instant::now();
    while notes_about(&store).is_empty() {
        assert!(begun.elapsed() < patient(SOON), "nothing was noted");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(victim.kill().is_none(), "it was over");
    proxy.set(LinkCondition::Refusing);
    proxy.cut();
    store
}

fn passes_over(outcome: &Outcome) -> bool {
    outcome.stderr.contains("skipping the record of an unanswered commit: the commit was sent to another store")
}

#[test]
fn notes_of_add_are_settled_by_del_with_other_endpoints() {
    let runtime = beside();
    let _in = runtime.enter();
    let lab = Lab::start();
    // No server listens at the first etcd endpoint of this configuration.
    let endpoints = ["http://127.0.0.1:1".to_owned(), lab.etcds[0].url()];
    let store = broken_off(&lab, "notes-1");
    // A pending commit is sent only to the cluster for which the ADD recorded it, even if a DEL first runs against
    // another cluster.
    let other = Lab::start();
    let outcome = Call::new("DEL", "notes-1", &other.conf()).ok();
    assert!(passes_over(&outcome) && !outcome.stderr.contains(AGAIN), "{outcome:?}");
    assert_eq!(notes_about(&store).len(), 1);
    let outcome = Call::new("DEL", "notes-1", &lab.conf_at(&endpoints)).ok();
    assert!(outcome.stderr.contains(AGAIN) && !passes_over(&outcome), "{outcome:?}");
    assert_eq!(notes_about(&store).len(), 0);
    Call::new("DEL", BEFORE, &lab.conf_at(&endpoints)).ok();
    lab.nothing_is_left();
}

#[test]
fn notes_let_del_repeat_while_no_endpoint_answers() {
    let runtime = beside();
    let _in = runtime.enter();
    let lab = Lab::start();
    let store = broken_off(&lab, "notes-2");
    let mut unreachable = lab.conf_at(&["http://127.0.0.1:1".to_owned()]);
    unreachable["datastore_timeout"] = 1.into();
    let refusal = Call::new("DEL", "notes-2", &unreachable).run().refusal();
    assert_eq!(refusal.says(&["http://127.0.0.1:1"]).code, 11, "{refusal:?}");
    assert_eq!(notes_about(&store).len(), 1);
    for container in ["notes-2", BEFORE] {
        lab.del(container).ok();
    }
    assert_eq!(notes_about(&store).len(), 0);
    lab.nothing_is_left();
}
