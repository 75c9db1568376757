//! Replays one recorded case of Calico's main plugin.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use conformance::patient;
use serde_json::{Value, json};

use crate::books::{self, Books, Lent};
use crate::call::{Call, Came};
use crate::carrier::Served;
use crate::edits::{expected, on_store};
use crate::exceptions::{EXCEPTIONS, Exception};
use crate::kubernetes::Api;
use crate::matching::{Bindings, Difference, differences};
use crate::place::{Forwarding, Place};
use crate::record::{Case, Documents, is_call};
use crate::renamed::Renamed;
use crate::scan;
use crate::{Kind, Mode, spy};

/// How long to wait until all effects of a plugin call on the kernel are visible.
const SETTLES: Duration = Duration::from_millis(1500);
/// Time limit of a plugin call; a longer recorded duration raises the limit.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of differences that are reported for one step.
const WAIT: usize = 15;

/// A function that runs the plugin, or a stand-in for the plugin.
pub(crate) type Plugin = dyn Fn(&mut Stage, &Call, &Value) -> Came + Sync;

/// A machine with a store and a Kubernetes API, on which a recorded case is replayed.
pub(crate) struct Stage {
    pub(crate) place: Place,
    pub(crate) books: Books,
    pub(crate) bindings: Bindings,
    renamed: Renamed,
    pub(crate) mode: Mode,
    kind: Kind,
    api: Api,
    /// The store's documents at the start of the test case.
    start: Documents,
    /// Forwards connections from the case's network namespace to etcd.
    _way: Option<Served>,
}

impl Stage {
    /// Moves the calling thread to a new machine with the setup of a recorded case.
    pub(crate) fn set(case: &Case, kind: Kind, mode: Mode, root: &Path, etcd: Option<&Lent>) -> Self {
        let place = Place::enter(root, mode, Forwarding::of(&case.name));
        let way = etcd.map(Lent::reach);
        let books = Books::new(kind, root);
        let mut start = case.documents();
        if kind != Kind::Etcd {
            // An embedded store needs neither ClusterInformation nor Nodes.
            start.retain(|key, _| !key.contains("/clusterinformations/") && !key.contains("/nodes/"));
            // The recorded host had no Felix, so nothing was masqueraded. Turn `natOutgoing` off, because Margay's
            // plugin masquerades on an embedded store.
            let pools = start.iter_mut().filter(|(key, _)| key.contains("/ippools/"));
            pools.for_each(|(_, pool)| pool["spec"]["natOutgoing"] = json!(false));
        }
        books.put_all(&start);
        let api = Api::start();
        api.set(&case.setup.kubernetes);
        if let Some(text) = &case.setup.nodename_file {
            place.write("<files>/nodename", text);
        }
        for (path, text) in &case.setup.files {
            place.write(path, text);
        }
        for name in &case.setup.netns {
            Place::add_netns(name);
        }
        Self {
            place,
            books,
            bindings: Bindings::default(),
            renamed: Renamed::default(),
            mode,
            kind,
            api,
            start,
            _way: way,
        }
    }

    pub(crate) fn is_on_etcd(&self) -> bool {
        self.kind == Kind::Etcd
    }

    /// Moves the times in all WorkloadEndpoints and allocations into the past.
    pub(crate) fn age_all(&self, by: Duration) {
        let ages = |key: &str| key.contains("/workloadendpoints/") || key.contains("/assignment/");
        let of_age = self.books.all().into_iter().filter(|(key, _)| ages(key));
        let aged = of_age.map(|(key, document)| (key, older(&document, by)));
        self.books.put_all(&aged.collect());
    }

    /// Reads the current state of store, host and containers.
    pub(crate) fn scan(&self) -> Value {
        json!({
            "etcd": books::scan(self.kind, &self.start, &self.books.all()),
            "host": scan::host(),
            "host_local_files": host_local_files(),
            "netns": scan::containers(),
        })
    }

    pub(crate) fn call(&self, step: &Value) -> Call {
        let store = self.place.root.join("store");
        let call = on_store(step, self.kind, store.to_str().unwrap());
        Call::of(&self.place.concrete(&call), &self.place.root)
    }

