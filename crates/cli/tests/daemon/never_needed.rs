//! Tests that plugins and commands work without the daemon, and with a foreign listener on the daemon's socket.

use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use conformance::patient;
use wire::{FROZEN_TIMEOUT, FileId, Frame, FrameKind, Hello, StoreIdentity};

use crate::daemon::Daemon;
use crate::fake::{Fake, greet, hello, send};
use crate::lab::{ENGINES, Lab};
use crate::programs::Ended;

const POOL: &str = "10.72.0.0/24";
/// Time limit of a plugin call or command: the time that it waits for a frozen daemon, plus two seconds for its work.
const BOUND: Duration = FROZEN_TIMEOUT.saturating_add(Duration::from_secs(2));

/// Checks that a plugin call or command ended within [`BOUND`].
#[track_caller]
fn in_time(ended: Ended) -> Ended {
    assert!(ended.took < patient(BOUND), "{ended:?}");
    ended
}

/// Checks that an ADD and a DEL succeed within [`BOUND`], and returns the result of the ADD.
#[track_caller]
fn calls_are_well(lab: &Lab) -> Ended {
    let add = in_time(lab.add("c1").ok());
    assert_eq!(lab.held(), [(add.address(), "net1.c1".to_owned())].into());
    in_time(lab.del("c1").ok());
    lab.nothing_is_held();
    add
}

/// Checks that plugin calls and commands succeed within [`BOUND`], and returns the result of the ADD.
#[track_caller]
fn all_is_well(lab: &Lab) -> Ended {
    let add = in_time(lab.add("c2").ok());
    let show = in_time(lab.margay(&format!("ipam show --ip {}", add.address())).ok());
    assert!(show.out.contains("net1.c2"), "{show:?}");
    in_time(lab.margay("pool list").ok());
    in_time(lab.del("c2").ok());
    calls_are_well(lab)
}

#[test]
fn fallback_without_socket() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        assert!(!lab.socket().exists());
        all_is_well(&lab);
    }
}

#[test]
fn fallback_when_socket_has_no_listener() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        fs::create_dir_all(lab.socket().parent().unwrap()).unwrap();
        drop(UnixListener::bind(lab.socket()).unwrap());
        assert!(lab.socket().exists());
        all_is_well(&lab);
        // The store's daemon takes over the socket file, on which no process listens.
        let mut daemon = Daemon::start(&lab);
        all_is_well(&lab).by_daemon();
        daemon.runs();
    }
}

#[test]
fn fallback_when_path_is_no_socket() {
    let lab = Lab::with_pool("redb", POOL);
    fs::create_dir_all(lab.socket().parent().unwrap()).unwrap();
    fs::write(lab.socket(), "a file").unwrap();
    all_is_well(&lab);
}

/// Starts a listener on the daemon's socket that is not a Margay daemon, and calls `serve` with the store's folder for
/// each client connection. Checks that plugin calls succeed, and that the plugin logs the reason why it opened the
/// store itself.
#[track_caller]
fn with_listener(
    is_well: impl Fn(&Lab) -> Ended,
    says: &str,
    serve: impl Fn(&Path, UnixStream) + Clone + Send + 'static,
) {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let (folder, serve) = (lab.store.clone(), serve.clone());
        let fake = Fake::listen(&lab.socket(), move |stream| serve(&folder, stream));
        is_well(&lab).alone(says);
        assert!(fake.met() >= 2, "the listener was asked {} times", fake.met());
    }
}

/// Keeps a connection open for 20 seconds without reading from it.
fn keep(stream: UnixStream) {
    thread::spawn(move || {
        thread::sleep(Duration::from_secs(20));
        drop(stream);
    });
}

#[test]
fn fallback_when_daemon_has_other_version() {
    with_listener(all_is_well, "or is not the same version as the plugin", |folder, mut stream| {
        let hello = Hello { program: "9.9.9".to_owned(), ..hello(folder) };
        greet(&mut stream, &hello);
        keep(stream);
    });
}

#[test]
fn fallback_when_daemon_has_other_protocol() {
    with_listener(all_is_well, "opening the store directly", |folder, mut stream| {
        let mut bytes = Frame::new(FrameKind::Hello, &hello(folder)).unwrap().to_bytes();
        bytes[0] = wire::FRAME_VERSION + 1;
        let _ = stream.write_all(&bytes);
        keep(stream);
    });
}

#[test]
fn fallback_when_daemon_has_other_store() {
    with_listener(all_is_well, "does not serve this store", |_, mut stream| {
        greet(&mut stream, &Hello::new(StoreIdentity::Nothing));
        keep(stream);
    });
    with_listener(all_is_well, "does not serve this store", |folder, mut stream| {
        let file = folder.join("store.id");
        let queue = FileId::at(&file).unwrap();
        greet(&mut stream, &Hello::new(StoreIdentity::Embedded { id: "any".to_owned(), queue }));
        keep(stream);
    });
}

#[test]
fn fallback_when_greeting_is_garbage() {
    with_listener(all_is_well, "opening the store directly", |_, mut stream| {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
    });
    with_listener(all_is_well, "opening the store directly", |_, mut stream| {
        // The listener sends the header of a frame of maximum length, and never sends the frame's content.
        let _ = stream.write_all(&[wire::FRAME_VERSION, b'h', 0, 0, 0, 0x40]);
        keep(stream);
    });
    with_listener(all_is_well, "opening the store directly", |_, stream| drop(stream));
}

#[test]
fn fallback_when_listener_is_silent() {
    with_listener(all_is_well, "opening the store directly", |_, stream| keep(stream));
}

#[test]
fn fallback_when_listener_never_accepts() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        fs::create_dir_all(lab.socket().parent().unwrap()).unwrap();
        let _listener = UnixListener::bind(lab.socket()).unwrap();
        all_is_well(&lab).alone("opening the store directly");
    }
}

#[test]
fn fallback_when_daemon_takes_no_request() {
    with_listener(calls_are_well, "opening the store directly", |folder, mut stream| {
        greet(&mut stream, &hello(folder));
        keep(stream);
    });
}

#[test]
fn fallback_when_daemon_answers_out_of_turn() {
    // The listener, which is no daemon, answers a request with a second greeting.
    with_listener(calls_are_well, "opening the store directly", |folder, mut stream| {
        greet(&mut stream, &hello(folder));
        send(&mut stream, &Frame::empty(FrameKind::Taken));
        send(&mut stream, &Frame::new(FrameKind::Answer, &hello(folder)).unwrap());
        keep(stream);
    });
}
