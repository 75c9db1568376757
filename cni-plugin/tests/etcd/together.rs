//! Many ADDs at once on one node: who gets the host's lock commits for those who wait for it, and whoever dies on the way leaves
//! nothing behind.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cni_plugin::{FileIntents, INTENTS_FOLDER};
use ipam_core::attachment::Attachment;
use kv::RangeRequest;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::lab::Lab;
use crate::lost_replies::beside;
use crate::process::{Call, Outcome};
use crate::proxy::{Link, Proxy};
use crate::round_trips::asked;
use crate::victim::Victim;

const QUEUE: &str = "/run/margay/queue";
const TOGETHER: &str = "assigned together";
const AGAIN: &str = "an earlier assignment broke off; sending it again";
/// Far longer than anything here takes but for a call that has waited for the lock in vain.
const SOON: Duration = Duration::from_secs(10);

/// The requests that wait for somebody to carry them out on a store at this address.
fn waiting(address: &str) -> Vec<PathBuf> {
    let Ok(folder) = std::fs::read_dir(QUEUE) else { return Vec::new() };
    let is_about = |text: Vec<u8>| text.windows(address.len()).any(|part| part == address.as_bytes());
    folder.map(|entry| entry.unwrap().path()).filter(|path| std::fs::read(path).is_ok_and(is_about)).collect()
}

#[track_caller]
fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < SOON, "{what}: it never was so");
        thread::sleep(Duration::from_millis(2));
    }
}

fn revision(lab: &Lab) -> i64 {
    lab.with_ipam(datastore::Create::Never, async |ipam, _| {
        let any = RangeRequest::new(kv::Range::All).with_limit(1);
        ipam.store().range(any).await.unwrap().revision.get()
    })
}

/// Those who wait, one behind the other, while somebody has the lock of the host.
struct Crowd<'a> {
    lab: &'a Lab,
    lock: File,
    victims: Vec<Victim>,
}

impl<'a> Crowd<'a> {
    /// ADDs of these containers, by a configuration that names this endpoint.
    fn gather(lab: &'a Lab, conf: &Value, containers: &[String]) -> Self {
        let lock = File::create(lab.lock_file()).unwrap();
        lock.lock().unwrap();
        let address = conf["etcd_endpoints"].as_str().unwrap();
        let mut victims = Vec::new();
        for container in containers {
            victims.push(Victim::start(Call::new("ADD", container, conf), Path::new("/no-such-store")));
            until("they wait", || waiting(address).len() == victims.len());
            // It has written its request, and now it has to come to the lock.
            thread::sleep(Duration::from_millis(10));
        }
        Self { lab, lock, victims }
    }

    /// Nobody has the lock any more.
    fn let_go(&self) {
        self.lock.unlock().unwrap();
    }

    /// That each who is still there has an address that nobody else has, and how many of them said this.
    fn end(self, text: &str) -> usize {
        let outcomes: Vec<_> = self.victims.into_iter().map(Victim::end).collect();
        let addresses: BTreeSet<_> = outcomes.iter().map(Outcome::address).collect();
        assert_eq!(addresses.len(), outcomes.len(), "{outcomes:?}");
        let books = self.lab.books();
        assert!(addresses.iter().all(|address| books.held.contains_key(address)), "{outcomes:?}, {books:?}");
        outcomes.iter().filter(|outcome| outcome.stderr.contains(text)).count()
    }
}

/// Names that no other test has, here or in another run: all of them have the same folder for notes, and who finds the note of
/// another cluster asks a question more.
fn names(count: usize) -> Vec<String> {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let (process, call) = (std::process::id(), CALLS.fetch_add(1, Ordering::Relaxed));
    (0..count).map(|number| format!("c{number}-{call}-{process}")).collect()
}

/// The DELs of these, all at once, after which nothing is left; what the dead have left in the queue goes with the next ADD.
fn give_back(lab: &Lab, conf: &Value, containers: &[String]) {
    thread::scope(|scope| {
        for container in containers {
            scope.spawn(|| Call::new("DEL", container, conf).ok());
        }
    });
    let next = Call::new("ADD", "next", conf);
    next.ok();
    next.with("CNI_COMMAND", "DEL").ok();
    lab.nothing_is_left();
    lab.no_notes_are_left();
    let left = waiting(conf["etcd_endpoints"].as_str().unwrap());
    assert!(left.is_empty(), "{left:?} are left");
}

