//! The output of a check.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use datastore::Location;
use ipam_operator::inspect::{AllocatedAddress, Code, Counts, Finding, Inspection, Severity, Subject};
use serde::Serialize;

use super::Check;
use super::repair::Repair;
use crate::answer::Answer;
use crate::error::Result;
use crate::output::{Column, printable, render};

/// The most findings of one code in a table; JSON has them all.
const SHOWN: usize = 50;

#[derive(Serialize)]
struct Json<'a> {
    store: String,
    revision: i64,
    problems: usize,
    counts: Counts,
    findings: Vec<JsonFinding<'a>>,
    repairs: &'a [Repair],
    #[serde(skip_serializing_if = "Option::is_none")]
    addresses: Option<Vec<JsonAddress<'a>>>,
}

#[derive(Serialize)]
struct JsonFinding<'a> {
    code: Code,
    severity: Severity,
    subject: &'a Subject,
    what: &'a str,
    mend: &'static str,
    repairable: bool,
}

#[derive(Serialize)]
struct JsonAddress<'a> {
    ip: IpAddr,
    state: &'static str,
    handle: Option<&'a str>,
    attributes: &'a BTreeMap<String, String>,
    borrowed: bool,
}

impl<'a> JsonFinding<'a> {
    fn new(finding: &'a Finding) -> Self {
        let Finding { code, subject, what, mendable, .. } = finding;
        let severity = code.severity();
        Self { code: *code, severity, subject, what, mend: finding.mend(), repairable: *mendable }
    }
}

/// The parts of a check's output.
pub(super) fn answer(args: &Check, location: &Location, inspection: &Inspection, repairs: &[Repair]) -> Result<Answer> {
    let shown: Option<Vec<&AllocatedAddress>> = match (args.show_all_ips, args.show_problem_ips) {
        (true, _) => Some(inspection.allocations.iter().collect()),
        (false, true) => Some(inspection.allocations.iter().filter(|address| address.node_gone).collect()),
        (false, false) => None,
    };
    let mut text = format!("Checking IPAM for inconsistencies: {location}, revision {}\n\n", inspection.revision);
    sections(&mut text, inspection);
    for address in shown.iter().flatten() {
        _ = writeln!(text, "  {}", line(address));
    }
    findings(&mut text, &inspection.findings);
    if args.repair.is_some() {
        report_repairs(&mut text, repairs);
    }
    let problems = inspection.problems();
    _ = writeln!(text, "Check complete; found {problems} problems.");
    let json = Json {
        store: location.to_string(),
        revision: inspection.revision.get(),
        problems,
        counts: inspection.counts,
        findings: inspection.findings.iter().map(JsonFinding::new).collect(),
        repairs,
        addresses: shown.map(|shown| shown.into_iter().map(in_json).collect()),
    };
    Answer::new(text, &json)
}

fn sections(text: &mut String, inspection: &Inspection) {
    let Counts { reservations, nodes, blocks, affinities, handles, endpoints, .. } = inspection.counts;
    let Counts { held, cooling, borrowed, of_gone_nodes, .. } = inspection.counts;
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

fn findings(text: &mut String, findings: &[Finding]) {
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
        if *count <= SHOWN {
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
    for (code, count) in of_code.into_iter().filter(|(_, count)| *count > SHOWN) {
        _ = writeln!(text, "... and {} more of {code}; -o json has them all", count - SHOWN);
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
    let rows: Vec<_> = repairs.iter().take(SHOWN).map(row).collect();
    text.push_str(&render(&columns, &rows));
    if repairs.len() > SHOWN {
        _ = writeln!(text, "... and {} more; -o json has them all", repairs.len() - SHOWN);
    }
}

/// An address in calicoctl's words.
fn line(address: &AllocatedAddress) -> String {
    let extra: Vec<String> = address.attributes.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let handle = address.handle.as_deref().unwrap_or("<none>");
    let borrowed = if address.borrowed { " (borrowed)" } else { "" };
    printable(&format!("{} {}{borrowed}; attrs Main:{handle} Extra:{}", address.ip, state(address), extra.join(",")))
}

fn in_json(address: &AllocatedAddress) -> JsonAddress<'_> {
    let AllocatedAddress { ip, handle, attributes, borrowed, .. } = address;
    JsonAddress { ip: *ip, state: state(address), handle: handle.as_deref(), attributes, borrowed: *borrowed }
}

fn state(address: &AllocatedAddress) -> &'static str {
    match (address.cooling, address.node_gone) {
        (true, _) => "cooling down",
        (_, true) => "leaked",
        (false, false) => "in use",
    }
}
