//! Finds inconsistencies in IPAM documents, prints them as findings, and repairs them, for the command `margay ipam
//! check`.
//!
//! A check reads the store at one revision and inspects it in parts. While `ipam check` reads an embedded store in
//! parts, it may close and reopen the store between two parts. The repair of each finding is a single commit.

mod machine;
mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use clap::error::{ContextKind, ContextValue};
use clap::{Args, ValueEnum};
use datastore::Location;
use ipam_core::Error;
use ipam_operator::inspect::{
    AddressReporting, AllocatedAddress, Code, Finding, Inspection, Inspector, RepairResult, Severity, StoreCounts,
    Subject,
};
use kv::Deadline;
use serde::Serialize;
use time::OffsetDateTime;

pub(super) use self::report::{CheckReport, LeakedHandle, ReportedAddress, guid, revision};
use crate::command::{CommandAnswer, Format, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, printable, render};
use crate::store::{StoreAccess, StoreUse};
use crate::subcommands::etcd::find_in_cluster;
use crate::transfer::{Snapshot, TransferStop, retry_at_one_revision, run_blocking};

pub(crate) const HELP: &str = "\
Examples:
  margay ipam check
  margay ipam check --repair
  margay ipam check --repair HND-02 AFF-01 --apply
  margay ipam check --report first.json     # as calicoctl's -o first.json
  margay ipam check -o json | jq -r '.findings[] | [.code, .subject] | @tsv'

Nothing is locked, and nothing is changed without --repair --apply. No repair frees an address that is assigned.
The exit code is 0 if there is no problem, and 1 if there is one or something failed.";

/// Replaces calicoctl's `ipam check -o FILE` by `--report FILE`. In margay, `-o` selects the output format, so a value
/// of `-o` is taken as a report file only if it looks like a file name and is not an output format.
pub(crate) fn with_report(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let is_check = is_check(&args);
    let is_file = |text: &str| text.contains(['.', '/']) && Format::from_str(text, false).is_err();
    let mut at = 0;
    while is_check && at < args.len() {
        let text = args[at].to_str().unwrap_or_default();
        let next = args.get(at + 1).and_then(|next| next.to_str());
        let joined = text
            .strip_prefix("--output=")
            .or_else(|| text.strip_prefix("-o").map(|value| value.strip_prefix('=').unwrap_or(value)));
        if matches!(text, "-o" | "--output") {
            if next.is_some_and(is_file) {
                args[at] = "--report".into();
            }
            at += 1;
        } else if let Some(file) = joined.filter(|value| is_file(value)) {
            args[at] = format!("--report={file}").into();
        }
        at += 1;
    }
    args
}

/// True if the arguments of the command line run `ipam check`.
fn is_check(args: &[OsString]) -> bool {
    let ipam = args.iter().position(|arg| arg == "ipam");
    ipam.is_some_and(|ipam| args[ipam..].iter().any(|arg| arg == "check"))
}

/// Returns a hint about `--report` if clap has refused the value of `-o` in `ipam check` as an unknown output format.
pub(crate) fn report_hint(usage: &clap::Error, args: &[OsString]) -> Option<String> {
    let text = |kind| match usage.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let is_form = text(ContextKind::InvalidArg).is_some_and(|arg| arg.starts_with("--output"));
    let value = text(ContextKind::InvalidValue).filter(|_| is_form && is_check(args))?;
    Some(format!("hint: write a report to a file with: margay ipam check --report {value}"))
}

/// The arguments of `ipam check`.
#[derive(Debug, Args)]
pub(crate) struct Check {
    /// Print every assigned address
    #[arg(long)]
    show_all_ips: bool,

    /// Print every address of every node that is no longer registered
    #[arg(long)]
    show_problem_ips: bool,

    /// Write a report to this file, for margay ipam release --from-report
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,

    /// Show how all findings, or only findings with these codes, would be repaired
    #[arg(long, value_name = "CODE", num_args = 0..)]
    repair: Option<Vec<Code>>,

    /// Carry out the repairs that --repair shows
    #[arg(long, requires = "repair")]
    pub(crate) apply: bool,
}

