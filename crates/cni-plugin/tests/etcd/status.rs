//! Tests that STATUS on an etcd cluster succeeds only if an ADD would succeed, changes nothing, and seldom queries all
//! etcd members.

use std::os::unix::fs::symlink;

use etcd_client::{AlarmAction, AlarmOptions, AlarmType, Client, ConnectOptions, Permission, PermissionType};
use serde_json::Value;

use crate::faults::{disarm, free, full};
use crate::lab::{Lab, runtime};
use crate::process::{Call, Outcome};
use testkit::programs::plugin;

/// The CNI error code of every failed STATUS call.
const UNAVAILABLE: u64 = 50;
const PASSWORD: &str = "hidden-password";

fn call(lab: &Lab, user: Option<&str>, verb: &str, container: &str) -> Call {
    let mut conf: Value = lab.conf();
    conf["cniVersion"] = "1.1.0".into();
    conf["nodename_file_optional"] = true.into();
    let call = Call::new(verb, container, &conf);
    match user {
        Some(user) => call.with("ETCD_USERNAME", user).with("ETCD_PASSWORD", PASSWORD),
        None => call,
    }
}

#[track_caller]
fn ready(lab: &Lab, user: Option<&str>) -> Outcome {
    let outcome = call(lab, user, "STATUS", "").run();
    assert_eq!((outcome.exit, outcome.stdout.as_str()), (0, ""), "{outcome:?}");
    outcome
}

#[track_caller]
fn unavailable(lab: &Lab, user: Option<&str>, texts: &[&str]) {
    let refusal = call(lab, user, "STATUS", "").run().refusal();
    assert_eq!(refusal.says(texts).code, UNAVAILABLE, "{refusal:?}");
}

async fn client(lab: &Lab, user: Option<&str>) -> Client {
    let options = user.map(|user| ConnectOptions::new().with_user(user, PASSWORD));
    Client::connect([lab.etcds[0].url()], options).await.unwrap()
}

/// Returns the number of proposals that the etcd member has applied, and the newest revision.
fn progress(lab: &Lab) -> (u64, i64) {
    runtime().block_on(async {
        let status = client(lab, None).await.status().await.unwrap();
        (status.raft_applied_index(), status.header().unwrap().revision())
    })
}

fn alarms(lab: &Lab) -> usize {
    runtime().block_on(async {
        let mut client = client(lab, None).await;
        client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap().alarms().len()
    })
}

#[test]
fn status_tells_alarm_until_disarmed() {
    let lab = full();
    let url = lab.etcds[0].url();
    let commands = [url.as_str(), "no space left", "etcdctl compact", "etcdctl defrag", "etcdctl alarm disarm"];
    unavailable(&lab, None, &commands);
    call(&lab, None, "ADD", "c1").run().refusal().says(&commands);
    unavailable(&lab, None, &commands);
    free(&lab);
    ready(&lab, None);
    call(&lab, None, "ADD", "c1").ok();
    let raise = |action| {
        runtime().block_on(async {
            let mut client = client(&lab, None).await;
            let mut options = AlarmOptions::new();
            options.with_member(client.status().await.unwrap().header().unwrap().member_id());
            client.alarm(action, AlarmType::Corrupt, Some(options)).await.unwrap();
        });
    };
    raise(AlarmAction::Activate);
    unavailable(&lab, None, &["the store is damaged", "etcdctl endpoint hashkv", "etcdctl alarm disarm"]);
    raise(AlarmAction::Deactivate);
    ready(&lab, None);
}

#[test]
fn status_raises_no_alarm_when_space_is_short() {
    let lab = full();
    runtime().block_on(async { disarm(&mut client(&lab, None).await).await });
    // The alarm was cleared but etcd's space is still used up, so the next put raises the space quota alarm again.
    ready(&lab, None);
    assert_eq!(alarms(&lab), 0);
    call(&lab, None, "ADD", "c1").run().refusal().says(&["no space left"]);
    assert_eq!(alarms(&lab), 1);
    unavailable(&lab, None, &["no space left"]);
}

#[test]
fn status_asks_all_members_each_minute_and_after_failure() {
    let lab = Lab::start();
    let rounds = || {
        let before = progress(&lab);
        ready(&lab, None);
        let after = progress(&lab);
        assert_eq!(before.1, after.1, "something was written");
        after.0 - before.0
    };
    assert_eq!((rounds(), rounds(), rounds()), (1, 0, 0));
    // After an ADD failed for a reason other than a store error, STATUS does not query the etcd members.
    call(&lab, None, "ADD", "c1").with("CNI_ARGS", "IP=192.0.2.1").run().refusal();
    assert_eq!(rounds(), 0);
    lab.etcds[0].signal(nix::sys::signal::Signal::SIGSTOP).unwrap();
    let mut impatient = lab.conf();
    impatient["datastore_timeout"] = 1.into();
    Call::new("ADD", "c1", &impatient).run().refusal().says(&["no answer in time"]);
    lab.etcds[0].signal(nix::sys::signal::Signal::SIGCONT).unwrap();
    assert_eq!((rounds(), rounds()), (1, 0));
}

