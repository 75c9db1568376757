//! Tests a store against the rules of `crates/kv/SEMANTICS.md` and reports the result of each conformance case, for the
//! command `margay conformance`. A [`JudgePlan`] decides how the conformance cases use the store, and therefore which
//! cases can run.

mod report;
pub(crate) mod site;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use clap::{Args, ValueEnum};
use conformance::{BoxError, Fixture, ForeignKeys, Harness, InPlaceHarness, PrefixHarness, Run, RunOptions};
use datastore::{Location, StorePlace};
use kv::{Content, ErrorKind, Range, RangeRequest};

use self::report::{CaseProgress, RunSummary, reporter};
use self::site::{NewStoresHarness, StoreFolder, UrlHarness};
use crate::command::{Format, Invocation, StandaloneCommand, runtime};
use crate::error::{CommandFailure, CommandResult};
use crate::interrupt::{INTERRUPTED, Interrupt};

pub(crate) const HELP: &str = "\
What happens to the store:
  there is none yet    each case gets a new one, and all are removed
  it holds no key      all cases run in it, and it is emptied after each
  it holds any key     only cases that can share a store run, in a prefix of
                       their own, without compacting; the prefix is deleted

Examples:
  margay conformance memory:
  margay conformance redb:///tmp/judged --case W
  margay conformance etcd://10.0.0.1:2379 --report junit > conformance.xml
  margay conformance etcd://10.0.0.1:2379 --erase-everything 10.0.0.1:2379

The exit code is 0 if nothing failed, 1 if something did or nothing could run,
and 130 if the run was interrupted. What was written is removed in any case.";

/// The arguments of `conformance`.
#[derive(Debug, Args)]
pub(crate) struct Conformance {
    /// URL of the store to test
    #[arg(value_name = "URL")]
    pub(crate) url: String,

    /// Run only test cases whose name contains this text, such as W, H07 or compaction
    #[arg(long, value_name = "FILTER")]
    pub(crate) case: Option<String>,

    /// Report format: table, json or junit [default: the format of --output]
    #[arg(long, value_enum, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) report: Option<ReportFormat>,

    /// Delete every key in the store first, because some test cases need an empty store; to confirm, give the
    /// HOST:PORT or path of the store URL as the value
    #[arg(long, value_name = "HOST")]
    erase_everything: Option<String>,
}

/// The format of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReportFormat {
    Table,
    Json,
    Junit,
}

impl Conformance {
    /// Returns the format that `--report` names, or else the report format that corresponds to `--output`.
    fn report_as(&self, output: Format) -> ReportFormat {
        self.report.unwrap_or(match output {
            Format::Table | Format::Wide => ReportFormat::Table,
            // For YAML output, JSON is printed, because JSON is valid YAML.
            Format::Json | Format::Yaml => ReportFormat::Json,
        })
    }
}

impl StandaloneCommand for Conformance {
    /// Tests a store with the conformance cases. The exit code is 0 if no conformance case failed.
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        if invocation.options.store.is_some() {
            return Err(CommandFailure::new("the store to judge is named without --store")
                .hint("name the store as an argument: margay conformance sled:///path"));
        }
        let location = locate(self, invocation)?;
        check_filter(self)?;
        let runtime = runtime()?;
        let interrupt = Interrupt::listen()?;
        let plan = runtime.block_on(JudgePlan::of(&location, self))?;
        _ = writeln!(invocation.err, "store: {location}\nnote: {plan}");
        let mut options = RunOptions::new().with_stop(interrupt.flag());
        if let Some(filter) = &self.case {
            options = options.with_filter(filter);
        }
        let judged =
            judge(plan.harness(), &options, self.report_as(invocation.options.output), invocation.out, invocation.err);
        // The stores are cleaned up even if running the conformance cases failed.
        let cleared = runtime.block_on(plan.clear_up());
        let code = judged?;
        match cleared {
            Ok(()) if interrupt.came() => {
                _ = writeln!(invocation.err, "error: the run was interrupted");
                Ok(INTERRUPTED)
            }
            Ok(()) => Ok(code),
            Err(error) => {
                Err(CommandFailure::new(format!("the run is over, but not all of it could be removed: {error}")))
            }
        }
    }
}