    /// Applies a recorded change that is not made by the plugin. For a step that only reads a file, returns how the
    /// file differs from the recorded content.
    fn change(&self, case: &str, number: usize, step: &Value) -> Vec<Difference> {
        let text = |name: &str| step[name].as_str().unwrap();
        match text("do") {
            "command" => step["run"].as_array().unwrap().iter().for_each(|line| self.place.run(line.as_str().unwrap())),
            "store" => self.books.put_all(&Documents::from([(text("key").to_owned(), step["value"].clone())])),
            "delete" => self.books.delete(text("key")),
            "edit" => self.edit(text("key"), text("remove")),
            "write file" => self.place.write(text("path"), text("text")),
            "kubernetes" => self.api.set(step),
            "look" => return self.look_at_file(case, number, step),
            other => panic!("{other} is no step"),
        }
        Vec::new()
    }

    fn edit(&self, key: &str, remove: &str) {
        let mut document = self.books.all().remove(key).unwrap_or_else(|| panic!("{key} is not stored"));
        let (parent, name) = remove.rsplit_once('.').unwrap();
        let parent = parent.split('.').fold(&mut document, |value, name| &mut value[name]);
        parent.as_object_mut().and_then(|fields| fields.remove(name)).unwrap();
        self.books.put_all(&Documents::from([(key.to_owned(), document)]));
    }

    fn look_at_file(&self, case: &str, number: usize, step: &Value) -> Vec<Difference> {
        let path = Path::new(step["file"].as_str().unwrap());
        let mode = |path: &Path| fs::metadata(path).map(|found| format!("{:#o}", found.permissions().mode() & 0o7777));
        let came = match (mode(path), mode(path.parent().unwrap()), fs::metadata(path)) {
            (Ok(file), Ok(folder), Ok(found)) => {
                json!({"mode": file, "folder_mode": folder, "empty": found.len() == 0})
            }
            (Err(error), ..) => json!(error.to_string()),
            _ => json!("it went away"),
        };
        let recorded = json!({"mode": step["mode"], "folder_mode": step["folder_mode"], "empty": step["empty"]});
        let exceptions: Vec<_> = applicable(case, number, self.kind).collect();
        let expected = exceptions.iter().flat_map(|exception| exception.edits).try_fold(recorded, |value, edit| {
            let mut value = value;
            edit.apply(&mut value, case, &Value::Null).map(|()| value)
        });
        differences(&expected.unwrap_or_else(Value::String), &came, &mut Bindings::default())
    }
}

fn applicable(case: &str, number: usize, kind: Kind) -> impl Iterator<Item = &'static Exception> {
    EXCEPTIONS.iter().filter(move |exception| exception.is_for(case, number, kind))
}

fn host_local_files() -> Value {
    let read = |path: &Path| fs::read_dir(path).into_iter().flatten().map(|entry| entry.unwrap().path());
    let files = read(Path::new("/var/lib/cni/networks")).flat_map(|network| read(&network).collect::<Vec<_>>());
    // Skip lock files, because their content does not matter for the comparison.
    let files = files.filter(|path| path.file_name().is_some_and(|name| name != "lock"));
    let text = |path: &Path| fs::read_to_string(path).unwrap().trim_end().replace("\r\n", "\n");
    files.map(|path| (path.to_str().unwrap().to_owned(), Value::from(text(&path)))).collect()
}

/// For a case, the `EXCEPTIONS` entries that changed an expected outcome, and the entries without which an outcome
/// would not have matched.
#[derive(Debug, Default)]
struct Needed {
    changing: Vec<&'static Exception>,
    needed: Vec<&'static Exception>,
}

/// Replays a recorded case on a store, and returns the differences from the expected outcome as an error.
pub(crate) fn play(case: &Case, kind: Kind, mode: Mode, plugin: &Plugin) -> Result<(), String> {
    let root = tempfile::tempdir().unwrap();
    let etcd = (kind == Kind::Etcd).then(Lent::take);
    let playing = || {
        let mut stage = Stage::set(case, kind, mode, root.path(), etcd.as_ref());
        play_on(&mut stage, case, plugin)
    };
    // Use a separate thread, since a thread that has entered the case's namespaces cannot leave them again.
    let played = std::thread::scope(|scope| scope.spawn(playing).join());
    played.unwrap_or_else(|panic| Err(crate::said(&*panic)))
}

