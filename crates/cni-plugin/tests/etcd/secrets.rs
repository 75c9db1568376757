//! Tests that the plugin reports wrong credentials and expired certificates clearly, and that no output of the plugin
//! contains a secret.

use serde_json::{Value, json};

use crate::certificates::Certificates;
use crate::lab::Lab;
use crate::process::{Call, Outcome};
use crate::ways_in::{InConf, PASSWORD, guard};

const VERBS: [&str; 5] = ["ADD", "DEL", "CHECK", "GC", "STATUS"];

/// Strings that no output of the plugin may contain.
const SECRETS: [&str; 3] = ["hidden", "PRIVATE KEY", "BEGIN CERTIFICATE"];

#[track_caller]
fn says_no_secret(outcome: &Outcome, log: &std::path::Path) {
    let log = std::fs::read_to_string(log).unwrap();
    assert!(!log.is_empty());
    for text in [&outcome.stdout, &outcome.stderr, &log] {
        for secret in SECRETS {
            assert!(!text.contains(secret), "{secret}: {text}");
        }
    }
}

/// Adds secret values to a network configuration, which is passed to every verb.
fn with_secrets(lab: &Lab, mut conf: Value) -> Value {
    conf["cniVersion"] = "1.1.0".into();
    conf["log_file_path"] = lab.root.path().join("log").display().to_string().into();
    conf["policy"] = json!({"type": "none", "k8s_auth_token": "hidden-token", "k8s_client_key": "hidden-key"});
    conf["etcd_password"] = "hidden-etcd".into();
    conf["kubernetes"] = json!({"k8s_auth_token": "hidden-token"});
    conf["cni.dev/valid-attachments"] = json!([]);
    conf["prevResult"] = json!({"cniVersion": "1.1.0", "ips": [{"address": "10.77.0.1/26"}], "x": "hidden"});
    conf
}

#[test]
fn secrets_are_hidden_when_credentials_are_wrong() {
    let lab = Lab::start();
    guard(&lab);
    let conf = with_secrets(&lab, lab.conf());
    for (user, password, text) in [
        ("root", "hidden-other", "check user and password"),
        ("hidden-user", PASSWORD, "check user and password"),
        ("guest", PASSWORD, "the roles of the user do not allow this"),
    ] {
        for level in ["debug", "info", "error"] {
            let mut conf = conf.clone();
            conf["log_level"] = level.into();
            for verb in VERBS {
                let call = Call::new(verb, "c1", &conf).with("ETCD_USERNAME", user).with("ETCD_PASSWORD", password);
                let outcome = call.run();
                outcome.refusal().says(&[text]);
                says_no_secret(&outcome, &lab.root.path().join("log"));
            }
        }
    }
}

#[test]
fn secrets_are_hidden_when_certificates_expired() {
    for (expired, text) in [
        ("server", "its certificate has expired, or a clock is wrong"),
        ("client", "client.pem, has expired on 2001-01-01: renew it"),
    ] {
        let certificates = Certificates::expired(&[expired]).unwrap();
        let lab = Lab::on_empty(vec![certificates.etcd_for_known().unwrap()]);
        let mut conf = with_secrets(&lab, lab.conf());
        certificates.add_to(&mut conf);
        // A client that etcd rejects retries until its time limit, since the server may still be starting.
        conf["datastore_timeout"] = 2.into();
        for verb in VERBS {
            let call = Call::new(verb, "c1", &conf);
            let mut outcome = call.run();
            // STATUS has a time limit of less than a second, which might not suffice for a TLS handshake on a busy
            // machine.
            for _ in 0..20 {
                if verb != "STATUS" || outcome.refusal().text.contains(text) {
                    break;
                }
                outcome = call.run();
            }
            outcome.refusal().says(&[text, &lab.etcds[0].url()]);
            says_no_secret(&outcome, &lab.root.path().join("log"));
        }
    }
}

#[test]
fn secrets_are_hidden_when_files_are_mixed_up() {
    let certificates = Certificates::make().unwrap();
    let lab = Lab::on_empty(vec![certificates.etcd_for_known().unwrap()]);
    let mut conf = with_secrets(&lab, lab.conf());
    certificates.add_to(&mut conf);
    conf["etcd_cert_file"] = certificates.text("client.key").into();
    conf["etcd_key_file"] = certificates.text("client.pem").into();
    for verb in VERBS {
        let outcome = Call::new(verb, "c1", &conf).run();
        outcome.refusal().says(&["has no CERTIFICATE in PEM form", &certificates.text("client.key")]);
        says_no_secret(&outcome, &lab.root.path().join("log"));
    }
}

#[test]
fn secrets_are_hidden_when_configuration_works() {
    let lab = Lab::start();
    guard(&lab);
    let conf = with_secrets(&lab, lab.conf());
    for verb in ["ADD", "CHECK", "GC", "STATUS", "DEL"] {
        let call = Call::new(verb, "c1", &conf).with("ETCD_USERNAME", "root").with("ETCD_PASSWORD", PASSWORD);
        let outcome = call.run();
        // CHECK fails because the container's interface does not have the address in `prevResult`.
        assert_eq!(outcome.exit, i32::from(verb == "CHECK"), "{verb}: {outcome:?}");
        says_no_secret(&outcome, &lab.root.path().join("log"));
    }
    let mut conf = conf;
    conf["etcd_endpoints"] = format!("http://root:hidden@{}", lab.etcds[0].address()).into();
    for verb in VERBS {
        let outcome = Call::new(verb, "c1", &conf).run();
        outcome.refusal().says(&["a store's address has a user or a password in it"]);
        says_no_secret(&outcome, &lab.root.path().join("log"));
    }
}
