//! Runs short scenarios in which one call of Calico's client and one call of Margay happen at the same time. Each
//! scenario runs with every order of the store requests of both calls, and with Calico's client halted at every point.

use std::net::IpAddr;
use std::sync::Arc;

use ipam_core::affinity::ReleaseIf;
use ipam_core::model::{Owner, ReleaseRequest};
use kv::Store;

use crate::calico::LONG_AGO;
use crate::documents::{Attribute, Block};
use crate::judge::Stored;
use crate::scene::{Found, add, allocator, blocks_of, calico, clean_up, del, everything, judge, prepare, soon};
use crate::turns::{Actor, Authors, Choice, Run, Side, explore, play};

const POOL: &str = "10.0.0.0/29";
const FIRST: &str = "10.0.0.0/30";

/// The content of the store before a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Empty,
    /// Host `a` owns the first block, in which container `c0` has an address.
    Used,
    /// Host `a` owns the first block, which is empty and was claimed long ago.
    Old,
}

/// A call that Calico's client makes. Calls run on host `a`, unless the name of the enum variant contains another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Theirs {
    AddC1,
    AddC2,
    AddC1OnB,
    DelC0,
    ReleaseIp,
    Claim,
    GiveBack,
    GiveBackEmpty,
}

/// A call that Margay makes. Calls run on host `a`, unless the name of the enum variant contains another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Own {
    AddC2,
    AddC2OnB,
    AddC0,
    DelC0,
    DelC1,
    DelC1ByHandle,
    ReleaseIp,
    ClaimOnB,
    GiveBack,
    GiveBackEmpty,
}

fn found(start: Start) -> Found {
    let size = blocks_of(POOL, 30).size;
    let mut block = Block::new(FIRST, "a", size, LONG_AGO, 1_000);
    match start {
        Start::Empty => return Found::default(),
        Start::Old => {}
        Start::Used => {
            let node = [("node".to_owned(), "a".to_owned())].into();
            let holder = Attribute { handle_id: Some("net.c0".into()), secondary: Some(node), released_at: None };
            block.assign(1, &holder);
            block.sequence_number += 1;
            return Found::default().block(&block).affinity("a", FIRST, "confirmed").handle("net.c0", &[(FIRST, 1)]);
        }
    }
    Found::default().block(&block).affinity("a", FIRST, "confirmed")
}

fn given(handle: &str, ip: IpAddr) -> String {
    format!("{handle} has {ip}")
}

fn theirs(what: Theirs) -> Actor {
    Actor::new(Side::Calicos, move |store: Arc<dyn Store>| async move {
        let pool = blocks_of(POOL, 30);
        let a = calico(Arc::clone(&store), "a", &pool);
        let first: IpAddr = "10.0.0.0".parse().unwrap();
        let assigned = match what {
            Theirs::AddC1 => ("net.c1", a.auto_assign("net.c1", 1).await),
            Theirs::AddC2 => ("net.c2", a.auto_assign("net.c2", 1).await),
            Theirs::AddC1OnB => ("net.c1", calico(store, "b", &pool).auto_assign("net.c1", 1).await),
            Theirs::DelC0 => return format!("{:?}", a.release_by_handle("net.c0").await),
            Theirs::ReleaseIp => return format!("{:?}", a.release_ip(first, FIRST).await),
            Theirs::Claim => return format!("{:?}", a.claim_affinity(FIRST).await),
            Theirs::GiveBack => return format!("{:?}", a.release_affinity(FIRST).await),
            Theirs::GiveBackEmpty => return format!("{:?}", a.release_empty(FIRST).await),
        };
        match assigned {
            (handle, Ok(ips)) => given(handle, ips[0]),
            (_, Err(refusal)) => format!("{refusal:?}"),
        }
    })
}

fn ours(what: Own) -> Actor {
    Actor::new(Side::Ours, move |store: Arc<dyn Store>| async move {
        let ipam = allocator(store);
        let first: ipnet::IpNet = FIRST.parse().unwrap();
        let given = |handle: &str, done: ipam_core::Result<IpAddr>| done.map(|ip| given(handle, ip));
        let done = match what {
            Own::AddC2 => given("net.c2", add(&ipam, "a", "c2").await),
            Own::AddC2OnB => given("net.c2", add(&ipam, "b", "c2").await),
            Own::AddC0 => given("net.c0", add(&ipam, "a", "c0").await),
            Own::DelC0 => del(&ipam, "a", "c0").await.map(|ips| format!("{ips:?}")),
            Own::DelC1 => del(&ipam, "a", "c1").await.map(|ips| format!("{ips:?}")),
            Own::DelC1ByHandle => match ipam.release_by_handle("net.c1", soon()).await {
                Err(ipam_core::Error::NotFound { .. }) => Ok(String::new()),
                done => done.map(|ips| format!("{ips:?}")),
            },
            Own::ReleaseIp => {
                let request = ReleaseRequest::new(first.network());
                ipam.release_ips(&[request], soon()).await.map(|done| format!("{done:?}"))
            }
            Own::ClaimOnB => {
                ipam.claim_affinity(&Owner::host("b"), first, soon()).await.map(|done| format!("{done:?}"))
            }
            Own::GiveBack => ipam
                .release_affinity(&Owner::host("a"), first, ReleaseIf::Any, soon())
                .await
                .map(|done| format!("{done:?}")),
            Own::GiveBackEmpty => ipam
                .release_affinity(&Owner::host("a"), first, ReleaseIf::Empty, soon())
                .await
                .map(|done| format!("{done:?}")),
        };
        done.unwrap_or_else(|error| format!("error: {error}"))
    })
}