fn locate(args: &Conformance, invocation: &Invocation<'_>) -> CommandResult<Location> {
    let location = invocation.drivers.parse(&args.url).map_err(|error| invocation.explain(&error))?;
    match location.place() {
        StorePlace::Memory => Ok(location),
        _ => Ok(invocation.locate(Some(&args.url))?.location),
    }
}

/// Fails if the filter matches no conformance case.
fn check_filter(args: &Conformance) -> CommandResult<()> {
    let Some(filter) = &args.case else { return Ok(()) };
    if conformance::cases().iter().any(|case| case.name().contains(filter.as_str())) {
        return Ok(());
    }
    Err(CommandFailure::new(format!("no case has {filter:?} in its name"))
        .hint("use part of a case name, such as B01_get_missing_key or W (all watch cases), or leave out --case"))
}

/// Runs the conformance cases, reports their results, and returns the exit code of the process.
fn judge(
    harness: impl Harness,
    options: &RunOptions,
    format: ReportFormat,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> CommandResult<u8> {
    let mut run = Run::new(harness, options).map_err(|error| CommandFailure::new(format!("cannot start: {error}")))?;
    let started = Instant::now();
    let mut reporter = reporter(format, run.cases());
    let progress = CaseProgress::new(run.len());
    let mut reports = Vec::with_capacity(run.len());
    progress.run_suspended(|| reporter.begin(out))?;
    while let Some(case) = run.cases().first() {
        progress.show_case(case.name());
        let Some(report) = run.next() else { break };
        progress.run_suspended(|| reporter.case(&report, out))?;
        progress.count(&report);
        reports.push(report);
    }
    progress.clear();
    let summary = RunSummary::of(&reports, started.elapsed());
    reporter.end(&reports, &summary, out, err)?;
    if summary.passed + summary.failed == 0 {
        _ = writeln!(err, "error: no case could run on this store");
        return Ok(1);
    }
    Ok(u8::from(summary.failed > 0))
}

/// Common prefix of all keys that conformance cases write into a store that already has keys. Each conformance run uses
/// its own longer prefix, which starts with `PREFIX`.
const PREFIX: &str = "/margay-conformance/";

/// Time limit of the first read, which finds out whether the store has keys.
const FIRST_READ_TIMEOUT: Duration = Duration::from_secs(15);

/// How the conformance cases may use the store.
#[derive(Debug)]
enum JudgePlan {
    /// Each conformance case gets a new store, which is removed after the case.
    New(Arc<NewStoresHarness>),
    /// The store has no keys, so all conformance cases run in it.
    Empty(Arc<InPlaceHarness<UrlHarness>>),
    /// All keys in the store are deleted, and then all conformance cases run in it.
    Erase(Arc<InPlaceHarness<UrlHarness>>),
    /// The store has keys, which must not be changed. Runs only the conformance cases that tolerate other keys in the
    /// store. The `String` is the common prefix of all keys that these conformance cases write.
    Beside(Arc<PrefixHarness<UrlHarness>>, String),
}

impl JudgePlan {
    /// Finds out whether the store has keys, and plans how to use the store. Deletes no keys yet: with [`Self::Erase`],
    /// each conformance case deletes them before it starts.
    async fn of(location: &Location, args: &Conformance) -> CommandResult<Self> {
        let erase = args.erase_everything.as_deref();
        let host = host(location);
        if let Some(typed) = erase {
            check_host(typed, host.as_deref(), location)?;
        }
        if *location.place() == StorePlace::Memory {
            return Ok(Self::New(Arc::new(NewStoresHarness::Memory(location.clone()))));
        }
        let site = UrlHarness(location.clone());
        let in_place = |found| Arc::new(InPlaceHarness::new(site.clone(), found));
        match read_contents(&site).await? {
            StoreContents::NoStore => {
                let folder = make_store_folder(location)?
                    .ok_or_else(|| CommandFailure::new(format!("there is no store at {location}")))?;
                Ok(Self::New(Arc::new(NewStoresHarness::Below(folder))))
            }
            _ if erase.is_some() => Ok(Self::Erase(in_place(ForeignKeys::Erase))),
            StoreContents::Nothing => Ok(Self::Empty(in_place(ForeignKeys::Leave))),
            StoreContents::Keys => {
                let prefix = format!("{PREFIX}{:016x}/", fastrand::u64(..));
                Ok(Self::Beside(Arc::new(PrefixHarness::new(site, prefix.as_str())), prefix))
            }
        }
    }

    fn harness(&self) -> Arc<dyn Harness> {
        match self {
            Self::New(stores) => stores.clone(),
            Self::Empty(in_place) | Self::Erase(in_place) => in_place.clone(),
            Self::Beside(beside, _) => beside.clone(),
        }
    }

    /// Removes the keys and stores that conformance cases left behind, including cases that were abandoned.
    async fn clear_up(&self) -> Result<(), BoxError> {
        match self {
            Self::New(stores) => Ok(stores.clear_up()?),
            Self::Empty(in_place) | Self::Erase(in_place) => in_place.clear_up().await,
            Self::Beside(beside, _) => beside.clear_up().await,
        }
    }
}

impl fmt::Display for JudgePlan {
    /// Writes one sentence that says what the conformance run does to the store.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::New(stores) => match &**stores {
                NewStoresHarness::Memory(_) => f.write_str("each case gets a new store"),
                NewStoresHarness::Below(_) => {
                    f.write_str("there is no store yet: each case gets a new one there, and all are removed")
                }
            },
            Self::Empty(_) => {
                f.write_str("it holds no key: all cases run in it that a URL allows, and it is emptied after each")
            }
            Self::Erase(_) => f.write_str("every key in it is deleted, before each case and at the end"),
            Self::Beside(_, prefix) => {
                write!(f, "it holds keys: only cases that can share it run, below {prefix}, and that is deleted")
            }
        }
    }
}