fn play_on(stage: &mut Stage, case: &Case, plugin: &Plugin) -> Result<(), String> {
    let mut before = stage.scan();
    let fresh = fresh(&case.setup.netns);
    let wrong = differences(&fresh, &before, &mut Bindings::default());
    if !wrong.is_empty() {
        return Err(reported("the beginning is not that of the recording", &wrong, ""));
    }
    let (mut report, mut needed) = (String::new(), Needed::default());
    for (index, step) in case.steps.iter().enumerate() {
        let number = index + 1;
        let what = format!("{}, step {number} of {}, {}", case.name, case.steps.len(), step["do"]);
        if is_call(step) {
            let call = stage.call(step);
            let came = plugin(stage, &call, step);
            let (wrong, unneeded) = judge(stage, case, number, step, &mut before, &came, &mut needed)?;
            if !wrong.is_empty() {
                report.push_str(&reported(&what, &wrong, &came.stderr));
                unneeded.iter().for_each(|one| report.push_str(&format!("  it is what was recorded, without {one}\n")));
            }
        } else {
            let wrong = stage.change(&case.name, number, step);
            if !wrong.is_empty() {
                report.push_str(&reported(&what, &wrong, ""));
            }
            before = stage.renamed.applied(&watch(stage, |_| false));
        }
    }
    if report.is_empty() {
        let stale =
            needed.changing.iter().filter(|one| !needed.needed.iter().any(|needed| std::ptr::eq(*needed, **one)));
        for exception in stale {
            let _ = writeln!(report, "{exception} is not needed: the plugin does what was recorded");
        }
    }
    if report.is_empty() { Ok(()) } else { Err(report) }
}

/// Returns the state of the host and its containers at the start of the case, before any change.
fn fresh(netns: &[String]) -> Value {
    let settings = json!({
        "ipv4/ip_forward": "1",
        "ipv6/conf/all/disable_ipv6": "0",
        "ipv6/conf/all/forwarding": "0",
        "ipv6/conf/default/disable_ipv6": "0",
        "ipv6/conf/lo/disable_ipv6": "0",
    });
    let container = json!({"interfaces": {}, "routes": [], "sysctls": settings});
    let containers: serde_json::Map<String, Value> =
        netns.iter().map(|name| (name.clone(), container.clone())).collect();
    json!({
        "etcd": {"documents": {}, "ipam": {"addresses": {}, "handles": {}}},
        "host": {"interfaces": {}, "links": []},
        "host_local_files": {},
        "netns": containers,
    })
}

fn watch(stage: &Stage, mut is_expected: impl FnMut(&Value) -> bool) -> Value {
    let until = Instant::now() + patient(SETTLES);
    let mut last = stage.scan();
    while !is_expected(&last) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(40));
        let next = stage.scan();
        if next == last && scan::is_settled(&next) {
            break;
        }
        last = next;
    }
    last
}

/// Compares the outcome of a plugin call with the expected outcome. The machine's state is read repeatedly after the
/// plugin call, until it is the expected state or no longer changes.
fn judge(
    stage: &mut Stage,
    case: &Case,
    number: usize,
    step: &Value,
    before: &mut Value,
    came: &Came,
    needed: &mut Needed,
) -> Result<(Vec<Difference>, Vec<&'static Exception>), String> {
    let exceptions: Vec<&'static Exception> = applicable(&case.name, number, stage.kind).collect();
    let store = stage.place.root.join("store");
    let expect = |exceptions: &[&Exception]| {
        let outcome =
            expected(step, &case.name, before, exceptions, stage.mode, (stage.kind, store.to_str().unwrap()))?;
        Ok::<_, String>(stage.place.concrete(&outcome))
    };
    let wanted = expect(&exceptions)?;
    let mut outcome = came.outcome.clone();
    outcome["ipam_calls"] = spy::calls(&stage.place.root, &came.stdin);
    outcome["api_requests"] = stage.api.requests();
    let (mut wrong, mut bindings) = (Vec::new(), Bindings::default());
    let mut ours = outcome;
    let (mut outcome, mut renamed) = (Value::Null, Renamed::default());
    watch(stage, |state| {
        for (part, value) in state.as_object().into_iter().flatten() {
            ours[part] = value.clone();
        }
        renamed = stage.renamed.clone();
        renamed.learn(&wanted, &ours);
        outcome = renamed.applied(&ours);
        if stage.kind != Kind::Etcd {
            without_known_next_hop(&mut outcome);
        }
        // The `details` of an error are not compared, since they differ between Margay and Calico.
        if wanted["stdout"]["msg"].is_string() && wanted["stdout"].get("details").is_none() {
            outcome["stdout"].as_object_mut().and_then(|error| error.remove("details"));
        }
        bindings = stage.bindings.clone();
        wrong = differences(&wanted, &outcome, &mut bindings);
        wrong.is_empty()
    });
    let mut unneeded = Vec::new();
    for &exception in &exceptions {
        let others: Vec<&Exception> =
            exceptions.iter().copied().filter(|other| !std::ptr::eq(*other, exception)).collect();
        match expect(&others) {
            Ok(without) if without == wanted => continue,
            Ok(without) if differences(&without, &outcome, &mut stage.bindings.clone()).is_empty() => {
                unneeded.push(exception);
            }
            _ => needed.needed.push(exception),
        }
        needed.changing.push(exception);
    }
    stage.bindings = bindings;
    stage.renamed = renamed;
    for part in crate::record::STATE {
        before[part] = outcome[part].clone();
    }
    Ok((wrong, unneeded))
}

