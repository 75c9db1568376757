//! Tests the stream of server-sent events with a plain TCP client instead of a browser.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod page_support;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use conformance::patient;
use ipam_core::assign::RequestedAddresses;
use kv::StoreExt;
use page_support::client::{connect, get, wait_for};
use page_support::{Daemon, add, empty, many_blocks, pool, soon};
use serde_json::Value;
use serve::http::ClientLimits;

/// An open stream of server-sent events.
struct Events(BufReader<TcpStream>);

impl Events {
    fn open(daemon: &Daemon, query: &str, header: &str) -> Self {
        let mut stream = connect(daemon);
        let request = format!("GET /api/events?{query} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut events = Self(BufReader::new(stream));
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            events.0.read_line(&mut line).unwrap();
            assert!(!line.is_empty(), "the head ends");
        }
        events
    }

    /// Returns the next block of lines from the stream: an event or a comment.
    fn block(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "the stream ended after {lines:?}");
            let line = line.trim_end();
            // The length of an HTTP chunk is on a separate line.
            let is_length = !line.is_empty() && line.bytes().all(|digit| digit.is_ascii_hexdigit());
            if line.is_empty() && !lines.is_empty() {
                return lines;
            }
            if !line.is_empty() && !is_length {
                lines.push(line.to_owned());
            }
        }
    }

    /// Returns the name, id and document of the next event.
    fn next(&mut self) -> (String, Option<i64>, Value) {
        loop {
            let lines = self.block();
            let field = |name: &str| lines.iter().find_map(|line| line.strip_prefix(name).map(str::to_owned));
            if let (Some(event), Some(data)) = (field("event: "), field("data: ")) {
                return (event, field("id: ").map(|id| id.parse().unwrap()), serde_json::from_str(&data).unwrap());
            }
        }
    }
}

#[test]
fn page_events_come_live_and_go_on_after_break() {
    let daemon = Daemon::with_limits(
        async || empty(),
        ClientLimits { heartbeat: Duration::from_millis(200), ..ClientLimits::default() },
    );
    daemon.run(pool(&daemon.ipam, "main", "10.1.0.0/24", 26));
    let mut events = Events::open(&daemon, "", "");
    assert_eq!(events.next().0, "ready");
    daemon.run(add(&daemon.ipam, "n1", "c1", "p1", RequestedAddresses::any(1, 0), &[]));
    let (name, first, reported) = events.next();
    assert_eq!(
        (name.as_str(), &reported["events"][0]["event"], &reported["events"][1]["event"]),
        ("batch", &"claimed".into(), &"assigned".into())
    );
    assert_eq!(reported["events"][1]["pod"], "p1");
    let silent = loop {
        let block = events.block();
        if block[0].starts_with(':') {
            break block;
        }
    };
    assert_eq!(silent, [": nothing happened"]);
    drop(events);
    daemon.run(add(&daemon.ipam, "n1", "c2", "p2", RequestedAddresses::any(1, 0), &[]));
    daemon.run(daemon.ipam.release_by_handle("k8s-pod-network.c1", soon())).unwrap();
    let mut events = Events::open(&daemon, "recent=200", &format!("Last-Event-ID: {}\r\n", first.unwrap()));
    assert_eq!(events.next().0, "ready");
    let reported: Vec<Value> = (0..2).map(|_| events.next().2["events"][0].clone()).collect();
    assert_eq!((&reported[0]["pod"], &reported[1]["event"]), (&"p2".into(), &"released".into()));
    let mut recent = Events::open(&daemon, "recent=200", "");
    assert_eq!(recent.next().0, "ready");
    assert_eq!(recent.next().2["events"], Value::Array(vec![]), "the pool");
    assert_eq!(recent.next().1, first);
}

#[test]
fn page_events_tell_gap_when_history_is_gone() {
    let daemon = Daemon::new(async || empty());
    daemon.run(pool(&daemon.ipam, "main", "10.1.0.0/24", 26));
    for number in 0..5 {
        daemon.run(add(&daemon.ipam, "n1", &format!("c{number}"), "p", RequestedAddresses::any(1, 0), &[]));
    }
    let store = daemon.ipam.store();
    let newest = daemon
        .run(store.get("/none"))
        .map(|_| daemon.run(store.list(kv::Range::prefix("/"))).unwrap().revision)
        .unwrap();
    daemon.run(store.compact(newest)).unwrap();
    for query in ["after=2", "after=1000"] {
        let mut events = Events::open(&daemon, query, "");
        let mut next = events.next();
        if next.0 == "ready" {
            next = events.next();
        }
        assert_eq!((next.0.as_str(), next.1), ("reset", Some(newest.get())), "{query}");
    }
    let mut events = Events::open(&daemon, "recent=200", "");
    assert_eq!(events.next().0, "ready");
    daemon.run(add(&daemon.ipam, "n1", "c9", "p9", RequestedAddresses::any(1, 0), &[]));
    let (name, _, reported) = events.next();
    assert_eq!(
        (name.as_str(), &reported["events"][0]["pod"]),
        ("batch", &"p9".into()),
        "no gap for a client that begins"
    );
}

#[test]
fn page_events_drop_client_that_never_reads() {
    // All limits except the stall limit are so long that only a stall can end a connection in this test.
    let limits = ClientLimits {
        stall: Duration::from_millis(500),
        headers: Duration::from_secs(600),
        ..ClientLimits::default()
    };
    let daemon = Daemon::with_limits(async || many_blocks(3000).await, limits);
    // The clients run one after the other. The test changes blocks so fast that no census of the store finishes
    // meanwhile.
    let lazy = connect(&daemon);
    for _ in 0..40 {
        (&lazy).write_all(b"GET /api/blocks?pool=large HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    }
    wait_for("the client of answers", || daemon.metrics.viewers() == 1);
    wait_for("its end", || daemon.metrics.viewers() == 0);
    let stream = connect(&daemon);
    (&stream).write_all(b"GET /api/events?recent=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    wait_for("the client of events", || daemon.metrics.viewers() == 1);
    let store = Arc::clone(daemon.ipam.store());
    let kvs = daemon.run(store.list(kv::Range::prefix("/calico/ipam/v2/assignment/"))).unwrap().kvs;
    // Adding and removing whole blocks produces large events.
    let until = Instant::now() + patient(Duration::from_secs(60));
    let mut kvs = kvs.iter().cycle();
    while daemon.metrics.viewers() > 0 {
        assert!(Instant::now() < until, "the client of events is still connected");
        let kv = kvs.next().unwrap();
        daemon.run(async {
            store.delete(kv::Range::Key(kv.key.clone())).await.unwrap();
            store.put(kv.key.clone(), kv.value.clone()).await.unwrap();
        });
    }
    assert_eq!(get(&daemon, "/health").status, 200);
}

#[test]
fn page_events_end_soon_with_followers() {
    let mut daemon = Daemon::new(async || empty());
    let mut events = Events::open(&daemon, "", "");
    assert_eq!(events.next().0, "ready");
    daemon.stop();
}