/// Whether the store at a URL exists, and whether it has keys.
enum StoreContents {
    NoStore,
    Nothing,
    Keys,
}

async fn read_contents(site: &UrlHarness) -> CommandResult<StoreContents> {
    let read = async {
        let mut opened = site.open().await?;
        let one = RangeRequest::new(Range::All).with_limit(1).with_content(Content::KeysOnly);
        let found = opened.store().range(one).await;
        let closed = opened.close_all().await;
        let found = found?;
        closed?;
        Ok(if found.count == 0 { StoreContents::Nothing } else { StoreContents::Keys })
    };
    match tokio::time::timeout(FIRST_READ_TIMEOUT, read).await {
        Ok(Err(error)) => read_error_contents(error),
        Ok(Ok(contents)) => Ok(contents),
        Err(_) => {
            Err(CommandFailure::new(format!("{} did not answer within {} s", site.0, FIRST_READ_TIMEOUT.as_secs()))
                .hint("check that the store is running, and that the address and port of the store are right"))
        }
    }
}

/// Decides whether a store exists and has keys, given the error of the first read from this store.
fn read_error_contents(error: kv::Error) -> CommandResult<StoreContents> {
    let hint = match error.kind() {
        ErrorKind::Missing => return Ok(StoreContents::NoStore),
        ErrorKind::Locked => "end the program that has the store open, or try again later",
        // If a store error has a detail, this detail already tells the user a fact or advice, so no hint is added to
        // it.
        _ if error.detail().is_some() => return Err(error.into()),
        ErrorKind::NotSent | ErrorKind::Timeout | ErrorKind::Disconnected { .. } => {
            "check that the store is running, and that the address and port of the store are right"
        }
        _ => return Err(error.into()),
    };
    Err(CommandFailure::from(error).hint(hint))
}

/// Creates the folder in which conformance cases create new stores. Fails if the folder for the new stores exists and
/// is not empty.
fn make_store_folder(location: &Location) -> CommandResult<Option<StoreFolder>> {
    let Some(path) = location.path() else { return Ok(None) };
    let occupied = match fs::read_dir(path) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(CommandFailure::new(format!("{}: {error}", path.display()))),
    };
    if occupied {
        return Err(CommandFailure::new(format!("there is no store at {location}, but the folder is not empty"))
            .hint("name a folder that is empty or does not exist"));
    }
    StoreFolder::create(location).map_err(|error| {
        let failure = CommandFailure::new(format!("cannot make {}: {error}", path.display()));
        match error.kind() {
            std::io::ErrorKind::NotFound => failure.hint("create the parent folder first"),
            _ => failure,
        }
    })
}