/// Removes the neighbour entry of the default gateway from a container's state. A container has a neighbour entry for
/// its default gateway only if Calico's agents do not run.
fn without_known_next_hop(state: &mut Value) {
    let containers = state["netns"].as_object_mut().into_iter().flatten();
    for (_, interface) in containers.flat_map(|(_, it)| it["interfaces"].as_object_mut().into_iter().flatten()) {
        let is_next_hop = |one: &Value| {
            one["dst"] == "169.254.1.1" && one["lladdr"] == "ee:ee:ee:ee:ee:ee" && one["state"] == json!(["PERMANENT"])
        };
        interface["neighbours"].as_array_mut().into_iter().for_each(|all| all.retain(|one| !is_next_hop(one)));
    }
}

/// Returns a copy of a document with `by` subtracted from every time in it.
fn older(document: &Value, by: Duration) -> Value {
    let text = |text: &str| {
        let go = ipam_core::timestamps::parse_go_string(text).map(|time| ipam_core::timestamps::go_string(time - by));
        let json = || ipam_core::timestamps::parse_rfc3339(text).map(|time| ipam_core::timestamps::rfc3339(time - by));
        go.or_else(json)
    };
    match document {
        Value::String(string) => text(string).unwrap_or_else(|| string.clone()).into(),
        Value::Array(items) => items.iter().map(|item| older(item, by)).collect(),
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), older(value, by))).collect(),
        other => other.clone(),
    }
}

/// Formats the differences of a recorded step as an error message.
fn reported(what: &str, wrong: &[Difference], stderr: &str) -> String {
    let mut report = format!("{what} (- expected, + came):\n");
    for difference in wrong.iter().take(WAIT) {
        let _ = writeln!(report, "{difference}");
    }
    if wrong.len() > WAIT {
        let _ = writeln!(report, "  and {} differences more", wrong.len() - WAIT);
    }
    let log: Vec<&str> = stderr.lines().collect();
    for line in &log[log.len().saturating_sub(5)..] {
        let _ = writeln!(report, "  stderr: {line}");
    }
    report
}

pub(crate) fn real(stage: &mut Stage, call: &Call, step: &Value) -> Came {
    let recorded = step["took_seconds"].as_u64().map(|seconds| Duration::from_secs(seconds + 5));
    // If the recorded call was killed, its recorded duration does not raise the time limit.
    let patience =
        if step["exit"].is_number() { recorded.unwrap_or(TEST_TIMEOUT).max(TEST_TIMEOUT) } else { TEST_TIMEOUT };
    let patience = patient(patience);
    let mut came = call.run(patience);
    // STATUS waits less than a second for the store. That is too short on a busy machine, so repeat STATUS as a runtime
    // would.
    for _ in 0..5 {
        if step["do"] != "STATUS" || came.outcome["stdout"]["code"] != 50 {
            break;
        }
        spy::calls(&stage.place.root, &came.stdin);
        came = call.run(patience);
    }
    came
}
