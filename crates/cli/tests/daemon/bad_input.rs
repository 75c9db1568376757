//! Tests the daemon with clients that do not speak its protocol, with too many clients, and with a second daemon for
//! one store.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use conformance::patient;
use kv::{Range, RangeRequest, StoreExt};
use wire::keys::{Request, TimedRequest};
use wire::{FRAME_VERSION, Frame, FrameKind, MAX_REQUEST_BODY_BYTES};

use crate::daemon::{Daemon, greeting};
use crate::lab::{ENGINES, Lab, block_on};
use crate::programs::{TEST_TIMEOUT, margay, run};

const POOL: &str = "10.74.0.0/24";

/// Connects a client that sends and receives raw bytes.
fn raw(lab: &Lab) -> UnixStream {
    let stream = UnixStream::connect(lab.socket()).unwrap();
    stream.set_read_timeout(Some(patient(TEST_TIMEOUT))).unwrap();
    stream
}

fn greeted(stream: &mut UnixStream) {
    let mut header = [0; 6];
    stream.read_exact(&mut header).unwrap();
    assert_eq!((header[0], header[1]), (FRAME_VERSION, b'h'));
    let length = u32::from_le_bytes([header[2], header[3], header[4], header[5]]);
    stream.read_exact(&mut vec![0; length as usize]).unwrap();
}

/// Checks that the daemon closes a connection without sending anything.
#[track_caller]
fn is_closed(mut stream: UnixStream, why: &str) {
    let mut said = Vec::new();
    let begun = Instant::now();
    // If the daemon closes the connection with data still unread, the client's next read returns an error.
    let _ = stream.read_to_end(&mut said);
    assert!(begun.elapsed() < patient(TEST_TIMEOUT / 2), "{why}: not closed");
    assert_eq!(said, b"", "{why}");
}

#[track_caller]
fn is_well(lab: &Lab, daemon: &mut Daemon) {
    daemon.runs();
    lab.add("well").ok().by_daemon();
    lab.del("well").ok().by_daemon();
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

#[test]
fn client_garbage_closes_only_its_connection() {
    let lab = Lab::with_pool("redb", POOL);
    let mut daemon = Daemon::start(&lab);
    let mut other = raw(&lab);
    greeted(&mut other);
    let header = |kind: u8, length: usize| {
        let mut bytes = vec![FRAME_VERSION, kind];
        bytes.extend(u32::try_from(length).unwrap().to_le_bytes());
        bytes
    };
    let garbage: Vec<u8> = (0..100_000).map(|_| fastrand::u8(..)).collect();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("another language", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        (
            "another version",
            Frame::empty(FrameKind::Yield)
                .to_bytes()
                .into_iter()
                .enumerate()
                .map(|(at, byte)| if at == 0 { 9 } else { byte })
                .collect(),
        ),
        ("random bytes", [vec![FRAME_VERSION], garbage.clone()].concat()),
        ("no such kind", header(b'?', 0)),
        ("a frame that only daemons send", header(b'a', 0)),
        ("a greeting", header(b'h', 0)),
        ("a length beyond the limit", header(b'v', MAX_REQUEST_BODY_BYTES + 1)),
        ("the longest length of all", header(b'k', u32::MAX as usize)),
        ("a verb without a body", header(b'v', 0)),
        ("a verb of random bytes", [header(b'v', 1000), garbage[..1000].to_vec()].concat()),
        ("a request of random bytes", [header(b'k', 1000), garbage[..1000].to_vec()].concat()),
    ];
    for (why, bytes) in cases {
        let mut stream = raw(&lab);
        greeted(&mut stream);
        // The daemon may close the connection before all bytes are written.
        let _ = stream.write_all(&bytes);
        is_closed(stream, why);
    }
    for half in [1, 5, 6, 20] {
        let mut stream = raw(&lab);
        greeted(&mut stream);
        let whole = [header(b'v', 4000), vec![0; 100]].concat();
        stream.write_all(&whole[..half]).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        is_closed(stream, "half a frame");
    }
    // The daemon has closed the misbehaving connections, but keeps the connection of the well-behaved client `other`.
    other.write_all(&Frame::empty(FrameKind::Yield).to_bytes()).unwrap();
    other.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let still = other.read(&mut [0]).unwrap_err();
    assert_eq!(still.kind(), std::io::ErrorKind::WouldBlock, "still open, and there is no answer");
    is_well(&lab, &mut daemon);
}

#[test]
fn client_random_bytes_never_harm() {
    let lab = Lab::with_pool("redb", POOL);
    let mut daemon = Daemon::start(&lab);
    for round in 0..400 {
        let mut stream = raw(&lab);
        let kind = if round % 2 == 0 { b'v' } else { b'k' };
        let length = fastrand::usize(..300);
        let mut bytes = vec![FRAME_VERSION, kind];
        bytes.extend(u32::try_from(length).unwrap().to_le_bytes());
        // Small numbers, such as enum variants and lengths, reach deeper into the parser than arbitrary bytes.
        bytes.extend((0..length).map(|_| if fastrand::bool() { fastrand::u8(..8) } else { fastrand::u8(..) }));
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
    is_well(&lab, &mut daemon);
    lab.is_in_order();
}

#[test]
fn clients_that_never_read_delay_no_other() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        // Each answer of the daemon is larger than the buffer of a socket.
        lab.held_open(async |open| {
            for number in 0..200 {
                open.store().put(format!("/filler/{number}"), "x".repeat(20_000)).await.unwrap();
            }
        });
        let mut daemon = Daemon::start(&lab);
        let within = Duration::from_secs(60);
        let all = Frame::new(
            FrameKind::Keys,
            &TimedRequest { within, request: Request::Range(RangeRequest::new(Range::All)) },
        );
        let all = all.unwrap().to_bytes();
        let clients: Vec<_> = (0..50)
            .map(|_| {
                let mut stream = raw(&lab);
                for _ in 0..20 {
                    stream.write_all(&all).unwrap();
                }
                stream
            })
            .collect();
        for number in 0..5 {
            let add = lab.add(&format!("c{number}")).ok().by_daemon();
            assert!(add.took < patient(Duration::from_secs(10)), "{add:?}");
        }
        // Clients that never read must not delay a process that waits for the store lock.
        let begun = Instant::now();
        lab.held();
        assert!(begun.elapsed() < patient(Duration::from_secs(10)), "{:?}", begun.elapsed());
        drop(clients);
        is_well(&lab, &mut daemon);
    }
}