/// Returns the store's name that the user must repeat with `--erase-everything`: the hosts and ports, or the path.
fn host(location: &Location) -> Option<String> {
    match location.cluster() {
        Some(cluster) if cluster.endpoints.is_empty() => Some(cluster.discovery_srv.clone()),
        Some(_) => location.to_string().split_once("://").map(|(_, hosts)| hosts.to_owned()),
        None => location.path().map(|path| path.display().to_string()),
    }
}

/// Refuses to erase a store unless the user typed the store's name correctly.
fn check_host(typed: &str, host: Option<&str>, location: &Location) -> CommandResult<()> {
    match host {
        Some(host) if host == typed => Ok(()),
        Some(host) => Err(CommandFailure::new(format!(
            "--erase-everything names {typed:?}, which is not where the store at {location} is; nothing was deleted"
        ))
        .hint(format!("to allow margay to delete every key in the store, use: --erase-everything {host}"))),
        None => Err(CommandFailure::new(format!("{location} has nothing to erase"))
            .hint("run the command without --erase-everything")),
    }
}

#[cfg(test)]
mod tests {
    use conformance::broken;

    use super::*;
    use crate::judge::site::NewStoresHarness;

    /// Runs conformance cases on a faulty store in memory, which ignores compares. Returns the exit code and the
    /// printed report.
    fn of_a_broken_store(format: ReportFormat) -> (u8, String) {
        let broken = broken::broken().into_iter().find(|broken| broken.name() == "ignores compares").unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let options = RunOptions::new().with_filter("T0");
        let code = judge(
            broken.around(NewStoresHarness::Memory(stores::drivers().memory())),
            &options,
            format,
            &mut out,
            &mut err,
        )
        .unwrap();
        (code, String::from_utf8(out).unwrap())
    }

    #[test]
    fn exit_code_is_1_and_failures_last_when_store_is_broken() {
        let (code, text) = of_a_broken_store(ReportFormat::Table);
        assert_eq!(code, 1);
        let (lines, rest) = text.split_once("\n\n").unwrap();
        assert!(lines.lines().any(|line| line.split_whitespace().take(3).eq([
            "T09_all_compares_count",
            "T1",
            "failed"
        ])));
        let one = "T09_all_compares_count failed\n  rule T1:  All compares must hold; no compares hold.";
        assert!(rest.contains(one), "{text}");
        assert!(rest.contains("\n  expected: Failure\n  got:      Success\n"), "{text}");
        assert!(rest.trim_end().lines().last().unwrap().contains(" passed, "), "{text}");
    }

    #[test]
    fn json_report_says_expected_and_got() {
        let (code, text) = of_a_broken_store(ReportFormat::Json);
        assert_eq!(code, 1);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let cases = json["cases"].as_array().unwrap();
        let failed = cases.iter().find(|case| case["name"] == "T09_all_compares_count").unwrap();
        assert_eq!((&failed["rule"], &failed["result"]), (&"T1".into(), &"failed".into()));
        assert!(failed["reason"].as_str().unwrap().contains("expected Failure, got Success"), "{failed}");
    }

    #[test]
    fn junit_report_has_failure_with_rule() {
        let (code, text) = of_a_broken_store(ReportFormat::Junit);
        assert_eq!(code, 1);
        assert!(text.starts_with("<?xml ") && text.contains("<testsuite name=\"conformance\""), "{text}");
        assert!(text.contains("type=\"T1\">breaks rule T1: All compares must hold"), "{text}");
    }

    #[test]
    fn erase_confirmation_needs_full_host() {
        let host = |url: &str| host(&stores::at(url).unwrap());
        assert_eq!(host("etcd://10.0.0.1:2379").as_deref(), Some("10.0.0.1:2379"));
        assert_eq!(host("etcd+https://a:1,[fd00::1]:2").as_deref(), Some("a:1,[fd00::1]:2"));
        assert_eq!(host("redb:///srv/x").as_deref(), Some("/srv/x"));
        assert_eq!(host("memory:"), None);
    }
}
