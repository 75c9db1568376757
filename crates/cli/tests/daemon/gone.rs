//! Tests that the daemon may end while another program uses the store through the daemon. After the daemon has ended, a
//! program that used the store through the daemon opens the store itself.

use std::fs;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::thread::{self, sleep};
use std::time::Duration;

use datastore::{Create, OpenStore, Sharing};
use futures::StreamExt;
use kv::{ErrorKind, Range, StoreExt, WatchRequest};
use nix::sys::signal::Signal;
use wire::{FileId, Frame, FrameKind, Hello, MAX_ANSWER_BODY_BYTES, StoreIdentity};

use crate::daemon::Daemon;
use crate::fake::{Fake, greet};
use crate::lab::{ENGINES, Lab, block_on};
use crate::programs::TEST_TIMEOUT;

const POOL: &str = "10.82.0.0/24";

async fn open(lab: &Lab, sharing: Sharing) -> OpenStore {
    let options = Create::Never.with_wait(TEST_TIMEOUT).with_sharing(sharing);
    let open = datastore::open(&lab.location(), &options).await.unwrap();
    assert!(open.served().is_some() && !open.is_exclusive());
    open
}

#[test]
fn open_store_goes_on_when_daemon_is_gone() {
    for engine in ENGINES {
        for sharing in [Sharing::Served, Sharing::InTurns, Sharing::OnRequest] {
            let lab = Lab::with_pool(engine, POOL);
            let daemon = Daemon::start(&lab);
            block_on(async {
                let open = open(&lab, sharing).await;
                let store = open.store();
                let first = store.put("/a", "1").await.unwrap();
                let mut watch = store.watch(WatchRequest::new(Range::key("/a"), first)).await.unwrap();
                assert_eq!(watch.next().await.unwrap().unwrap().revision, first);
                daemon.kill();
                assert_eq!(store.get("/a").await.unwrap().unwrap().mod_revision, first);
                assert!(open.is_exclusive());
                let second = store.put("/a", "2").await.unwrap();
                // With [`Sharing::InTurns`], watches are unsupported, because the store may be closed between two
                // operations.
                let next = watch.next().await.unwrap();
                match sharing {
                    Sharing::InTurns => assert_eq!(next.unwrap_err().kind(), &ErrorKind::Unsupported),
                    _ => assert_eq!(next.unwrap().revision, second),
                }
                drop(watch);
                open.release_store().await;
                let others = tokio::task::spawn_blocking({
                    let url = lab.url();
                    move || crate::programs::run(crate::programs::margay(["--store", &url, "pool", "list"]))
                });
                others.await.unwrap().ok();
                assert!(store.get("/a").await.unwrap().is_some());
                drop(store);
                open.close().await.unwrap();
            });
            lab.is_in_order();
        }
    }
}

#[test]
fn open_store_is_refused_when_replaced_by_another() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let folder = lab.location().path().unwrap().to_owned();
        let copy = folder.with_extension("copy");
        let copied = std::process::Command::new("cp").arg("-r").args([&folder, &copy]).status().unwrap();
        assert!(copied.success());
        let read = |open: OpenStore| async move {
            let error = open.store().get("/a").await.unwrap_err();
            open.close().await.unwrap();
            error
        };
        let daemon = Daemon::start(&lab);
        block_on(async {
            let may_make = Create::IfMissing.with_wait(TEST_TIMEOUT).with_sharing(Sharing::Served);
            let of_a_maker = datastore::open(&lab.location(), &may_make).await.unwrap();
            assert!(of_a_maker.served().is_some());
            let (of_a_copy, of_another) = (open(&lab, Sharing::Served).await, open(&lab, Sharing::Served).await);
            daemon.kill();
            fs::remove_dir_all(&folder).unwrap();
            let error = read(of_a_maker).await;
            assert_eq!(error.kind(), &ErrorKind::Missing, "{error}");
            assert!(!folder.exists(), "the store was made anew");
            // The copy that is put in place of the original store has the original's id.
            fs::rename(&copy, &folder).unwrap();
            let error = read(of_a_copy).await;
            assert_eq!(error.kind(), &ErrorKind::RevisionRegressed, "{error}");
            fs::remove_dir_all(&folder).unwrap();
            lab.margay("store create").ok();
            let error = read(of_another).await;
            assert_eq!(error.kind(), &ErrorKind::RevisionRegressed, "{error}");
        });
        lab.margay("store verify").ok();
    }
}