/// The configuration of one who waits for nobody's lock.
fn apart(lab: &Lab, conf: &Value) -> Value {
    let mut apart = conf.clone();
    apart["ipam_lock_file"] = lab.folder.path().join("apart.lock").to_str().unwrap().into();
    apart
}

#[track_caller]
fn each_has_one(lab: &Lab, containers: &[String]) {
    let books = lab.books();
    for container in containers {
        assert_eq!(books.count_of(&format!("net1.{container}")), 1, "{container}: {books:?}");
    }
    assert_eq!(books.held.len(), containers.len(), "{books:?}");
}

#[test]
fn those_who_wait_are_one_commit_and_do_not_ask_themselves() {
    let lab = Lab::start();
    lab.pool("six", "fd00:77::/112");
    let mut dual = lab.conf();
    dual["ipam"]["assign_ipv6"] = "true".into();
    let mut bridged = lab.conf();
    bridged["type"] = "bridge".into();
    bridged["ipam"] = serde_json::json!({"type": "margay-ipam", "ipv4_pools": ["lab"]});
    for conf in [lab.conf(), dual, bridged] {
        Call::new("ADD", "before", &conf).ok();
        Call::new("DEL", "before", &conf).ok();
        let containers = names(16);
        let crowd = Crowd::gather(&lab, &conf, &containers);
        let (before, asked_before) = (revision(&lab), asked(&lab));
        crowd.let_go();
        let outcomes: Vec<_> = crowd.victims.into_iter().map(Victim::end).collect();
        let asked_after = asked(&lab);
        assert_eq!(revision(&lab), before + 1, "{outcomes:?}");
        let both = usize::from(conf["ipam"]["assign_ipv6"] == "true") + 1;
        let addresses: BTreeSet<_> = outcomes.iter().flat_map(Outcome::addresses).collect();
        assert_eq!(addresses.len(), 16 * both, "{outcomes:?}");
        let books = lab.books();
        for (container, outcome) in containers.iter().zip(&outcomes) {
            for address in outcome.addresses() {
                assert_eq!(books.held.get(&address), Some(&format!("net1.{container}")), "{outcome:?}");
            }
        }
        assert_eq!(outcomes.iter().filter(|outcome| outcome.stderr.contains(TOGETHER)).count(), 1);
        // One read and one commit, and what the test itself has read in between.
        assert_eq!(asked_after.txns - asked_before.txns, 2, "{outcomes:?}");
        give_back(&lab, &conf, &containers);
    }
}

#[test]
fn those_who_come_when_they_like_get_theirs() {
    let lab = Lab::start();
    let conf = lab.conf();
    let before = revision(&lab);
    let containers = names(96);
    thread::scope(|scope| {
        for callers in containers.chunks(6) {
            let conf = &conf;
            scope.spawn(move || callers.iter().for_each(|container| drop(Call::new("ADD", container, conf).ok())));
        }
    });
    each_has_one(&lab, &containers);
    println!("{} ADDs were {} commits", containers.len(), revision(&lab) - before);
    // Some of them go while others come.
    thread::scope(|scope| {
        for callers in containers.chunks(6) {
            let conf = &conf;
            scope.spawn(move || {
                for container in callers {
                    Call::new("DEL", container, conf).ok();
                    Call::new("ADD", container, conf).ok();
                }
            });
        }
    });
    each_has_one(&lab, &containers);
    give_back(&lab, &conf, &containers);
}

#[test]
fn who_is_killed_while_it_waits_gets_nothing() {
    let lab = Lab::start();
    let conf = lab.conf();
    for gives_back in [true, false] {
        let mut containers = names(5);
        let mut crowd = Crowd::gather(&lab, &conf, &containers);
        // The first one would have got the lock.
        for _ in 0..2 {
            assert!(crowd.victims.remove(0).kill().is_none());
            let killed = containers.remove(0);
            if gives_back {
                Call::new("DEL", &killed, &apart(&lab, &conf)).ok();
            }
        }
        let before = revision(&lab);
        crowd.let_go();
        assert_eq!(crowd.end(TOGETHER), 1);
        assert_eq!(revision(&lab), before + 1);
        each_has_one(&lab, &containers);
        give_back(&lab, &conf, &containers);
    }
}

#[test]
fn who_has_waited_too_long_goes_on_alone_and_asks_nobody_any_more() {
    let lab = Lab::start();
    let conf = lab.conf();
    let containers = names(3);
    let crowd = Crowd::gather(&lab, &conf, &containers);
    let address = conf["etcd_endpoints"].as_str().unwrap().to_owned();
    until("they give up", || waiting(&address).is_empty());
    assert_eq!(crowd.end("going on without it"), 3);
    each_has_one(&lab, &containers);
    give_back(&lab, &conf, &containers);
}

