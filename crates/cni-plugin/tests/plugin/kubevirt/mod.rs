//! Replays the recorded calls of Calico's plugin for virtual machines, each from the recorded state before the call.
//! The calls run the real program under Calico's plugin name on a real etcd, with a Kubernetes API that sends the
//! recorded answers.

mod api;
mod deviations;
mod state;
mod verbs;

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use conformance::patient;
use datastore::Create;
use kv::{Store, StoreExt};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::common::finish;
use api::{Api, Content};
use deviations::{DEVIATIONS, Deviation};
use state::{State, advance, brief, numbers, renaming};
use testkit::server::Etcd;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Expected {
    pub(crate) exit: u8,
    /// The expected output of the call: a result, an error's code and message, or null.
    pub(crate) said: Value,
    /// The expected state of the store, in the form that [`brief`] returns.
    pub(crate) state: Value,
}

/// The etcd, the Kubernetes API and the plugin binary on which the recording is replayed.
struct Stage {
    _etcd: Etcd,
    address: String,
    store: Arc<dyn Store>,
    _open: datastore::OpenStore,
    runtime: Runtime,
    api: Api,
    folder: tempfile::TempDir,
}

/// Writes a kubeconfig for a Kubernetes API at the given URL.
fn write_kubeconfig(folder: &Path, url: &str) -> PathBuf {
    let text = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "secret-token"}}]});
    let path = folder.join("kubeconfig");
    std::fs::write(&path, text.to_string()).unwrap();
    // The kubeconfig's file mode must not depend on the umask.
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path
}

impl Stage {
    fn new() -> Self {
        let etcd = Etcd::start().unwrap();
        let folder = tempfile::tempdir().unwrap();
        symlink(env!("CARGO_BIN_EXE_margay-ipam"), folder.path().join("calico-ipam")).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let location = stores::at(&etcd.url().replace("http:", "etcd:")).unwrap();
        let open =
            runtime.block_on(datastore::open(&location, &Create::Never.with_wait(Duration::from_secs(10)))).unwrap();
        let api = Api::start();
        write_kubeconfig(folder.path(), &api.url);
        let address = etcd.address().to_string();
        Self { _etcd: etcd, address, store: open.store(), _open: open, runtime, api, folder }
    }

    /// Replaces all documents of the store with a recorded state.
    fn load(&self, state: &State) {
        self.runtime.block_on(async {
            for kv in self.store.list(kv::Range::All).await.unwrap().kvs {
                if !state.contains_key(std::str::from_utf8(kv.key.as_bytes()).unwrap()) {
                    self.store.delete(kv::Range::Key(kv.key)).await.unwrap();
                }
            }
            for (key, value) in state {
                self.store.put(key.as_str(), value.to_string()).await.unwrap();
            }
        });
    }

    fn stored(&self) -> State {
        let kvs = self.runtime.block_on(self.store.list(kv::Range::All)).unwrap().kvs;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        kvs.iter().map(|kv| (text(kv.key.as_bytes()), serde_json::from_slice(kv.value.as_bytes()).unwrap())).collect()
    }

    /// Runs a plugin call, and returns its exit status and standard output; removes `details` from an error, because
    /// they differ from Calico's.
    fn call(&self, env: &Value, stdin: &Value) -> (u8, Value) {
        let files = self.folder.path().to_str().unwrap();
        let places = [
            ("<etcd>", self.address.as_str()),
            ("<files>", files),
            ("<bin>", "/opt/cni/bin"),
            ("<netns:a>", "/var/run/netns/none"),
            ("<netns:b>", "/var/run/netns/none"),
        ];
        let text = |text: &str| places.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
        let mut stdin = stdin.clone();
        stdin["ipam_lock_file"] = format!("{files}/ipam.lock").into();
        let env = env.as_object().unwrap().iter().map(|(name, value)| (name, text(value.as_str().unwrap())));
        let mut program = Command::new(self.folder.path().join("calico-ipam"));
        let outcome = finish(program.env_clear().envs(env), text(&stdin.to_string()).as_bytes());
        let mut said: Value = serde_json::from_str(&outcome.stdout).unwrap_or(Value::Null);
        if outcome.exit != 0 {
            let text = said["msg"].as_str().unwrap_or_default().replace(&self.api.url, "<api>");
            said = json!({"code": said["code"], "msg": text});
        }
        (outcome.exit, said)
    }
}