/// A daemon that is frozen during an operation keeps the store open. A program that needs the frozen daemon waits for
/// one timeout, and then fails with an error that names the daemon's process.
#[test]
fn frozen_daemon_is_waited_for_once() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let daemon = Daemon::start(&lab);
        block_on(async {
            let options = Create::Never.with_wait(Duration::from_secs(1)).with_sharing(Sharing::Served);
            let open = datastore::open(&lab.location(), &options).await.unwrap();
            daemon.signal(Signal::SIGSTOP);
            let error = open.store().get("/a").await.unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::Closed, "{error}");
            let said = error.to_string();
            assert!(said.contains(&format!("process {}", daemon.pid())) && !said.contains("waited 0"), "{said}");
            daemon.signal(Signal::SIGCONT);
            assert!(open.store().get("/a").await.unwrap().is_none());
            open.close().await.unwrap();
        });
        daemon.end();
        lab.is_in_order();
    }
}

/// Listens on the socket of the test store's daemon, sends a daemon's greeting, and lets `serve` handle the client's
/// connection.
fn breaks_off(lab: &Lab, serve: impl Fn(UnixStream) + Send + 'static) -> Fake {
    let id = lab.margay("store status -o json").json()["id"].as_str().unwrap().to_owned();
    let folder = lab.location().path().unwrap().to_owned();
    let hello = Hello::new(StoreIdentity::Embedded { id, queue: FileId::at(&folder.join("queue")).unwrap() });
    Fake::listen(&lab.socket(), move |mut stream| {
        greet(&mut stream, &hello);
        serve(stream);
    })
}

#[test]
fn open_store_goes_on_wherever_connection_breaks() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let whole = Frame::new(FrameKind::Taken, &()).unwrap().to_bytes();
        let reads_and_sends = |bytes: Vec<u8>| {
            move |mut stream: UnixStream| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let asked = stream.try_clone().unwrap();
                    asked.set_nonblocking(true).unwrap();
                    let mut asked = tokio::net::UnixStream::from_std(asked).unwrap();
                    _ = tokio::time::timeout(TEST_TIMEOUT, Frame::read(&mut asked, MAX_ANSWER_BODY_BYTES)).await;
                });
                stream.set_nonblocking(false).unwrap();
                _ = stream.write_all(&bytes);
            }
        };
        // The listener closes the client's connection at one of four points: immediately, after the request, in the
        // middle of an answer, or after the answer.
        let ends: [Box<dyn Fn(UnixStream) + Send>; 4] = [
            Box::new(drop),
            Box::new(reads_and_sends(Vec::new())),
            Box::new(reads_and_sends(whole[..whole.len() / 2].to_vec())),
            Box::new(reads_and_sends(whole.clone())),
        ];
        for (number, serve) in ends.into_iter().enumerate() {
            let fake = breaks_off(&lab, serve);
            lab.margay("pool list").ok();
            lab.margay("ipam show --show-blocks").ok();
            lab.margay(&format!("pool create p{number} 10.83.{number}.0/24 --manual")).ok();
            lab.margay(&format!("reservation create r{number} 10.83.{number}.1")).ok();
            lab.add(&format!("c{number}")).ok();
            assert!(fake.met() > 0);
            drop(fake);
            let pools = lab.margay("pool list -o json").json();
            assert_eq!(pools["pools"].as_array().unwrap().len(), 2 + number);
        }
        lab.is_in_order();
    }
}

/// The daemon is killed and not restarted while commands and plugins write.
#[test]
fn killed_daemon_takes_no_call_with_it() {
    const CALLERS: usize = 12;
    for engine in ENGINES {
        for round in 0..4_u64 {
            let lab = Lab::with_pool(engine, POOL);
            let daemon = Daemon::start(&lab);
            thread::scope(|scope| {
                for caller in 0..CALLERS {
                    let lab = &lab;
                    scope.spawn(move || match caller % 3 {
                        0 => drop(lab.margay(&format!("pool create p{caller} 10.83.{caller}.0/24 --manual")).ok()),
                        1 => drop(lab.margay("ipam show --show-blocks").ok()),
                        _ => drop(lab.add(&format!("c{caller}")).ok()),
                    });
                }
                sleep(Duration::from_millis(5 + 10 * round));
                daemon.kill();
            });
            assert_eq!(lab.margay("pool list -o json").json()["pools"].as_array().unwrap().len(), 1 + CALLERS / 3);
            assert_eq!(lab.held().len(), CALLERS / 3);
            lab.is_in_order();
        }
    }
}

/// The configuration names a different engine than the engine that created the store's files.
#[test]
fn wrong_engine_is_refused_with_daemon_too() {
    for (engine, other) in [(ENGINES[0], ENGINES[1]), (ENGINES[1], ENGINES[0])] {
        let lab = Lab::with_pool(engine, POOL);
        let wrong = lab.url().replacen(engine, other, 1);
        let asked = || crate::programs::run(crate::programs::margay(["--store", &wrong, "pool", "list"]));
        let without = asked().failed();
        let daemon = Daemon::start(&lab);
        let with = asked().failed();
        assert_eq!(with.err, without.err);
        assert!(with.err.contains(engine), "{}", with.err);
        daemon.end();
    }
}
