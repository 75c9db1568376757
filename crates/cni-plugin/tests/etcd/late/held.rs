//! Tests a late ADD: the ADD's commit reaches etcd only after the DEL of the same container. If the ADD has recorded
//! its pending commit, no address leaks. Without the recorded pending commit one address leaks, and the test must
//! detect the leak.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::lab::{Lab, notes_about};
use crate::lost_replies::beside;
use crate::process::Call;
use crate::proxy::{LinkCondition, Proxy};
use crate::server::send_signal;

/// The proxy's delay for each message of the late ADD to etcd. The proxy delays the ADD's commit for longer than a DEL
/// takes, so the commit usually reaches etcd after the DEL.
const ON_ITS_WAY: Duration = Duration::from_millis(1_500);

/// Maximum number of attempts that are discarded because the ADD's commit arrived before the DEL had ended.
const SLOW_DELS: usize = 10;

/// Runs [`left_of_an_add`] until an ADD's commit reaches etcd after the DEL, and returns the number of leaked
/// addresses.
fn left_of_a_late_add(before_del: impl Fn(&[PathBuf])) -> usize {
    let left = (0..SLOW_DELS).find_map(|_| left_of_an_add(&before_del));
    left.expect("no commit arrived after its DEL, because the DELs were too slow")
}

/// Returns how many addresses stay assigned after an ADD and its DEL, or `None` if the ADD's commit reached etcd too
/// early.
fn left_of_an_add(before_del: impl Fn(&[PathBuf])) -> Option<usize> {
    let lab = Lab::start();
    let runtime = beside();
    let _in = runtime.enter();
    let proxy = Proxy::to(lab.etcds[0].address()).unwrap();
    let address = proxy.address().to_string();
    let conf = lab.conf_at(&[format!("http://{address}")]);
    Call::new("ADD", "c0", &conf).ok();
    proxy.set(LinkCondition::Slow(ON_ITS_WAY));
    // Unlike a dead process, a stopped process keeps the host lock, so the late ADD gets a lock file of its own.
    let mut apart = conf.clone();
    apart["ipam_lock_file"] = lab.root.path().join("other.lock").display().to_string().into();
    let add = Call::new("ADD", "c1", &apart);
    let mut late = add.start(add.command());
    let begun = Instant::now();
    let noted = loop {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing was noted");
        match notes_about(&address) {
            none if none.is_empty() => sleep(Duration::from_millis(5)),
            noted => break noted,
        }
    };
    let sent = Instant::now();
    // The ADD sends its commit immediately after recording the pending commit. The ADD process is then stopped
    // (SIGSTOP), like a process that dies right after sending its commit.
    sleep(Duration::from_millis(100));
    send_signal(late.id(), Signal::SIGSTOP).unwrap();
    proxy.set(LinkCondition::Up);
    before_del(&noted);
    Call::new("DEL", "c1", &conf).ok();
    let is_late = sent.elapsed() < ON_ITS_WAY;
    sleep(ON_ITS_WAY.saturating_sub(sent.elapsed()) + Duration::from_millis(500));
    late.kill().unwrap();
    late.wait().unwrap();
    is_late.then(|| lab.books().count_of("net1.c1"))
}

#[test]
fn late_commit_leaves_nothing_after_del() {
    assert_eq!(left_of_a_late_add(|_| ()), 0);
}

#[test]
fn late_commit_is_found_when_it_was_not_noted() {
    let lose = |noted: &[PathBuf]| noted.iter().for_each(|note| fs::remove_file(note).unwrap());
    assert_eq!(left_of_a_late_add(lose), 1);
}
