//! Prepares a store on which every command succeeds, with the files that the commands need.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};
use std::thread;

use datastore::{Create, Location};
use kv::{Range, StoreExt};
use serde_json::Value;

use crate::common::{Done, Lab, TEST_TIMEOUT};
use crate::conditions::commands::{Command, Kind};

/// Number of commands that run in parallel.
const AT_ONCE: usize = 8;

/// Fields of documents whose values differ in each run.
const EACH_TIME: [&str; 6] = [
    "uid",
    "creationTimestamp",
    "timestamp",
    "affinity_claim_time",
    // A block's sequence numbers start from the time at which the block was created.
    "sequenceNumber",
    "sequenceNumberForAllocation",
];

/// A store on which every command succeeds.
pub(crate) struct Ground {
    pub(crate) lab: Lab,
    ip: String,
}

impl Ground {
    /// Prepares a store for each engine.
    pub(crate) fn each() -> [Self; 2] {
        Lab::each().map(Self::prepared)
    }

    fn prepared(lab: Lab) -> Self {
        for args in [
            "pool create main 10.65.0.0/22",
            "pool create spare 10.66.0.0/24",
            "pool create racks fd00:7::/48 --prefix-length 80",
            "reservation create few 10.65.0.9",
            "quota set --node node1 100",
        ] {
            lab.margay(args).answer();
        }
        let ip = lab.assign("net", "c1");
        for number in 0..8 {
            lab.assign("net", &format!("d{number}"));
        }
        lab.margay("ipam pin 10.65.0.79 shop/kept").answer();
        let ground = Self { lab, ip };
        let pool = |name: &str, cidr: &str, rest: &str| {
            format!(
                "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {{name: {name}}}\nspec: {{cidr: {cidr}{rest}}}\n"
            )
        };
        ground.put("new.yaml", &format!("{}---\n{}", pool("one", "10.97.0.0/24", ""), pool("two", "10.98.0.0/24", "")));
        ground.put("spare.yaml", &pool("spare", "10.66.0.0/24", ", natOutgoing: true"));
        let podman =
            serde_json::json!([{"Id": "e1", "NetworkSettings": {"Networks": {"other": {"IPAddress": "10.65.0.210"}}}}]);
        ground.put("podman.json", &podman.to_string());
        let allocations = serde_json::json!({"220": {"id": "e3", "podref": "shop/web", "ifname": "net1"}});
        let whereabouts =
            serde_json::json!({"kind": "IPPool", "spec": {"range": "10.65.0.0/22", "allocations": allocations}});
        ground.put("whereabouts.json", &whereabouts.to_string());
        fs::create_dir(ground.path("leases")).unwrap();
        fs::write(ground.path("leases").join("10.65.0.200"), "e2\neth0").unwrap();
        let path = |name: &str| ground.path(name).display().to_string();
        let entry = r#"{"10.65.0.8":{"since":"2026-01-01T00:00:00Z","reason":"a device answered on eth1","node":"n"}}"#;
        let quarantine = format!(
            "apiVersion: projectcalico.org/v3\nkind: IPReservation\nmetadata: {{name: margay-quarantine, annotations: \
             {{margay.io/quarantine: '{entry}'}}}}\nspec: {{reservedCIDRs: [10.65.0.8/32]}}\n"
        );
        ground.put("quarantine.yaml", &quarantine);
        for args in [
            format!("apply -f {}", path("quarantine.yaml")),
            format!("ipam check --report {}", path("report.json")),
            format!("store backup {}", path("backup")),
            format!("export {}", path("export")),
        ] {
            ground.lab.margay(&args).answer();
        }
        // Edit the report of `ipam check` so that all addresses in use count as unused.
        let report = fs::read_to_string(ground.path("report.json")).unwrap();
        ground.put("report.json", &report.replace("\"inUse\": true", "\"inUse\": false"));
        ground
    }

    fn put(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.lab.folder().join(name)
    }

    /// Returns the location of another store of the same engine, in the folder that contains this store.
    pub(crate) fn beside(&self, name: &str) -> Location {
        self.lab.location.moved_to(self.path(name))
    }

    pub(crate) fn folder(&self) -> &Path {
        self.lab.location.path().unwrap()
    }

    /// Returns the location of the store on which the given command succeeds.
    pub(crate) fn place_for(&self, command: &Command) -> Location {
        if command.kind == Kind::Fills { self.beside("empty/store") } else { self.lab.location.clone() }
    }

    /// Returns the arguments of a command on a store. The number `own` becomes part of the names of output files and
    /// stores, so that commands can run in parallel.
    pub(crate) fn args(&self, command: &Command, at: &Location, own: usize) -> Vec<String> {
        let words = command
            .words()
            .replace("{dir}", &self.lab.folder().display().to_string())
            .replace("{out}", &self.path(&format!("out{own}")).display().to_string())
            .replace("{other}", &self.beside(&format!("other{own}")).to_string())
            .replace("{ip}", &self.ip);
        let url = at.to_string();
        let mut args = vec!["--cni-conf-dir".to_owned(), "/nowhere".to_owned()];
        if !words.contains("{store}") {
            args.extend(["--store".to_owned(), url.clone()]);
        }
        args.extend(words.replace("{store}", &url).split(' ').map(str::to_owned));
        args
    }
}

/// Builds the command `before ... program`: the wrapper command `before` runs `program` with an empty environment.
pub(crate) fn process(before: &[&str], program: &str, args: &[String]) -> Process {
    let mut words: Vec<&str> = before.to_vec();
    words.push(program);
    let mut process = Process::new(words[0]);
    process.args(&words[1..]).args(args).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    process.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    process
}

pub(crate) fn run(args: &[String]) -> Done {
    done(process(&[], env!("CARGO_BIN_EXE_margay"), args))
}

pub(crate) fn done(mut process: Process) -> Done {
    let output = process.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let code = output.status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(255);
    Done { code, out: text(output.stdout), err: text(output.stderr) }
}

/// Runs `work` for each command, with up to [`AT_ONCE`] commands in parallel.
pub(crate) fn for_each(commands: &[Command], work: impl Fn(usize, &Command) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(command) = commands.get(at) else { break };
                    work(at, command);
                }
            });
        }
    });
}

/// Returns the revision and the contents of a store, without the fields that differ in each run.
pub(crate) fn content(location: &Location) -> (i64, BTreeMap<String, String>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let open = datastore::open(location, &Create::Never.with_wait(TEST_TIMEOUT)).await.unwrap();
        let all = open.store().list(Range::All).await.unwrap();
        open.close().await.unwrap();
        let kvs = all.kvs.iter().map(|kv| (kv.key.to_string(), stripped(kv.value.as_bytes())));
        (all.revision.get(), kvs.collect())
    })
}

fn stripped(value: &[u8]) -> String {
    let Ok(mut json) = serde_json::from_slice::<Value>(value) else { return value.escape_ascii().to_string() };
    strip(&mut json);
    json.to_string()
}

fn strip(json: &mut Value) {
    match json {
        Value::Object(members) => {
            members.retain(|name, _| !EACH_TIME.contains(&name.as_str()));
            members.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

/// Copies a folder; an existing destination folder is replaced.
pub(crate) fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    assert!(Process::new("cp").arg("-a").args([from, to]).status().unwrap().success());
}