/// Turns etcd's authentication on, and creates users with rights on the given key prefixes, and `root` with all rights.
fn guard(lab: &Lab, users: &[(&str, &[(&str, PermissionType)])]) {
    runtime().block_on(async {
        let mut client = client(lab, None).await;
        for (user, rights) in users.iter().chain(&[("root", &[] as &[_])]) {
            client.user_add(*user, PASSWORD, None).await.unwrap();
            client.role_add(*user).await.unwrap();
            for (prefix, right) in *rights {
                grant(&mut client, user, prefix, *right).await;
            }
            client.user_grant_role(*user, *user).await.unwrap();
        }
        client.auth_enable().await.unwrap();
    });
}

async fn grant(client: &mut Client, role: &str, prefix: &str, right: PermissionType) {
    client.role_grant_permission(role, Permission::new(right, prefix).with_prefix()).await.unwrap();
}

#[test]
fn status_names_refused_key_until_right_is_granted() {
    use PermissionType::{Read, Readwrite};
    let lab = Lab::start();
    let reader: &[_] = &[("/calico/", Read), ("/margay/", Read)];
    let of_calico: &[_] = &[("/calico/", Readwrite)];
    let of_margay: &[_] = &[("/margay/", Readwrite)];
    let both: &[_] = &[("/calico/", Readwrite), ("/margay/", Readwrite)];
    let no_rights: &[_] = &[];
    guard(
        &lab,
        &[("reader", reader), ("calico", of_calico), ("margay", of_margay), ("both", both), ("stranger", no_rights)],
    );
    ready(&lab, Some("both"));
    let refused = [
        ("reader", "it may not write /calico/ipam/v2/", "readwrite /calico/"),
        ("calico", "it may not read /margay/v1/", "readwrite /margay/"),
        ("margay", "it may not read /calico/", "readwrite /calico/"),
        ("stranger", "it may not read /", "readwrite /"),
    ];
    for (user, key, command) in refused {
        let texts =
            ["the roles of the user do not allow this", key, "etcdctl role grant-permission --prefix=true", command];
        unavailable(&lab, Some(user), &texts);
        let refusal = call(&lab, Some(user), "ADD", "c1").run().refusal();
        refusal.says(&texts);
        assert!(!refusal.text.contains(crate::faults::MAY_HAVE_HAPPENED), "{refusal:?}");
        unavailable(&lab, Some(user), &texts);
    }
    call(&lab, Some("both"), "ADD", "c2").ok();
    runtime().block_on(async {
        let mut client = client(&lab, Some("root")).await;
        for (user, prefix) in [("reader", "/calico/"), ("reader", "/margay/"), ("calico", "/margay/")] {
            grant(&mut client, user, prefix, Readwrite).await;
        }
    });
    // Do not run STATUS as user `reader` here, because STATUS remembers a refused write for a minute, or until an ADD
    // fails.
    call(&lab, Some("reader"), "ADD", "c3").ok();
    ready(&lab, Some("calico"));
    call(&lab, Some("calico"), "DEL", "c2").ok();
    call(&lab, Some("calico"), "DEL", "c3").ok();
}

#[test]
fn status_of_main_plugin_tries_rights_to_endpoints() {
    use PermissionType::{Read, Readwrite};
    let lab = Lab::start();
    lab.put(
        "/calico/resources/v3/projectcalico.org/clusterinformations/default",
        r#"{"kind":"ClusterInformation","apiVersion":"projectcalico.org/v3","metadata":{"name":"default"},"spec":{"datastoreReady":true}}"#,
    );
    let ipam_alone: &[_] = &[("/calico/", Read), ("/calico/ipam/", Readwrite), ("/margay/", Readwrite)];
    let all: &[_] = &[("/calico/", Readwrite), ("/margay/", Readwrite)];
    guard(&lab, &[("ipam", ipam_alone), ("all", all)]);
    let bin = lab.root.path();
    for name in ["calico", "calico-ipam"] {
        symlink(plugin(), bin.join(name)).unwrap();
    }
    let status = |user| {
        let call = call(&lab, Some(user), "STATUS", "").with("CNI_PATH", bin.to_str().unwrap());
        call.by(bin.join("calico")).run()
    };
    ready(&lab, Some("ipam"));
    let refusal = status("ipam").refusal();
    let texts = ["it may not write /calico/resources/v3/projectcalico.org/workloadendpoints/", "readwrite /calico/"];
    assert_eq!(refusal.says(&texts).code, UNAVAILABLE, "{refusal:?}");
    let outcome = status("all");
    assert_eq!((outcome.exit, outcome.stdout.as_str()), (0, ""), "{outcome:?}");
}
