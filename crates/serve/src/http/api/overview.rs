//! Answers requests for the overview of all pools and nodes, and for the findings of a check.

use std::cmp::Reverse;

use hyper::StatusCode;
use ipam_core::census::{AddressUse, PoolCensus};
use ipam_core::net::Count;
use ipam_core::quarantine::{QuarantineRow, quarantine_rows};
use ipam_operator::QuotaRow;
use ipam_operator::inspect::{AddressReporting, Code, Finding, Severity, StoreCounts, Subject};
use kv::Deadline;
use serde::Serialize;

use super::json_text_response;
use crate::http::PageContext;
use crate::http::answer::{ANSWER_TTL, HttpError, HttpResponse, READ_TIMEOUT, json};

const MAX_NODES: usize = 100;
const MAX_QUOTAS: usize = 20;

#[derive(Serialize)]
struct Overview {
    revision: i64,
    pools: Vec<PoolRow>,
    nodes: Vec<NodeRow>,
    nodes_total: usize,
    /// The quotas that are closest to their limits.
    quotas: Vec<QuotaRow>,
    quotas_total: usize,
    /// The number of blocks outside of all pools.
    orphaned: usize,
    /// The number of addresses held for nodes that are no longer registered.
    gone: usize,
    quarantined: Vec<QuarantineRow>,
}

#[derive(Serialize)]
struct PoolRow {
    name: String,
    cidr: String,
    block_size: u8,
    /// The prefix length of a pool that assigns whole prefixes; absent for a pool that assigns addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_length: Option<u8>,
    enabled: bool,
    capacity: Count,
    used: usize,
    borrowed: usize,
    resting: usize,
    reserved: Count,
    free: Count,
    blocks: usize,
    /// The number of the pool's blocks without a free address.
    full: usize,
}

#[derive(Serialize)]
struct NodeRow {
    name: String,
    blocks: usize,
    used: usize,
    registered: bool,
}

impl PoolRow {
    fn of(census: &PoolCensus) -> Self {
        let PoolCensus { pool, usage, blocks } = census;
        let count = |wanted| blocks.iter().map(|block| block.count(wanted)).sum::<usize>();
        let (used, borrowed, resting) =
            (count(AddressUse::Used), count(AddressUse::Borrowed), count(AddressUse::InCooldown));
        let free = usage.available;
        // In the web page's usage bar, an address that is assigned and also reserved counts as assigned.
        let held = [used, borrowed, resting].map(Count::from).into_iter().fold(free, Count::plus);
        Self {
            name: pool.name().to_owned(),
            cidr: pool.cidr().to_string(),
            block_size: pool.block_size(),
            prefix_length: pool.prefix_length(),
            enabled: pool.is_enabled(),
            capacity: usage.capacity,
            used,
            borrowed,
            resting,
            reserved: usage.capacity.minus(held),
            free,
            blocks: blocks.len(),
            full: blocks.iter().filter(|block| block.count(AddressUse::Free) == 0).count(),
        }
    }
}

pub(super) async fn overview(page: &PageContext) -> Result<HttpResponse, HttpError> {
    let census = page.cache.census(page.operator.ipam()).await?;
    let mut nodes: Vec<NodeRow> = census
        .nodes
        .iter()
        .map(|(name, node)| NodeRow {
            name: name.clone(),
            blocks: node.blocks,
            used: node.used,
            registered: census.registered.is_empty() || census.registered.contains(name),
        })
        .collect();
    nodes.sort_by(|one, other| other.used.cmp(&one.used).then_with(|| one.name.cmp(&other.name)));
    let nodes_total = nodes.len();
    nodes.truncate(MAX_NODES);
    let mut quotas: Vec<QuotaRow> = census.quotas.iter().map(QuotaRow::from).collect();
    quotas.sort_by_key(|quota| Reverse(quota.percent));
    quotas.truncate(MAX_QUOTAS);
    let overview = Overview {
        revision: census.revision.get(),
        pools: census.pools.iter().map(PoolRow::of).collect(),
        nodes,
        nodes_total,
        quotas,
        quotas_total: census.quotas.len(),
        orphaned: census.orphaned.len(),
        gone: census.of_gone_nodes(),
        quarantined: quarantine_rows(census.quarantined.clone()),
    };
    Ok(json(StatusCode::OK, &overview))
}