/// Returns the expected outcome of a call: the better outcome if `DEVIATIONS` lists the call, or else the recorded
/// outcome.
fn expected(case: &str, at: usize, call: &Value, before: &Value, after: &Value) -> Expected {
    let stdout = &call["stdout"];
    let said = match call["exit"].as_u64() {
        Some(1) => json!({"code": stdout["code"], "msg": stdout["msg"]}),
        _ => stdout.clone(),
    };
    // A recorded call that was killed or has panicked has no valid exit status, so `DEVIATIONS` must list the expected
    // outcome.
    let exit = call["exit"].as_u64().and_then(|exit| u8::try_from(exit).ok()).unwrap_or(u8::MAX);
    let mut expected = Expected { exit, said, state: after.clone() };
    if let Some(Deviation { better, .. }) = DEVIATIONS.iter().find(|one| one.case == case && one.step == at) {
        let recorded = expected.clone();
        better(&mut expected, before);
        assert_ne!(expected, recorded, "{case} {at} is no deviation");
    }
    expected
}

fn play(stage: &Stage, name: &str, at: usize, step: &Value, before: &State, after: &State) -> Result<(), String> {
    stage.load(before);
    let (before_brief, after_brief) = (brief(before), brief(after));
    let expected = expected(name, at, step, &before_brief, &after_brief);
    let begun = Instant::now();
    let (exit, said) = match step["plugin"].as_str() {
        Some("calico-ipam") => stage.call(&step["env"], &step["stdin"]),
        // If the recorded call invoked the main plugin, replay only the IPAM plugin calls that the main plugin made.
        _ => {
            let calls = step["ipam_calls"].as_array().unwrap();
            let mut said = Vec::new();
            for call in calls {
                assert_eq!(call["stdin"], "as given to the plugin");
                let (exit, answer) = stage.call(&call["env"], &step["stdin"]);
                said.push(json!({"exit": exit, "stdout": answer}));
            }
            (expected.exit, said.into())
        }
    };
    if begun.elapsed() > patient(Duration::from_secs(8)) {
        return Err(format!("it took {:?}", begun.elapsed()));
    }
    let stored = stage.stored();
    let found = brief(&stored);
    let rename = renaming(&before_brief, &expected.state, &found);
    let found = Expected { exit, said: rename(&said), state: rename(&found) };
    let said = match step["plugin"].as_str() {
        Some("calico-ipam") => expected.said.clone(),
        _ if expected.said.is_array() => expected.said.clone(),
        _ => {
            let calls = step["ipam_calls"].as_array().unwrap().iter();
            calls.map(|call| json!({"exit": call["exit"], "stdout": call.get("stdout")})).collect()
        }
    };
    let expected = Expected { said, ..expected };
    if found != expected {
        return Err(format!("expected {expected:#?}\nfound {found:#?}"));
    }
    let numbers_now = numbers(&stored);
    for (held, number) in numbers(before) {
        if numbers_now.get(&held).is_some_and(|now| *now != number) {
            return Err(format!("{held:?} has another sequence number, though it is the same allocation"));
        }
    }
    Ok(())
}

#[test]
fn kubevirt_calls_match_calico_or_better() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/kubevirt/transcript.json");
    let record: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let stage = Stage::new();
    let cases = record["cases"].as_array().unwrap();
    let (mut calls, mut wrong) = (0, Vec::new());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        stage.api.set(Content::of(&case["setup"]["kubernetes"]));
        let documents = [&record["start"], &case["setup"]["store"]].into_iter().filter_map(Value::as_object).flatten();
        let mut state: State = documents.map(|(key, value)| (key.clone(), value.clone())).collect();
        for (at, step) in case["steps"].as_array().unwrap().iter().enumerate() {
            let before = state.clone();
            advance(&mut state, step);
            match step["do"].as_str().unwrap() {
                "kubernetes" => stage.api.set(Content::of(step)),
                "ADD" | "DEL" => {
                    calls += 1;
                    if let Err(why) = play(&stage, name, at, step, &before, &state) {
                        wrong.push(format!("{name}, step {at}, {}: {why}", step["do"]));
                    }
                }
                _ => {}
            }
        }
    }
    assert_eq!((cases.len(), calls), (25, 187), "cases and calls");
    assert!(wrong.is_empty(), "{} of {calls} calls\n{}", wrong.len(), wrong.join("\n"));
}