/// Checks the store, repairs findings if the user asks for it, and reports the findings that remain.
#[async_trait(?Send)]
impl StoreCommand for Check {
    fn progress_text(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let wants_addresses = self.show_all_ips || self.show_problem_ips || self.report.is_some();
        let keep = if wants_addresses { AddressReporting::Addresses } else { AddressReporting::Findings };
        let mut inspected = inspect(at, keep).await?;
        let mut repairs = Vec::new();
        if let Some(codes) = &self.repair {
            if self.apply {
                (repairs, inspected) = apply_repairs(at, inspected, codes, keep).await?;
            } else {
                repairs = plan_repairs(&inspected.inspection, codes);
            }
        }
        let inspection = &mut inspected.inspection;
        let (others, mut notes) = machine::find_overlapping_networks(at, inspection).await;
        inspection.findings.extend(others);
        if at.location.is_shared() {
            match find_in_cluster(at, inspection.revision).await {
                Ok(found) => inspection.findings.extend(found),
                Err(failure) => {
                    notes.push(format!("the sizes of the etcd members could not be read: {}", failure.message()));
                }
            }
        }
        match host::all_routes() {
            Ok(all) => {
                let Inspection { pools, prefix_lengths, .. } = &*inspection;
                let found = machine::find_overlapping_routes(pools, prefix_lengths, &all, machine::is_bridge);
                inspection.findings.extend(found);
            }
            Err(error) => notes.push(format!("the routes of this machine could not be read: {error}")),
        }
        inspection.findings.sort_unstable();
        if let Some(file) = &self.report {
            report::write(file, &CheckReport::new(&inspected))?;
        }
        let answer = render_answer(self, at.location, &inspected.inspection, &repairs)?.notes(notes);
        Ok(match inspected.inspection.problems() {
            0 => answer,
            problems => answer.incomplete(problems_failure(problems, &inspected.inspection, self)),
        })
    }
}

/// Builds the error for problems that remain after the check; its hint is the user's next step. A problem that remains
/// sets the exit code to 1.
fn problems_failure(problems: usize, inspection: &Inspection, args: &Check) -> CommandFailure {
    let failure = CommandFailure::new(match problems {
        1 => "1 problem was found".to_owned(),
        _ => format!("{problems} problems were found"),
    });
    let mendable = inspection.findings.iter().filter(|finding| finding.is_problem() && finding.mendable).count();
    match (mendable, args.repair.is_some(), args.apply) {
        (0, ..) => {
            failure.hint("none of these problems can be repaired automatically; follow the advice in the column MEND")
        }
        (_, false, _) => failure.hint(format!(
            "problems that can be repaired automatically: {mendable}; see how, without changing anything, with: \
             margay ipam check --repair"
        )),
        (_, true, false) => failure.hint("carry out the possible repairs with: margay ipam check --repair --apply"),
        (_, true, true) => {
            failure.hint("run the check again: other processes have changed the store, or a repair failed")
        }
    }
}

pub(super) struct StoreInspection {
    pub(super) inspection: Inspection,
    pub(super) store: String,
}

pub(super) async fn inspect(at: StoreAccess<'_>, keep: AddressReporting) -> CommandResult<StoreInspection> {
    retry_at_one_revision(at, async || inspect_once(at, keep).await).await
}

async fn inspect_once(at: StoreAccess<'_>, keep: AddressReporting) -> Result<StoreInspection, TransferStop> {
    let mut snapshot = Snapshot::of(at, Inspector::ranges());
    let mut inspector = Inspector::new(OffsetDateTime::now_utc(), keep);
    let mut read = snapshot.batch().await?;
    while let Some(kvs) = read {
        // One part of the store is inspected on another thread while the next part is read.
        let inspect = run_blocking(move || {
            kvs.iter().for_each(|kv| inspector.add(kv));
            Ok(inspector)
        });
        let (inspected, next) = futures::join!(inspect, snapshot.batch());
        (inspector, read) = (inspected?, next?);
    }
    let store = snapshot.identity().map(|store| store.id.clone()).unwrap_or_default();
    Ok(StoreInspection { inspection: inspector.finish(snapshot.revision()), store })
}