/// Checks that each returned address is in use unless it was released, that no address is lost, and that all addresses
/// can be released.
async fn check(store: &Arc<dyn Store>, run: &Run, releases: &[&str]) -> Result<(), String> {
    let stored = Stored::read(&everything(store).await.1);
    for outcome in run.outcomes.iter().flatten() {
        if outcome.starts_with("error") {
            return Err(outcome.clone());
        }
        let Some((handle, ip)) = outcome.split_once(" has ") else { continue };
        let released = releases.contains(&handle) || releases.contains(&ip);
        if !released && stored.holders().get(&ip.parse().unwrap()).map(String::as_str) != Some(handle) {
            return Err(format!("{outcome}, and does not: {stored:?}"));
        }
    }
    if !stored.lost().is_empty() {
        return Err(format!("lost: {:?} of {stored:?}", stored.lost()));
    }
    clean_up(store).await
}

/// Runs one scenario with every order of its store requests. Returns the number of different orders of store calls that
/// were run.
async fn tell(start: Start, calicos: Theirs, own: Own) -> usize {
    let mut releases = Vec::new();
    match calicos {
        Theirs::DelC0 => releases.push("net.c0"),
        Theirs::ReleaseIp => releases.push("10.0.0.0"),
        _ => {}
    }
    match own {
        Own::DelC0 => releases.push("net.c0"),
        Own::DelC1 | Own::DelC1ByHandle => releases.push("net.c1"),
        Own::ReleaseIp => releases.push("10.0.0.0"),
        _ => {}
    }
    explore(async |prefix: Vec<usize>| {
        let store: Arc<dyn Store> = Arc::new(kv_mvcc::memory());
        prepare(&store, POOL, 30).await;
        found(start).store(&store).await;
        let begin = everything(&store).await;
        let authors = Authors::default();
        let run = play(&store, &authors, vec![theirs(calicos), ours(own)], &prefix).await;
        if !run.is_new {
            return run;
        }
        let judged = judge(&store, &begin, &authors).await.map(drop);
        let checked = match judged {
            Ok(()) => check(&store, &run, &releases).await,
            wrong => wrong,
        };
        if let Err(what) = checked {
            let order = run.order.iter().map(|choice| match choice {
                Choice::Next(0) => "Calico",
                Choice::Next(_) => "ours",
                Choice::Die => "Calico dies",
            });
            let order: Vec<&str> = order.collect();
            panic!("{start:?}, {calicos:?} beside {own:?}: {what}\n{:?}\n{}", run.outcomes, order.join(", "));
        }
        run
    })
    .await
}

/// Runs all pairs of a Calico call and a Margay call from the state `start`, and prints in how many orders the store
/// calls of each pair were run.
async fn all(start: Start, calicos: &[Theirs], own: &[Own]) {
    let mut runs = 0;
    for calicos in calicos {
        for own in own {
            let count = tell(start, *calicos, *own).await;
            println!("{start:?}, {calicos:?} beside {own:?}: {count} orders");
            runs += count;
        }
    }
    assert!(runs > 0);
    println!("{start:?}: {runs} orders");
}

#[tokio::test]
async fn steps_in_every_order_without_blocks() {
    use Own::{AddC2OnB, ClaimOnB, DelC1, DelC1ByHandle, GiveBack};
    all(Start::Empty, &[Theirs::AddC1], &[AddC2OnB, DelC1, DelC1ByHandle, ClaimOnB]).await;
    all(Start::Empty, &[Theirs::AddC1OnB], &[ClaimOnB, DelC1]).await;
    all(Start::Empty, &[Theirs::Claim], &[AddC2OnB, ClaimOnB, GiveBack]).await;
}

#[tokio::test]
async fn steps_in_every_order_with_block_in_use() {
    use Own::{AddC0, AddC2, DelC0, DelC1, GiveBack, GiveBackEmpty, ReleaseIp};
    let own = [AddC0, AddC2, DelC0, DelC1, ReleaseIp, GiveBack, GiveBackEmpty];
    all(Start::Used, &[Theirs::DelC0, Theirs::ReleaseIp, Theirs::GiveBack, Theirs::GiveBackEmpty], &own).await;
    all(Start::Used, &[Theirs::AddC1], &[AddC2, DelC0, DelC1, ReleaseIp]).await;
    // Calico's ADD of container `c2` runs concurrently with Margay's ADD of `c2`, and with Margay's DEL of container
    // `c0`.
    all(Start::Used, &[Theirs::AddC2], &[AddC2, DelC0]).await;
}

#[tokio::test]
async fn steps_in_every_order_with_block_to_take_over() {
    use Own::{AddC2, AddC2OnB, ClaimOnB, GiveBack};
    all(Start::Old, &[Theirs::AddC1], &[AddC2OnB, ClaimOnB, GiveBack]).await;
    all(Start::Old, &[Theirs::GiveBack], &[AddC2, AddC2OnB]).await;
    all(Start::Old, &[Theirs::AddC1OnB], &[AddC2, ClaimOnB]).await;
}
