//! Tests the kinds of addresses of an etcd server, and the number of requests that a store call sends.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::{Duration, Instant};

use backend_etcd::{EtcdStore, Options};
use conformance::patient;
use futures::StreamExt;
use kv::{Compare, ErrorKind, Op, Outcome, Range, RangeRequest, Store, StoreExt, Txn, WatchRequest};
use support::Etcd;

#[tokio::test]
async fn endpoint_may_be_unix_socket() {
    // After `unix://`, etcd 3.4 accepts only `host:port`, and creates a socket file named `host:port` in its working
    // directory.
    let name = format!("localhost:{}", support::dead_address().unwrap().port());
    let etcd = Etcd::start_with("http", &[format!("--listen-client-urls=unix://{name}")]).unwrap();
    let socket = etcd.folder().join(&name);
    for endpoint in [format!("unix://{}", socket.display()), format!("unix:{}", socket.display())] {
        let store = EtcdStore::open(&Options::new([endpoint])).unwrap();
        store.check().await.unwrap();
        let revision = store.put("k", "v").await.unwrap();
        let mut watch = store.watch(WatchRequest::new(Range::All, revision)).await.unwrap();
        assert_eq!(watch.next().await.unwrap().unwrap().revision, revision);
    }
    let unreachable = EtcdStore::open(&Options::new([format!("unix://{}/none", etcd.folder().display())])).unwrap();
    let error = unreachable.put("k", "v").await.unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::NotSent, "{error}");
    assert!(error.to_string().contains("check the address"), "{error}");
}

#[tokio::test]
async fn error_names_every_endpoint_asked() {
    let dead: Vec<String> = (0..3).map(|_| format!("http://{}", support::dead_address().unwrap())).collect();
    let store = EtcdStore::open(&Options::new(dead.clone())).unwrap();
    let error = store.put("k", "v").await.unwrap_err();
    let said = error.to_string();
    assert_eq!(error.kind(), &ErrorKind::NotSent, "{said}");
    assert!(dead.iter().all(|url| said.contains(url.as_str())) && said.contains("check the address"), "{said}");
}

#[tokio::test]
async fn endpoint_error_names_default_port_when_none_is_given() {
    for (endpoint, port) in [("http://127.0.0.1", "80"), ("127.0.0.1", "80"), ("http://[::1]", "80")] {
        let store = EtcdStore::open(&Options::new([endpoint]).with_call_timeout(Duration::from_secs(3))).unwrap();
        let said = store.put("k", "v").await.unwrap_err().to_string();
        assert!(said.contains(&format!("names no port, so it is {port}; etcd's usual one is 2379")), "{said}");
    }
    let etcd = Etcd::start().unwrap();
    let store = EtcdStore::open(&Options::new([etcd.url().replace("http", "HTTP")])).unwrap();
    store.put("k", "v").await.unwrap();
}

#[tokio::test]
async fn learner_is_named_and_another_member_asked() {
    let etcd = Etcd::start().unwrap();
    let learner = Etcd::start_learner(&etcd).await.unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let store = EtcdStore::open(&Options::new([learner.url()])).unwrap();
    // Wait until the learner (a member without a vote) listens.
    let error = loop {
        let error = store.put("k", "v").await.unwrap_err();
        if error.to_string().contains("learner") {
            break error;
        }
        assert!(Instant::now() < until, "{error}");
    };
    assert_eq!((error.kind(), error.outcome()), (&ErrorKind::NotSent, Outcome::NotApplied), "{error}");
    assert!(error.to_string().contains("it is a learner, which serves no clients yet"), "{error}");
    let said = store.get("k").await.unwrap_err().to_string();
    assert!(said.contains("it is a learner"), "{said}");
    let both = EtcdStore::open(&Options::new([learner.url(), etcd.url()])).unwrap();
    both.put("k", "v").await.unwrap();
    assert_eq!(both.get("k").await.unwrap().unwrap().value.as_bytes(), b"v");
}

#[tokio::test]
async fn calls_end_at_their_deadline() {
    // The test server accepts connections but never answers a request.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let end = Instant::now() + Duration::from_secs(3);
    let store = EtcdStore::open(&Options::new([url]).with_end(end)).unwrap();
    for _ in 0..3 {
        assert!(store.get("k").await.is_err());
        assert!(Instant::now() < end + patient(Duration::from_secs(1)));
    }
}

/// Returns how many read and write requests the server has begun to answer so far.
fn requests(etcd: &Etcd) -> u64 {
    let metrics = etcd.ask("/metrics").unwrap();
    let begun = metrics.lines().filter(|line| {
        line.starts_with("grpc_server_started_total{") && line.contains("grpc_service=\"etcdserverpb.KV\"")
    });
    let numbers = begun.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap());
    let (count, sum) = numbers.fold((0, 0), |(count, sum), number| (count + 1, sum + number));
    assert!(count > 3, "the metrics have no request counts: {metrics}");
    sum
}

#[tokio::test]
async fn calls_take_one_round_trip_each() {
    let etcd = Etcd::start().unwrap();
    let store = EtcdStore::open(&Options::new([etcd.url()])).unwrap();
    let first = store.put("k", "v").await.unwrap();
    let guarded = || Txn::new().with_compares([Compare::unchanged("k", first)]);
    let many = (0..100).map(|i| Op::put(format!("many/{i}"), "v"));
    let calls = [
        store.range(RangeRequest::new(Range::key("k"))).await.map(|_| ()),
        store.range(RangeRequest::new(Range::All)).await.map(|_| ()),
        store.txn(guarded()).await.map(|_| ()),
        store.txn(guarded().with_success([Op::range(Range::All)])).await.map(|_| ()),
        store.txn(guarded().with_success([Op::put("other", "v")])).await.map(|_| ()),
        store.txn(guarded().with_success([Op::put("k", "w")]).with_failure([Op::range(Range::All)])).await.map(|_| ()),
        store.txn(guarded().with_success(many)).await.map(|_| ()),
        store.txn(Txn::new().with_success([Op::delete("many/7")])).await.map(|_| ()),
        store.compact(first).await,
    ];
    let count = u64::try_from(calls.len()).unwrap();
    for (i, call) in calls.into_iter().enumerate() {
        assert!(call.is_ok(), "{i}: {call:?}");
    }
    assert_eq!(requests(&etcd), 1 + count);
}