/// Time limit of the repair of one finding.
const REPAIR_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of commits before the store is closed for a moment, so that plugins can use the store.
const MAX_COMMITS_PER_OPENING: usize = 16;
/// Maximum number of rounds in which findings are repaired and the store is checked again. A repair can uncover another
/// inconsistency, which is repaired in the next round.
const MAX_REPAIR_ROUNDS: usize = 4;
/// Minimum age of a finding in a cluster before the finding is repaired. Calico changes several keys in separate
/// writes, all within `MIN_FINDING_AGE`, so a younger finding may only be an unfinished change. A repair does not
/// change keys that were written after the inspection.
const MIN_FINDING_AGE: Duration = Duration::from_secs(3);

/// A planned or completed repair of a finding.
#[derive(Clone, Debug, Serialize)]
struct Repair {
    code: Code,
    subject: String,
    /// Text that describes the finding to be repaired.
    what: String,
    /// Text that describes what the repair does.
    mend: &'static str,
    outcome: RepairOutcome,
    /// The error with which the repair failed, if it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum RepairOutcome {
    /// The repair was planned, but not attempted.
    Planned,
    Mended,
    /// The finding had changed or did not exist any more, often because of another repair.
    Changed,
    Failed,
}

impl RepairOutcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Planned => "would be mended",
            Self::Mended => "mended",
            Self::Changed => "gone or changed",
            Self::Failed => "failed",
        }
    }
}

impl Repair {
    fn new(finding: &Finding, outcome: RepairOutcome, error: Option<&Error>) -> Self {
        Self {
            code: finding.code,
            subject: finding.subject.to_string(),
            what: finding.what.clone(),
            mend: finding.mend(),
            outcome,
            error: error.map(ToString::to_string),
        }
    }
}

/// Returns the findings that can be repaired and whose code is in `codes`. If `codes` is empty, returns all findings
/// that can be repaired.
fn select_findings<'i>(inspection: &'i Inspection, codes: &[Code]) -> impl Iterator<Item = &'i Finding> {
    let wanted = move |code: Code| codes.is_empty() || codes.contains(&code);
    inspection.findings.iter().filter(|finding| finding.mendable).filter(move |finding| wanted(finding.code))
}

/// Plans the repairs of the selected findings, but changes nothing.
fn plan_repairs(inspection: &Inspection, codes: &[Code]) -> Vec<Repair> {
    select_findings(inspection, codes).map(|finding| Repair::new(finding, RepairOutcome::Planned, None)).collect()
}

/// Repairs findings and checks the store again, until no finding can be repaired or [`MAX_REPAIR_ROUNDS`] rounds are
/// over. Returns all repairs, and the result of the last inspection.
async fn apply_repairs(
    at: StoreAccess<'_>,
    mut inspected: StoreInspection,
    codes: &[Code],
    keep: AddressReporting,
) -> CommandResult<(Vec<Repair>, StoreInspection)> {
    let mut repairs: Vec<Repair> = Vec::new();
    for _ in 0..MAX_REPAIR_ROUNDS {
        let due: Vec<Finding> = select_findings(&inspected.inspection, codes).cloned().collect();
        if due.is_empty() {
            break;
        }
        if at.location.is_shared() {
            tokio::time::sleep(MIN_FINDING_AGE).await;
        }
        let mut some = Vec::new();
        for batch in due.chunks(MAX_COMMITS_PER_OPENING) {
            some.extend(mend(at, &inspected.inspection, batch).await?);
        }
        settle(&mut some);
        let came_further = some.iter().any(|repair| repair.outcome == RepairOutcome::Mended);
        repairs.extend(some);
        inspected = inspect(at, keep).await?;
        if !came_further {
            break;
        }
    }
    Ok((repairs, inspected))
}