#[test]
fn plugin_is_served_beside_thousand_idle_clients() {
    let lab = Lab::with_pool("redb", POOL);
    let mut daemon = Daemon::start(&lab);
    let clients: Vec<_> = (0..1000).map(|_| raw(&lab)).collect();
    is_well(&lab, &mut daemon);
    // With many idle clients, the daemon can still hand over the store lock and acquire it again.
    for _ in 0..3 {
        lab.held();
        is_well(&lab, &mut daemon);
    }
    drop(clients);
    is_well(&lab, &mut daemon);
}

/// Sets the limit on open files to systemd's default (1024), which is lower than the number of clients that the daemon
/// accepts.
#[test]
fn plugin_is_served_beside_more_clients_than_open_files() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut command = std::process::Command::new("sh");
        command.args([
            "-c",
            "ulimit -n 1024 && exec \"$0\" --store \"$1\" serve",
            env!("CARGO_BIN_EXE_margay"),
            &lab.url(),
        ]);
        command.stdin(std::process::Stdio::null()).env_clear();
        let mut daemon = Daemon::start_as(&lab, command);
        daemon.wait_to_greet(&lab);
        let clients: Vec<_> = (0..1100).map(|_| raw(&lab)).collect();
        for number in 0..3 {
            let add = lab.add(&format!("c{number}")).ok();
            assert!(add.took < patient(Duration::from_secs(10)), "{add:?}");
            lab.del(&format!("c{number}")).ok();
        }
        lab.nothing_is_held();
        drop(clients);
        crate::daemon::serves_again(&lab, "again", patient(TEST_TIMEOUT));
        daemon.runs();
        lab.is_in_order();
    }
}

#[test]
fn second_daemon_is_refused() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        for _ in 0..2 {
            let second = run(margay(["--store", &lab.url(), "serve"])).failed();
            assert!(second.err.starts_with("error: another margay serve has"), "{second:?}");
        }
        assert_eq!(greeting(&lab).unwrap().process, daemon.pid());
        is_well(&lab, &mut daemon);
        // After a daemon has ended or was killed, a new daemon of the store can start.
        daemon.kill();
        let mut daemon = Daemon::start(&lab);
        is_well(&lab, &mut daemon);
    }
}

#[test]
fn client_keys_are_limited_as_in_store() {
    let lab = Lab::with_pool("redb", POOL);
    let mut daemon = Daemon::start(&lab);
    let location = lab.location();
    block_on(async {
        let store = datastore::served::connect(&location, TEST_TIMEOUT).await.unwrap();
        // The test commits a transaction of the maximum size, and tries a larger transaction.
        store.put("/big", "x".repeat(1_000_000)).await.unwrap();
        let error = store.put("/bigger", "x".repeat(3_000_000)).await.unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
        assert!(store.get("/bigger").await.unwrap().is_none());
        store.delete(Range::key("/big")).await.unwrap();
    });
    is_well(&lab, &mut daemon);
}
