//! Tests lost answers: a daemon accepts a request and dies. If the answer to an ADD is lost, the plugin answers with
//! the address that the daemon may have assigned.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use agent::{Answer, Verb, VerbRequest, ipam_for_store};
use conformance::patient;
use datastore::{Create, Location};
use kv::Deadline;
use serde_json::{Value, json};
use wire::{Frame, FrameKind, MAX_REQUEST_BODY_BYTES};

use crate::fake::{Fake, greet, hello, send};
use crate::lab::{ENGINES, Lab, block_on};
use crate::programs::{Call, TEST_TIMEOUT};

const POOL: &str = "10.73.0.0/24";

/// The last step that a fake daemon performs for a request before it dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    /// The daemon accepts the request, and dies before it carries the request out.
    Takes,
    /// The daemon carries out the request but sends no answer.
    CarriesOut,
    /// The daemon carries out the request and sends the first half of its answer.
    AnswersByHalf,
    /// The daemon sends invalid data instead of an answer.
    AnswersGarbage,
}

const ALL: [Last; 4] = [Last::Takes, Last::CarriesOut, Last::AnswersByHalf, Last::AnswersGarbage];

/// Carries out a request by opening the store's files.
fn carry_out(location: &Location, verb: &Verb) -> Answer {
    block_on(async {
        let open = datastore::open(location, &Create::Never.with_wait(TEST_TIMEOUT)).await.unwrap();
        let ipam = ipam_for_store(open.store(), location, None);
        let done = verb.carry_out(&ipam, location, Deadline::after(TEST_TIMEOUT)).await;
        open.close().await.unwrap();
        done.into()
    })
}

/// Starts a fake daemon that dies after the step `last`. The returned receiver gets the results of the requests that
/// the fake daemon carried out.
fn dying(lab: &Lab, last: Last) -> (Fake, mpsc::Receiver<Answer>) {
    let (answers, received) = mpsc::channel();
    let (folder, location) = (lab.store.clone(), lab.location());
    let fake = Fake::listen(&lab.socket(), move |mut stream| {
        if let Some(answer) = die(&mut stream, &folder, &location, last) {
            let _ = answers.send(answer);
        }
    });
    (fake, received)
}

fn die(stream: &mut UnixStream, folder: &Path, location: &Location, last: Last) -> Option<Answer> {
    greet(stream, &hello(folder));
    stream.set_nonblocking(true).unwrap();
    let asked = block_on(async {
        let mut stream = tokio::net::UnixStream::from_std(stream.try_clone().unwrap()).unwrap();
        Frame::read(&mut stream, MAX_REQUEST_BODY_BYTES).await
    });
    stream.set_nonblocking(false).unwrap();
    let asked: VerbRequest = asked.ok()??.expect(FrameKind::Verb).ok()?.decode().unwrap();
    send(stream, &Frame::empty(FrameKind::Taken));
    if last == Last::Takes {
        return None;
    }
    let answer = carry_out(location, &asked.verb);
    let frame = Frame::new(FrameKind::Answer, &answer).unwrap().to_bytes();
    match last {
        Last::AnswersByHalf => _ = std::io::Write::write_all(stream, &frame[..frame.len() / 2]),
        Last::AnswersGarbage => send(stream, &Frame::new(FrameKind::Answer, &"no").unwrap()),
        Last::Takes | Last::CarriesOut => {}
    }
    Some(answer)
}

fn assigned(answers: &mpsc::Receiver<Answer>) -> std::net::IpAddr {
    match answers.recv_timeout(patient(TEST_TIMEOUT)).unwrap() {
        Answer::Assigned(assigned) => assigned[0].ip,
        other => panic!("{other:?}"),
    }
}

/// Checks that the plugin's ADD returns the address that the daemon has assigned. The DEL must release the address
/// although the fake daemon dies before it has sent a valid answer.
#[track_caller]
fn add_and_del(lab: &Lab, conf: &Value, args: &str) {
    for last in ALL {
        let (fake, answers) = dying(lab, last);
        let add = Call::new("ADD", "c1", conf).args(args).ok().alone("received no answer");
        if last != Last::Takes {
            assert_eq!(add.address(), assigned(&answers), "{last:?}");
        }
        if args.contains("IP=") {
            assert!(args.contains(&add.address().to_string()), "{last:?}: {add:?}");
        }
        assert_eq!(lab.held().into_iter().collect::<Vec<_>>(), [(add.address(), "net1.c1".to_owned())], "{last:?}");
        Call::new("DEL", "c1", conf).args(args).ok().alone("received no answer");
        if last != Last::Takes {
            assert_eq!(
                answers.recv_timeout(patient(TEST_TIMEOUT)).unwrap(),
                Answer::Released(vec![add.address()]),
                "{last:?}"
            );
        }
        lab.nothing_is_held();
        assert!(fake.met() >= 2, "{last:?}");
    }
    lab.is_in_order();
}

#[test]
fn lost_daemon_costs_no_call_on_bridged_network() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        add_and_del(&lab, &lab.conf(), "");
        add_and_del(&lab, &lab.conf(), "IP=10.73.0.77");
    }
}

#[test]
fn lost_daemon_costs_no_call_on_calico_network() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let conf = lab.conf_with("calico", json!({}));
        add_and_del(&lab, &conf, "");
        add_and_del(&lab, &conf, "IP=10.73.0.77");
    }
}

#[test]
fn lost_daemon_costs_no_call_when_killed_at_any_moment() {
    use crate::daemon::Daemon;

    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        for round in 0..15_u32 {
            let daemon = Daemon::start(&lab);
            let args = format!("IP=10.73.0.{}", 10 + round);
            let conf = lab.conf_with("calico", json!({}));
            let add = Call::new("ADD", &format!("c{round}"), &conf).args(&args).start();
            std::thread::sleep(Duration::from_millis(u64::from(round) * 3));
            daemon.kill();
            let address = add.end().ok().address().to_string();
            assert!(args.ends_with(&address), "round {round}");
        }
        assert_eq!(lab.held().len(), 15);
        lab.is_in_order();
    }
}
