//! Replays the recorded calls of Calico's main CNI plugin with Margay's main plugin. Each recorded case runs on its own
//! machine: a set of Linux namespaces. Every plugin call must have the recorded outcome: the exit status, the output,
//! and the requests to IPAM and the Kubernetes API. The state of store, host and container after the call must also
//! match the recording.
//!
//! A test is named `store/mode/case`, for example `etcd/child/plain`, and is run by
//! `cargo test --profile ci -p margay-cni-plugin --test wired -- etcd/child/plain`. Tests whose names begin with
//! `harness/` test the code that replays the recorded calls.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

/// Pairs a test function with its name.
macro_rules! named {
    ($test:ident) => {
        (stringify!($test), $test)
    };
}

mod alone;
mod books;
mod call;
mod carrier;
mod checks;
mod edits;
mod exceptions;
mod kubernetes;
mod matching;
mod own;
mod place;
mod record;
mod renamed;
mod replay;
mod scan;
mod spy;
mod stand_in;
mod traps;

use std::any::Any;
use std::path::Path;
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use nix::unistd::geteuid;

use exceptions::ON_ETCD_ONLY;
use record::{Case, record};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Etcd,
    Sled,
    Redb,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Sled => "sled",
            Self::Redb => "redb",
        }
    }
}

/// Which program the main plugin finds under the name `calico-ipam`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// `calico-ipam` is the main plugin's own program, so IPAM runs in the main plugin's process.
    InProcess,
    /// `calico-ipam` is another program, which the main plugin runs as a child process.
    Child,
}

/// The combinations of store and mode in which recorded cases are replayed.
const STAGES: [(&str, Kind, Mode); 4] = [
    ("etcd/in_process", Kind::Etcd, Mode::InProcess),
    ("etcd/child", Kind::Etcd, Mode::Child),
    ("sled/in_process", Kind::Sled, Mode::InProcess),
    ("redb/in_process", Kind::Redb, Mode::InProcess),
];

/// Recorded cases that spend most of their time waiting; they start first, so that other cases run meanwhile.
const SLOW: [&str; 3] = ["readiness-gates", "datastore", "pod-policy-wait"];
/// Number of threads that replay recorded cases; larger than the usual number of processors, since some cases mostly
/// wait.
const THREADS: usize = 8;

fn main() -> ExitCode {
    let program = std::env::args_os().next().unwrap_or_default();
    if let Some(name) = Path::new(&program).file_name().and_then(|name| name.to_str())
        && spy::is_spy(name)
    {
        return spy::run(name);
    }
    // Start the service thread now, while this process is in the machine's original namespaces.
    carrier::carrier();
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let ignored = cannot_here();
    let trial = |(name, test): (String, Test)| {
        let trial = Trial::test(name, || test().map_err(Failed::from));
        match &ignored {
            Some(reason) => trial.with_kind(reason).with_ignored_flag(true),
            None => trial,
        }
    };
    let conclusion = libtest_mimic::run(
        &arguments,
        replays().chain(own::all()).chain(alone::all()).chain(traps::all()).chain(checks::all()).map(trial).collect(),
    );
    books::stop_all();
    conclusion.exit_code()
}

/// A test function together with its name, from [`named!`].
pub(crate) type NamedTest = (&'static str, fn(&mut replay::Stage));

/// A test that returns an error message on failure.
pub(crate) type Test = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// Returns one test for each recorded case in each combination of store and mode, slow cases first.
fn replays() -> impl Iterator<Item = (String, Test)> {
    let is_slow = |case: &&Case| SLOW.contains(&case.name.as_str());
    let (slow, others): (Vec<&Case>, Vec<&Case>) = record().cases.iter().partition(is_slow);
    let of = |cases: Vec<&'static Case>| {
        STAGES.into_iter().flat_map(move |stage| cases.clone().into_iter().map(move |case| (stage, case)))
    };
    let runs = |((_, kind, _), case): &((&str, Kind, Mode), &Case)| {
        *kind == Kind::Etcd || !ON_ETCD_ONLY.iter().any(|(name, _)| *name == case.name)
    };
    of(slow).chain(of(others)).filter(runs).map(|((stage, kind, mode), case)| {
        let test: Test = Box::new(move || replay::play(case, kind, mode, &replay::real));
        (format!("{stage}/{}", case.name), test)
    })
}

/// Returns the message of a panic from its payload.
pub(crate) fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// Returns the reason why this host cannot run the tests at all, if there is one. If a system package that the tests
/// need is missing, the tests run and fail; they are not skipped.
fn cannot_here() -> Option<String> {
    if !geteuid().is_root() {
        return Some("networks of their own need root".to_owned());
    }
    let script = "ip link add probe0 type veth peer name probe1 && mount -t tmpfs none /run";
    let probe = Command::new("unshare").args(["--mount", "--net", "--uts", "sh", "-c", script]).output();
    let probe = probe.expect("unshare is missing: scripts/setup test installs it");
    let said = String::from_utf8_lossy(&probe.stderr).trim().replace('\n', "; ");
    (!probe.status.success()).then(|| format!("no networks and mounts of their own here: {said}"))
}
