//! Tests with an etcd that is dead, frozen, full or without a leader. Each plugin call ends before its time limit and
//! reports only what is certain, and no address leaks.

use std::time::{Duration, Instant};

use conformance::patient;
use etcd_client::{AlarmAction, AlarmOptions, AlarmType, Client};
use nix::sys::signal::Signal;

use crate::lab::{Lab, runtime};
use crate::process::{Call, Outcome};
use crate::room::make_room;
use crate::server::Etcd;

/// Default time limit of a plugin call, plus a second for a busy machine.
const IN_TIME: Duration = Duration::from_secs(11);
pub(crate) const MAY_HAVE_HAPPENED: &str = "(it may have been carried out all the same)";

/// Returns the error code and the message of a failed plugin call, whose message must name each etcd endpoint.
#[track_caller]
fn refused(outcome: &Outcome, lab: &Lab) -> (u64, String) {
    let refusal = outcome.refusal();
    for etcd in &lab.etcds {
        assert!(refusal.text.contains(&etcd.url()), "{} is not named: {refusal:?}", etcd.url());
    }
    (refusal.code, refusal.text)
}

#[track_caller]
fn in_time(call: &Call) -> Outcome {
    let begun = Instant::now();
    let outcome = call.run();
    assert!(begun.elapsed() < patient(IN_TIME), "it took {:?}: {outcome:?}", begun.elapsed());
    outcome
}

#[test]
fn etcd_fault_when_dead() {
    let mut lab = Lab::start();
    lab.add("c0").ok();
    lab.etcd().stop();
    for call in [lab.add("c1"), lab.del("c0")] {
        let (code, text) = refused(&in_time(&call), &lab);
        assert_eq!(code, 11, "{text}");
        assert!(text.contains("no server answers there: check the address, and that etcd runs"), "{text}");
        assert!(!text.contains(MAY_HAVE_HAPPENED), "{text}");
    }
    lab.etcd().run().unwrap();
    lab.del("c0").ok();
    lab.all_is_well("c1");
}

#[test]
fn etcd_fault_when_frozen() {
    let lab = Lab::start();
    lab.add("c0").ok();
    lab.etcds[0].signal(Signal::SIGSTOP).unwrap();
    for call in [lab.add("c1"), lab.del("c0")] {
        let (code, text) = refused(&in_time(&call), &lab);
        assert!(code == 11 && text.contains("no answer in time"), "{text}");
    }
    lab.etcds[0].signal(Signal::SIGCONT).unwrap();
    lab.del("c0").ok();
    lab.all_is_well("c1");
}

#[test]
fn etcd_fault_ends_within_configured_timeout() {
    let lab = Lab::start();
    lab.etcds[0].signal(Signal::SIGSTOP).unwrap();
    let mut conf = lab.conf();
    conf["datastore_timeout"] = 2.into();
    let begun = Instant::now();
    let refusal = Call::new("ADD", "c1", &conf).run().refusal();
    assert!(begun.elapsed() < patient(Duration::from_secs(4)), "{:?}: {refusal:?}", begun.elapsed());
    conf["datastore_timeout"] = 91.into();
    let refusal = Call::new("ADD", "c1", &conf).run().refusal();
    assert_eq!(refusal.says(&["datastore_timeout is not between 1 and 90"]).code, 7);
}

#[test]
fn etcd_fault_without_leader() {
    let mut lab = Lab::on(Etcd::start_three().unwrap().into());
    lab.add("c0").ok();
    for stopped in [1, 2] {
        lab.etcds[stopped].stop();
    }
    for call in [lab.add("c1"), lab.del("c0")] {
        let (code, text) = refused(&in_time(&call), &lab);
        assert!(code == 11 || text.contains(MAY_HAVE_HAPPENED), "{code}: {text}");
    }
    for stopped in [1, 2] {
        lab.etcds[stopped].run().unwrap();
    }
    lab.del("c0").ok();
    lab.all_is_well("c1");
}

#[test]
fn etcd_fault_of_one_member_is_survived() {
    for frozen in [0, 1, 2] {
        let lab = Lab::on(Etcd::start_three().unwrap().into());
        lab.add("c0").ok();
        lab.etcds[frozen].signal(Signal::SIGSTOP).unwrap();
        for call in [lab.add("c1"), lab.del("c0"), lab.del("c1")] {
            let outcome = in_time(&call);
            assert_eq!(outcome.exit, 0, "{outcome:?}");
        }
        lab.etcds[frozen].signal(Signal::SIGCONT).unwrap();
        lab.all_is_well("c2");
    }
}

/// Starts an etcd whose space quota is used up by other keys.
pub(crate) fn full() -> Lab {
    let lab = Lab::on(vec![Etcd::start_with("http", &["--quota-backend-bytes=4194304".to_owned()]).unwrap()]);
    lab.add("c0").ok();
    runtime().block_on(async {
        let mut client = Client::connect([lab.etcds[0].url()], None).await.unwrap();
        // When a large value no longer fits, an ADD may still fit, so small values fill the remaining space.
        for (bytes, most) in [(200_000, 100), (500, 10_000)] {
            disarm(&mut client).await;
            for number in 0.. {
                assert!(number < most, "4 MiB are never full");
                let put = client.put(format!("/others/{bytes}/{number}"), vec![7; bytes], None).await;
                if put.is_err_and(|error| error.to_string().contains("database space exceeded")) {
                    break;
                }
            }
        }
    });
    lab
}

/// Clears all space quota alarms of etcd.
pub(crate) async fn disarm(client: &mut Client) {
    for alarm in client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap().alarms() {
        let mut options = AlarmOptions::new();
        options.with_member(alarm.member_id());
        client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options)).await.unwrap();
    }
}

/// Frees space in an etcd that [`full`] has filled, and clears the space quota alarm.
pub(crate) fn free(lab: &Lab) {
    runtime().block_on(async {
        let mut client = Client::connect([lab.etcds[0].url()], None).await.unwrap();
        let options = etcd_client::DeleteOptions::new().with_prefix();
        let deleted = client.delete("/others/", Some(options)).await.unwrap();
        client.compact(deleted.header().unwrap().revision(), None).await.unwrap();
        make_room(&mut client, 2_097_152).await.unwrap();
    });
}

#[test]
fn etcd_fault_when_quota_is_full() {
    let lab = full();
    for call in [lab.add("c1"), lab.del("c0")] {
        let (code, text) = refused(&in_time(&call), &lab);
        assert_eq!(code, 999, "{text}");
        for part in ["no space left", "etcdctl compact", "etcdctl defrag", "etcdctl alarm disarm"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains(MAY_HAVE_HAPPENED), "{text}");
    }
    lab.no_notes_are_left();
    free(&lab);
    lab.del("c0").ok();
    lab.all_is_well("c1");
}
