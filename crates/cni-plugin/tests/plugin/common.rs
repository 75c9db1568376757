//! Shared helpers of the plugin's tests: an allocator with prepared answers, and functions that call the plugin.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::{Command, Stdio};

use agent::{Add, Allocator, Answer, Check, CheckAnswer, CniError, Del, Gc, GcSummary, Result, StoreAccess, Verb};
use cni_plugin::{Environment, Host, Invocation, LogDestination, PluginName, ProcessOutcome, run};
use ipam_core::assign::AssignedAddress;
use ipnet::IpNet;
use serde_json::Value;
use testkit::process::start;

/// An allocator that returns prepared answers and records the requests that it receives.
#[derive(Default)]
pub(crate) struct Scripted {
    pub(crate) add: Option<Result<Vec<AssignedAddress>>>,
    pub(crate) del: Option<Result<()>>,
    pub(crate) check: Option<Result<CheckAnswer>>,
    pub(crate) status: Option<Result<()>>,
    pub(crate) added: RefCell<Vec<Add>>,
    pub(crate) deleted: RefCell<Vec<Del>>,
    pub(crate) checked: RefCell<Vec<Check>>,
    pub(crate) gc: Option<Result<GcSummary>>,
    pub(crate) collected: RefCell<Vec<Gc>>,
    pub(crate) asked: RefCell<Vec<Add>>,
    /// For each recorded request, the [`StoreAccess`] that the plugin passed.
    pub(crate) at: RefCell<Vec<StoreAccess>>,
}

fn unexpected<T>() -> Result<T> {
    Err(CniError::internal("the test did not expect this call"))
}

impl Allocator for Scripted {
    fn call(&self, at: &StoreAccess, verb: &Verb) -> Result<Answer> {
        self.at.borrow_mut().push(at.clone());
        match verb.clone() {
            Verb::Add(add) => {
                self.added.borrow_mut().push(*add);
                self.add.clone().unwrap_or_else(unexpected).map(Answer::Assigned)
            }
            Verb::Del(del) => {
                self.deleted.borrow_mut().push(del);
                self.del.clone().unwrap_or_else(unexpected).map(|()| Answer::Released(Vec::new()))
            }
            Verb::Check(check) => {
                self.checked.borrow_mut().push(check);
                self.check.clone().unwrap_or_else(unexpected).map(Answer::Checked)
            }
            Verb::Status(add) => {
                self.asked.borrow_mut().push(*add);
                self.status.clone().unwrap_or_else(unexpected).map(|()| Answer::Ready)
            }
            Verb::Gc(gc) => {
                self.collected.borrow_mut().push(gc);
                self.gc.clone().unwrap_or_else(unexpected).map(Answer::Collected)
            }
            Verb::Quarantine(_) => unexpected(),
        }
    }
}

/// Returns an assigned address whose block and pool have the given prefix lengths.
pub(crate) fn assigned(ip: IpAddr, block: u8, pool: u8, gateway: Option<IpAddr>) -> AssignedAddress {
    let network = |length| IpNet::new(ip, length).unwrap().trunc();
    AssignedAddress { ip, prefix_length: None, block: network(block), pool: network(pool), gateway }
}

pub(crate) fn environment(verb: &str) -> BTreeMap<String, String> {
    let variables = [
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_NETNS", "/var/run/netns/none"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/opt/cni/bin"),
    ];
    variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Returns the same host facts on every machine, so that tests do not depend on the machine.
pub(crate) fn host() -> Host {
    Host {
        hostname: "host-1".into(),
        boot_id: Some("191b29e2-6a5a-43ab-90d5-e4a2f05417e4".into()),
        now: time::macros::datetime!(2026-11-21 02:41:03 UTC),
        nodename_file: "/no/such/file".into(),
        own_netns: "/proc/self/ns/net".into(),
    }
}

/// Calls the plugin as a function, in the test's own process.
pub(crate) fn call(
    name: PluginName,
    env: &BTreeMap<String, String>,
    stdin: &[u8],
    allocator: &dyn Allocator,
) -> ProcessOutcome {
    let environment: Environment = env.iter().collect();
    let invocation =
        Invocation { drivers: stores::drivers(), name, environment, host: host(), logging: LogDestination::Untouched };
    run(&invocation, &mut &*stdin, allocator)
}

/// Runs the real plugin binary with exactly the given environment variables.
pub(crate) fn call_binary(env: &BTreeMap<String, String>, stdin: &[u8]) -> ProcessOutcome {
    finish(Command::new(env!("CARGO_BIN_EXE_margay-ipam")).env_clear().envs(env), stdin)
}

/// Runs a command with the given standard input until the command exits.
pub(crate) fn finish(command: &mut Command, stdin: &[u8]) -> ProcessOutcome {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = start(command, stdin).wait_with_output().unwrap();
    ProcessOutcome {
        exit: output.status.code().unwrap().try_into().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Returns the code, the message and the details of the CNI error that a plugin call has printed.
pub(crate) fn error_of(outcome: &ProcessOutcome) -> (u64, String, String) {
    assert_eq!(outcome.exit, 1, "{outcome:?}");
    let json: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let text = |name: &str| json[name].as_str().unwrap_or_default().to_owned();
    (json["code"].as_u64().unwrap(), text("msg"), text("details"))
}
