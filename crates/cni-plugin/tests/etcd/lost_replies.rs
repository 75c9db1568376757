//! Tests with etcd replies that are lost between etcd and the plugin.

use std::time::Duration;

use kv::{Range, StoreExt};

use crate::lab::{Lab, runtime};
use crate::process::Call;
use crate::proxy::{LinkCondition, Proxy};

/// The message that the plugin logs after a commit without an answer.
const SETTLING: &str = "checking whether a write with unknown outcome was committed";

/// Returns a tokio runtime for the proxy, so that the proxy runs in parallel with the plugin calls.
pub(crate) fn beside() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn lost_reply_costs_nothing_when_connection_breaks_anywhere() {
    let lab = Lab::start();
    let runtime = beside();
    let _in = runtime.enter();
    let proxy = Proxy::to(lab.etcds[0].address()).unwrap();
    let conf = lab.conf_at(&[format!("http://{}", proxy.address())]);
    let (mut settled, mut round) = (0, 0);
    for bytes in (10..2_600).step_by(35) {
        let container = format!("c{round}");
        round += 1;
        for verb in ["ADD", "DEL"] {
            proxy.cut_after(bytes);
            let outcome = Call::new(verb, &container, &conf).run();
            settled += usize::from(outcome.stderr.contains(SETTLING));
            // If the reply to one of a plugin call's reads is lost, the call reports the failed read and leaves the
            // store unchanged.
            if outcome.exit != 0 {
                assert!(outcome.refusal().text.contains("the connection broke"), "{bytes}: {outcome:?}");
            }
            proxy.heal();
            let expected = usize::from(verb == "ADD");
            Call::new(verb, &container, &conf).ok();
            assert_eq!(lab.books().count_of(&format!("net1.{container}")), expected, "{bytes}");
        }
    }
    assert!(settled > 0, "no cut has met a commit");
    lab.nothing_is_left();
    lab.no_notes_are_left();
}

#[test]
fn lost_reply_is_told_and_found_again() {
    let lab = Lab::start();
    let runtime = beside();
    let _in = runtime.enter();
    let proxy = Proxy::to(lab.etcds[0].address()).unwrap();
    let conf = lab.conf_at(&[format!("http://{}", proxy.address())]);
    // The first ADD claims the node's block, so that the second ADD's commit is the only new revision of etcd.
    Call::new("ADD", "c0", &conf).ok();
    let before = revision(&lab);
    // The proxy's delay leaves enough time to read the store between the commit and etcd's answer.
    proxy.set(LinkCondition::Slow(Duration::from_millis(400)));
    let add = Call::new("ADD", "c1", &conf);
    let child = add.start(add.command());
    while revision(&lab) == before {
        std::thread::sleep(Duration::from_millis(5));
    }
    proxy.set(LinkCondition::Refusing);
    proxy.cut();
    let refusal = add.wait(child).refusal();
    refusal.says(&["(it may have been carried out all the same)", &proxy.address().to_string()]);
    assert_eq!(refusal.code, 999);
    proxy.heal();
    let books = lab.books();
    assert_eq!(books.count_of("net1.c1"), 1, "it has happened");
    let outcome = add.ok();
    assert_eq!(
        books.held.get(&outcome.address()).map(String::as_str),
        Some("net1.c1"),
        "a repeated ADD gets the same address"
    );
    for container in ["c0", "c1"] {
        lab.del(container).ok();
    }
    lab.nothing_is_left();
    // The ADD recorded its pending commit under the proxy's address, so the DEL must also go through the proxy.
    Call::new("DEL", "c1", &conf).ok();
}

fn revision(lab: &Lab) -> i64 {
    runtime().block_on(async {
        let open = datastore::open(&lab.location(), &datastore::Create::Never.with_wait(Duration::from_secs(10)))
            .await
            .unwrap();
        let found = open.store().list(Range::Prefix("/calico/".into())).await.unwrap();
        found.kvs.iter().map(|kv| kv.mod_revision.get()).max().unwrap()
    })
}