#[test]
fn if_not_all_can_be_served_each_is_served_as_if_alone() {
    let lab = Lab::start();
    lab.pool("small", "10.78.0.0/30");
    let mut conf = lab.conf();
    conf["ipam"]["ipv4_pools"] = serde_json::json!(["small"]);
    let containers = names(6);
    let crowd = Crowd::gather(&lab, &conf, &containers);
    crowd.let_go();
    let outcomes: Vec<_> = crowd.victims.into_iter().map(Victim::outcome).collect();
    assert_eq!(outcomes.iter().filter(|outcome| outcome.exit == 0).count(), 4, "{outcomes:?}");
    for outcome in outcomes.iter().filter(|outcome| outcome.exit != 0) {
        outcome.refusal().says(&["10.78.0.0/30"]);
    }
    // One attempt for all of them, and then no other.
    let failed = outcomes.iter().filter(|outcome| outcome.stderr.contains("not assigned together")).count();
    assert_eq!(failed, 1, "{outcomes:?}");
    assert_eq!(lab.books().held.len(), 4);
    give_back(&lab, &conf, &containers);
}

/// What is noted for a container on the store of this address, and was sent.
fn is_noted(address: &str, container: &str) -> bool {
    let text = str::to_owned;
    let (network, container) = (text("net1"), text(container));
    let attachment = Attachment { network, container, interface: text("eth0"), node: text("node-1"), boot: None };
    let store = address.replace("http://", "etcd://");
    !FileIntents::new(INTENTS_FOLDER, store).noted(&attachment).unwrap().is_empty()
}

/// How a commit for four is on its way: a link that is slow, or an etcd that stands still.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Slow,
    Frozen,
}

/// Four wait; the first one of them has noted its commit for all and is sending it; then one of them is killed, and its DEL
/// comes, which waits for nobody's lock.
fn on_the_way(way: Way, killed: usize, when: When) {
    let lab = Lab::start();
    let runtime = beside();
    let _in = runtime.enter();
    let proxy = Proxy::to(lab.etcds[0].address()).unwrap();
    let address = format!("http://{}", proxy.address());
    let mut conf = lab.conf_at(std::slice::from_ref(&address));
    conf["datastore_timeout"] = 5.into();
    Call::new("ADD", "before", &conf).ok();
    let mut containers = names(4);
    let mut crowd = Crowd::gather(&lab, &conf, &containers);
    proxy.set(Link::Slow(Duration::from_millis(300)));
    crowd.let_go();
    let last = containers[3].clone();
    until("it is noted for all", || is_noted(&address, &last));
    if way == Way::Frozen {
        lab.etcds[0].signal(Signal::SIGSTOP).unwrap();
    }
    assert!(crowd.victims.remove(killed).kill().is_none(), "it was over");
    let gone = containers.remove(killed);
    let del = Call::new("DEL", &gone, &apart(&lab, &conf));
    if way == Way::Frozen {
        let child = del.start(del.command());
        thread::sleep(Duration::from_millis(200));
        lab.etcds[0].signal(Signal::SIGCONT).unwrap();
        proxy.heal();
        let outcome = del.wait(child);
        assert_eq!(outcome.exit, 0, "{outcome:?}");
    } else if when == When::AtOnce {
        let outcome = del.ok();
        println!("{way:?}: it was sent again: {}", outcome.stderr.contains(AGAIN));
    }
    proxy.heal();
    crowd.end(TOGETHER);
    if when == When::Later {
        del.ok();
    }
    containers.push("before".to_owned());
    each_has_one(&lab, &containers);
    give_back(&lab, &conf, &containers);
    assert!(!notes_are_left(&address), "a note is left");
}

fn notes_are_left(address: &str) -> bool {
    !crate::lab::notes_about(&address.replace("http://", "etcd://")).is_empty()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    AtOnce,
    Later,
}

#[test]
fn who_is_killed_when_its_commit_is_on_the_way_leaves_nothing() {
    on_the_way(Way::Slow, 2, When::AtOnce);
    on_the_way(Way::Slow, 2, When::Later);
    on_the_way(Way::Frozen, 2, When::AtOnce);
}

#[test]
fn if_who_commits_is_killed_the_others_get_one_address_each() {
    on_the_way(Way::Slow, 0, When::AtOnce);
    on_the_way(Way::Slow, 0, When::Later);
    on_the_way(Way::Frozen, 0, When::AtOnce);
}