const MAX_FINDINGS: usize = 300;

#[derive(Serialize)]
struct ProblemReport<'a> {
    revision: i64,
    problems: usize,
    total: usize,
    counts: StoreCounts,
    findings: Vec<ProblemRow<'a>>,
}

#[derive(Serialize)]
struct ProblemRow<'a> {
    code: Code,
    severity: Severity,
    meaning: &'static str,
    subject: String,
    /// The view of the web page that shows the subject of the finding.
    link: Option<PageLink>,
    what: &'a str,
    mend: &'static str,
    repairable: bool,
    command: Option<String>,
}

#[derive(Serialize)]
struct PageLink {
    kind: &'static str,
    name: String,
}

impl PageLink {
    fn of(subject: &Subject) -> Option<Self> {
        let (kind, name) = match subject {
            Subject::Block(cidr) | Subject::Affinity(_, cidr) => ("block", cidr.to_string()),
            Subject::Address(ip) => ("address", ip.to_string()),
            Subject::Node(name) => ("node", name.clone()),
            Subject::Pool(name) => ("pool", name.clone()),
            Subject::Handle(id) => ("container", id.clone()),
            _ => return None,
        };
        Some(Self { kind, name })
    }
}

pub(super) async fn problems(page: &PageContext) -> Result<HttpResponse, HttpError> {
    let read = page.cache.read_exclusively(inspect_store(page));
    Ok(json_text_response(&page.cache.problems.get("", ANSWER_TTL, read).await?))
}

async fn inspect_store(page: &PageContext) -> Result<String, HttpError> {
    let mut inspection = page.operator.inspect(AddressReporting::Findings, Deadline::after(READ_TIMEOUT)).await?;
    let (problems, total) = (inspection.problems(), inspection.findings.len());
    // Findings that are problems come before findings that only inform.
    inspection.findings.sort_by_key(|finding| !finding.is_problem());
    let store = quoted(&page.about.store);
    let reported = ProblemReport {
        revision: inspection.revision.get(),
        problems,
        total,
        counts: inspection.counts,
        findings: inspection.findings.iter().take(MAX_FINDINGS).map(|finding| problem(finding, &store)).collect(),
    };
    serde_json::to_string(&reported).map_err(HttpError::unavailable)
}

fn problem<'a>(finding: &'a Finding, store: &str) -> ProblemRow<'a> {
    let Finding { code, subject, what, mendable, .. } = finding;
    ProblemRow {
        code: *code,
        severity: code.severity(),
        meaning: code.meaning(),
        subject: subject.to_string(),
        link: PageLink::of(subject),
        what,
        mend: finding.mend(),
        repairable: *mendable,
        command: command(finding, store),
    }
}

/// Returns the command that repairs a finding. If only a person can repair the finding, returns a description of the
/// person's next step.
fn command(finding: &Finding, store: &str) -> Option<String> {
    if finding.mendable {
        return Some(format!("margay ipam check --store {store} --repair {} --apply", finding.code));
    }
    Some(match (finding.code, &finding.subject) {
        (Code::HolderGone, _) => format!("margay ipam check --store {store} --report report.json"),
        (Code::NoHandle, Subject::Address(ip)) => format!("margay ipam release --store {store} --ip {ip}"),
        (_, Subject::Address(ip)) => format!("margay ipam history {ip} --store {store}"),
        (_, Subject::Pool(_)) => format!("margay pool list --store {store}"),
        (_, Subject::Reservation(_)) => format!("margay reservation list --store {store}"),
        (_, Subject::Block(_)) => format!("margay ipam show --store {store} --show-blocks"),
        _ => return None,
    })
}

/// Quotes a text so that a shell reads the text as one word.
fn quoted(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b":/.,_+@%-=".contains(&byte);
    if text.bytes().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_name_is_one_word_for_shell() {
        assert_eq!(quoted("etcd://a:2379,b:2379"), "etcd://a:2379,b:2379");
        assert_eq!(quoted("etcd://[::1]:2379"), "'etcd://[::1]:2379'");
        assert_eq!(quoted("redb:///a b/it's;$(x)"), "'redb:///a b/it'\\''s;$(x)'");
    }
}