/// If a finding vanished because another repair of the same subject succeeded, marks the finding's repair as
/// successful. A single repair often removes several findings.
fn settle(repairs: &mut [Repair]) {
    let mended: BTreeSet<String> =
        repairs.iter().filter(|one| one.outcome == RepairOutcome::Mended).map(|one| one.subject.clone()).collect();
    for repair in repairs.iter_mut().filter(|one| one.outcome == RepairOutcome::Changed) {
        if mended.contains(&repair.subject) {
            repair.outcome = RepairOutcome::Mended;
        }
    }
}

/// Opens the store, repairs findings, and closes the store.
async fn mend(at: StoreAccess<'_>, inspection: &Inspection, findings: &[Finding]) -> CommandResult<Vec<Repair>> {
    at.with_operator(StoreUse::Release, async |operator| {
        let mut done = Vec::new();
        for finding in findings {
            done.push(match operator.mend(finding, inspection.revision, Deadline::after(REPAIR_TIMEOUT)).await {
                Ok(RepairResult::Done) => Repair::new(finding, RepairOutcome::Mended, None),
                Ok(RepairResult::Changed) => Repair::new(finding, RepairOutcome::Changed, None),
                Err(Error::Store(error)) => return Err(at.explain(error)),
                Err(error) => Repair::new(finding, RepairOutcome::Failed, Some(&error)),
            });
        }
        Ok(done)
    })
    .await
}

/// Maximum number of findings with the same code that a table shows; JSON always has all findings.
const MAX_SHOWN_FINDINGS: usize = 50;

#[derive(Serialize)]
struct CheckJson<'a> {
    store: String,
    revision: i64,
    problems: usize,
    counts: StoreCounts,
    findings: Vec<FindingJson<'a>>,
    repairs: &'a [Repair],
    #[serde(skip_serializing_if = "Option::is_none")]
    addresses: Option<Vec<AllocatedAddressJson<'a>>>,
}

#[derive(Serialize)]
struct FindingJson<'a> {
    code: Code,
    severity: Severity,
    subject: &'a Subject,
    what: &'a str,
    mend: &'static str,
    repairable: bool,
}

#[derive(Serialize)]
struct AllocatedAddressJson<'a> {
    ip: IpAddr,
    state: &'static str,
    handle: Option<&'a str>,
    attributes: &'a BTreeMap<String, String>,
    borrowed: bool,
}

impl<'a> FindingJson<'a> {
    fn new(finding: &'a Finding) -> Self {
        let Finding { code, subject, what, mendable, .. } = finding;
        let severity = code.severity();
        Self { code: *code, severity, subject, what, mend: finding.mend(), repairable: *mendable }
    }
}

fn render_answer(
    args: &Check,
    location: &Location,
    inspection: &Inspection,
    repairs: &[Repair],
) -> CommandResult<CommandAnswer> {
    let shown: Option<Vec<&AllocatedAddress>> = match (args.show_all_ips, args.show_problem_ips) {
        (true, _) => Some(inspection.allocations.iter().collect()),
        (false, true) => Some(inspection.allocations.iter().filter(|address| address.node_gone).collect()),
        (false, false) => None,
    };
    let mut text = format!("Checking IPAM for inconsistencies: {location}, revision {}\n\n", inspection.revision);
    write_sections(&mut text, inspection);
    for address in shown.iter().flatten() {
        _ = writeln!(text, "  {}", address_line(address));
    }
    write_findings(&mut text, &inspection.findings);
    if args.repair.is_some() {
        report_repairs(&mut text, repairs);
    }
    let problems = inspection.problems();
    _ = writeln!(text, "Check complete; found {problems} problems.");
    let json = CheckJson {
        store: location.to_string(),
        revision: inspection.revision.get(),
        problems,
        counts: inspection.counts,
        findings: inspection.findings.iter().map(FindingJson::new).collect(),
        repairs,
        addresses: shown.map(|shown| shown.into_iter().map(address_json).collect()),
    };
    CommandAnswer::new(text, &json)
}

fn write_sections(text: &mut String, inspection: &Inspection) {
    let StoreCounts { reservations, nodes, blocks, affinities, handles, endpoints, .. } = inspection.counts;
    let StoreCounts { held, cooling, borrowed, of_gone_nodes, .. } = inspection.counts;
    _ = writeln!(text, "Found {} IP pools:", inspection.pools.len());
    for (name, cidr) in &inspection.pools {
        _ = writeln!(text, "  {cidr} ({})", printable(name));
    }
    _ = writeln!(text, "Found {reservations} reservations and {nodes} registered nodes.");
    _ = writeln!(text, "Found {blocks} IPAM blocks, {affinities} affinities and {handles} handles.");
    if endpoints > 0 {
        _ = writeln!(text, "Found {endpoints} workload endpoints.");
    }
    _ = writeln!(text, "IPAM blocks record {} allocations:", held + cooling);
    _ = writeln!(text, "  held: {held} (borrowed: {borrowed}, for nodes that are not registered: {of_gone_nodes})");
    _ = writeln!(text, "  cooling down: {cooling}");
}

fn write_findings(text: &mut String, findings: &[Finding]) {
    if findings.is_empty() {
        text.push('\n');
        return;
    }
    let columns = [Column::Text("CODE"), Column::Text("SUBJECT"), Column::Text("WHAT"), Column::Text("MEND")];
    let mut of_code: BTreeMap<Code, usize> = BTreeMap::new();
    let mut rows = Vec::new();
    for finding in findings {
        let count = of_code.entry(finding.code).or_default();
        *count += 1;
        if *count <= MAX_SHOWN_FINDINGS {
            rows.push(vec![
                finding.code.to_string(),
                printable(&finding.subject.to_string()),
                printable(&finding.what),
                match finding.mendable {
                    true => format!("--repair {}", finding.mend()),
                    false => finding.mend().to_owned(),
                },
            ]);
        }
    }
    _ = write!(text, "\n{}", render(&columns, &rows));
    for (code, count) in of_code.into_iter().filter(|(_, count)| *count > MAX_SHOWN_FINDINGS) {
        _ = writeln!(text, "... and {} more of {code}; -o json has them all", count - MAX_SHOWN_FINDINGS);
    }
}

fn report_repairs(text: &mut String, repairs: &[Repair]) {
    if repairs.is_empty() {
        text.push_str("There was nothing to mend.\n");
        return;
    }
    let columns = [Column::Text("CODE"), Column::Text("SUBJECT"), Column::Text("REPAIR"), Column::Text("OUTCOME")];
    let row = |repair: &Repair| {
        let outcome = match &repair.error {
            Some(error) => format!("{}: {}", repair.outcome.as_str(), printable(error)),
            None => repair.outcome.as_str().to_owned(),
        };
        vec![repair.code.to_string(), printable(&repair.subject), repair.mend.to_owned(), outcome]
    };
    let rows: Vec<_> = repairs.iter().take(MAX_SHOWN_FINDINGS).map(row).collect();
    text.push_str(&render(&columns, &rows));
    if repairs.len() > MAX_SHOWN_FINDINGS {
        _ = writeln!(text, "... and {} more; -o json has them all", repairs.len() - MAX_SHOWN_FINDINGS);
    }
}

/// Describes an assigned address in one line, in calicoctl's format.
fn address_line(address: &AllocatedAddress) -> String {
    let extra: Vec<String> = address.attributes.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let handle = address.handle.as_deref().unwrap_or("<none>");
    let borrowed = if address.borrowed { " (borrowed)" } else { "" };
    printable(&format!(
        "{} {}{borrowed}; attrs Main:{handle} Extra:{}",
        address.ip,
        address_state(address),
        extra.join(",")
    ))
}

fn address_json(address: &AllocatedAddress) -> AllocatedAddressJson<'_> {
    let AllocatedAddress { ip, handle, attributes, borrowed, .. } = address;
    AllocatedAddressJson {
        ip: *ip,
        state: address_state(address),
        handle: handle.as_deref(),
        attributes,
        borrowed: *borrowed,
    }
}

fn address_state(address: &AllocatedAddress) -> &'static str {
    match (address.cooling, address.node_gone) {
        (true, _) => "cooling down",
        (_, true) => "leaked",
        (false, false) => "in use",
    }
}
