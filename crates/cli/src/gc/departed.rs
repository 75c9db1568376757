//! Frees all blocks and addresses that departed nodes hold, and reports what was freed, for `margay gc --gone` and
//! `margay gc --free`.
//!
//! For each departed node, the command first deletes the node's workload endpoints, then releases its addresses, and
//! then releases its blocks. Because endpoints are deleted first, no container gets an address that a workload endpoint
//! still lists. After an interruption, running `margay gc` again with the same arguments continues the work. Each
//! commit has two guards: its addresses must not have changed since they were read, and the node must still not be
//! registered.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::IpAddr;

use datastore::Location;
use ipam_core::gc::{
    DepartedNode, DepartedNodes, Evidence, Hold, KnownNodes, MAX_ENDPOINTS_PER_COMMIT, NodeEndpoint, batches,
};
use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;
use tokio::runtime::Runtime;

use super::report::{EndpointRow, assignment_time, count_addresses, count_endpoints};
use super::{Gc, MAX_COMMITS_PER_OPENING, Machine, STORE_CALL_TIMEOUT, lists, own_names, survey};
use crate::command::{CommandAnswer, Invocation, runtime};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, printable, render};
use crate::store::{StoreAccess, StoreUse};

/// Finds the departed nodes and reports the endpoints, addresses and blocks that they hold. With `--apply`, frees the
/// endpoints, addresses and blocks of the departed nodes.
pub(super) fn run(args: &Gc, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
    let list = args.nodes.as_deref().map(|path| lists::read_nodes(path, args.empty)).transpose()?;
    let location = invocation.choose()?.location;
    let at = invocation.store_at(&location);
    let (machine, own) = (Machine::of(None)?, own_names());
    let runtime = runtime()?;
    let named = args.free.then(|| args.node.clone().unwrap_or_default());
    let (departed_nodes, mut skipped) = match &named {
        Some(node) => (read_named_node(at, &runtime, node, &own)?, Vec::new()),
        None => read_departed_nodes(at, &runtime, list.as_ref(), &own)?,
    };
    // The machine is scanned after the store is read, so that an address that is assigned in the meantime is no
    // candidate for freeing.
    let evidence = machine.whole_evidence()?;
    let mut reports = Vec::new();
    for departed in departed_nodes.values() {
        match why_this_machine(departed, &evidence) {
            Some(why) if named.is_some() => return Err(this_machine_failure(&departed.node, &why)),
            Some(why) => skipped.push(SkippedNode { node: departed.node.clone(), why }),
            None => reports.push((departed, DepartedNodeReport::of(&location, departed))),
        }
    }
    if args.apply {
        for (departed, report) in &mut reports {
            if let Err(failure) = runtime.block_on(free(at, departed, report)) {
                failure.print(invocation.err);
                report.failed = true;
            }
        }
    }
    let stores: Vec<DepartedNodeReport> = reports.into_iter().map(|(_, report)| report).collect();
    let failed = stores.iter().any(|report| report.failed);
    invocation.print(DepartedReport { applied: args.apply, node: named, stores, skipped }.answer()?)?;
    match failed {
        true => Err(CommandFailure::new("not everything could be freed; see above")
            .hint("run the command again to free the remaining addresses")),
        false => Ok(0),
    }
}

type DepartedNodesByName = BTreeMap<String, DepartedNode>;

/// Reads the endpoints, addresses and blocks that the node named `node` holds in the store. Fails if `node` is still
/// registered or is this machine.
fn read_named_node(
    at: StoreAccess<'_>,
    runtime: &Runtime,
    node: &str,
    own: &BTreeSet<String>,
) -> CommandResult<DepartedNodesByName> {
    let found = runtime.block_on(survey(at, |_, name| name == node))?;
    if found.known.registered.contains(node) {
        return Err(CommandFailure::new(format!(
            "node {} is registered in the store; nothing was freed",
            printable(node)
        ))
        .hint(format!(
            "if node {0} is gone for good, delete the node first: margay delete node {0}",
            printable(node)
        )));
    }
    if own.contains(node) || found.known.pinned.as_deref() == Some(node) {
        return Err(this_machine_failure(node, "it is the name of this machine"));
    }
    Ok(found.departed)
}

/// Reads the endpoints, addresses and blocks that all departed nodes hold in the store. Returns the departed nodes
/// whose addresses may be freed, and the departed nodes that `margay gc` skips, with reasons.
fn read_departed_nodes(
    at: StoreAccess<'_>,
    runtime: &Runtime,
    list: Option<&BTreeSet<String>>,
    own: &BTreeSet<String>,
) -> CommandResult<(DepartedNodesByName, Vec<SkippedNode>)> {
    let wanted = |known: &KnownNodes, node: &str| {
        !known.registered.contains(node)
            && known.pinned.as_deref() != Some(node)
            && list.is_none_or(|list| !list.contains(node))
    };
    let DepartedNodes { known, nodes, departed: mut departed_nodes } = runtime.block_on(survey(at, wanted))?;
    let ours: BTreeSet<&String> = own.iter().chain(&known.pinned).collect();
    match list {
        None if known.registered.is_empty() => {
            return Err(CommandFailure::new(
                "no node is registered in the store, so nobody can tell which are gone; nothing was freed",
            )
            .hint(
                "use --nodes FILE with a list of the existing nodes, or free the addresses of one node with: \
                 margay gc --node NAME --free",
            ));
        }
        Some(list) => check_list(list, &known, &nodes, &ours)?,
        None => {}
    }
    let mut skipped = Vec::new();
    for name in own {
        if departed_nodes.remove(name).is_some() {
            skipped.push(SkippedNode { node: name.clone(), why: "it is the name of this machine".to_owned() });
        }
    }
    Ok((departed_nodes, skipped))
}

/// Refuses a list of nodes that was probably made on another cluster. The list is refused if none of its nodes is
/// registered in the store, or if it lacks this machine although this machine is a node of the store.
fn check_list(
    list: &BTreeSet<String>,
    known: &KnownNodes,
    nodes: &BTreeSet<String>,
    ours: &BTreeSet<&String>,
) -> CommandResult<()> {
    let refused = |what: String| {
        CommandFailure::new(format!("{what}; nothing was freed"))
            .hint("check that the list names the nodes of this store's cluster, spelled as in the store")
    };
    let member = ours.iter().find(|name| nodes.contains(**name));
    if let Some(name) = member.filter(|_| !ours.iter().any(|name| list.contains(*name))) {
        return Err(refused(format!("the list of nodes lacks this very machine, {}", printable(name))));
    }
    if !known.registered.is_empty() && known.registered.is_disjoint(list) {
        let count = known.registered.len();
        return Err(refused(format!("the list of nodes has none of those that are registered in the store ({count})")));
    }
    Ok(())
}

/// Returns the evidence that a departed node is this machine under another name, or `None` without such evidence.
fn why_this_machine(departed: &DepartedNode, evidence: &Evidence) -> Option<String> {
    let of_endpoints = departed.endpoints.iter().flat_map(|endpoint| &endpoint.addresses);
    let mut units = departed.holds.iter().map(|hold| hold.unit).chain(of_endpoints.map(|ip| IpNet::from(*ip)));
    if let Some(unit) = units.find(|unit| evidence.is_on_an_interface(*unit)) {
        return Some(format!("an interface of this machine has its address {}", unit.addr()));
    }
    let of_this_boot = departed.holds.iter().find(|hold| hold.boot() == Some(evidence.boot.as_str()))?;
    Some(format!("its address {} was given in this very boot of this machine", of_this_boot.address))
}

fn this_machine_failure(node: &str, why: &str) -> CommandFailure {
    let node = printable(node);
    CommandFailure::new(format!("node {node} is this very machine: {why}; nothing was freed")).hint(format!(
        "free the unused addresses of this machine with margay gc --boot or --netns, or move all of its addresses to \
         another node with: margay gc --node {node} --move-to NAME"
    ))
}

/// Frees the addresses of a node, and releases the node's blocks. The store is closed for a moment after every
/// [`MAX_COMMITS_PER_OPENING`] commits, so that containers can start.
async fn free(at: StoreAccess<'_>, departed: &DepartedNode, report: &mut DepartedNodeReport) -> CommandResult<()> {
    let endpoints: Vec<&[NodeEndpoint]> = departed.endpoints.chunks(MAX_ENDPOINTS_PER_COMMIT).collect();
    for some in endpoints.chunks(MAX_COMMITS_PER_OPENING) {
        at.with_operator(StoreUse::Release, async |operator| {
            for batch in some {
                let deleted = operator
                    .ipam()
                    .delete_endpoints_of_gone(&departed.node, batch, Deadline::after(STORE_CALL_TIMEOUT))
                    .await;
                report.deleted_endpoints.extend(deleted.map_err(escaped_failure)?.into_iter().map(EndpointRow::from));
            }
            Ok(())
        })
        .await?;
    }
    for some in batches(&departed.holds).chunks(MAX_COMMITS_PER_OPENING) {
        at.with_operator(StoreUse::Release, async |operator| {
            for batch in some {
                let freed = operator
                    .ipam()
                    .free_of_gone(&departed.node, batch, Deadline::after(STORE_CALL_TIMEOUT))
                    .await
                    .map_err(escaped_failure)?;
                report.freed.extend(freed.released);
                report.changed.extend(freed.changed);
            }
            Ok(())
        })
        .await?;
    }
    let blocks: Vec<IpNet> = departed.blocks().collect();
    let mut damaged = None;
    for some in blocks.chunks(MAX_COMMITS_PER_OPENING) {
        at.with_operator(StoreUse::Release, async |operator| {
            for cidr in some {
                match operator.ipam().give_up_block(&departed.node, *cidr, Deadline::after(STORE_CALL_TIMEOUT)).await {
                    Ok(true) => report.gave_up.push(*cidr),
                    Ok(false) => {}
                    // An unreadable block must not stop the command from releasing the other blocks.
                    Err(error @ ipam_core::Error::Malformed(_)) => damaged = Some(error),
                    Err(error) => return Err(escaped_failure(error)),
                }
            }
            Ok(())
        })
        .await?;
    }
    at.with_operator(StoreUse::Release, async |operator| {
        operator.ipam().drop_legacy(&departed.node, Deadline::after(STORE_CALL_TIMEOUT)).await.map_err(escaped_failure)
    })
    .await?;
    damaged.map_or(Ok(()), |error| Err(escaped_failure(error)))
}

/// Creates a failure from an error whose text may quote names from the store, and escapes control characters in this
/// text.
fn escaped_failure(error: ipam_core::Error) -> CommandFailure {
    CommandFailure::new(printable(&error.to_string()))
}

/// The reason why addresses of departed nodes may be freed.
const REASON: &str = "node_gone";

/// An address of a departed node that may be freed.
#[derive(Debug, Serialize)]
struct Candidate {
    address: IpAddr,
    handle: Option<String>,
    network: Option<String>,
    interface: Option<String>,
    reason: &'static str,
    /// The time at which the address was assigned, according to the attributes of the address.
    since: Option<String>,
}

impl Candidate {
    fn new(hold: &Hold) -> Self {
        let text = |text: Option<&str>| text.map(str::to_owned);
        Self {
            address: hold.address,
            handle: hold.handle.clone(),
            network: text(hold.network()),
            interface: text(hold.interface()),
            reason: REASON,
            since: text(hold.timestamp()),
        }
    }

    fn cells(&self, node: &str) -> Vec<String> {
        let text = |text: &Option<String>| text.as_deref().map(printable).unwrap_or_default();
        vec![
            printable(node),
            self.address.to_string(),
            text(&self.handle),
            text(&self.interface),
            assignment_time(self.since.as_deref()),
        ]
    }
}

/// The numbers of addresses that `margay gc` keeps in a departed node's blocks, by reason.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct DepartedKeptCounts {
    two_owners: usize,
    no_node: usize,
    other_nodes: usize,
}

impl DepartedKeptCounts {
    /// Formats the numbers of kept addresses as text; an empty text if all numbers are 0.
    fn text(&self) -> String {
        let parts = [
            (self.two_owners, "of virtual machines, or on their way to another owner"),
            (self.no_node, "recorded for no node (margay ipam release frees those)"),
            (self.other_nodes, "of other nodes, in blocks that then have no owner"),
        ];
        let parts: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        parts.join(", ")
    }
}

#[derive(Debug, Serialize)]
struct DepartedNodeReport {
    store: String,
    node: String,
    /// True if the command failed to free an address, block or endpoint.
    failed: bool,
    candidates: Vec<Candidate>,
    freed: Vec<IpAddr>,
    /// Addresses that the command did not free, because they were assigned again or released after they were read.
    changed: Vec<IpAddr>,
    /// The workload endpoints of the departed node.
    endpoints: Vec<EndpointRow>,
    deleted_endpoints: Vec<EndpointRow>,
    /// The blocks that are affine to the departed node, and that the command releases with `--apply`.
    blocks: Vec<IpNet>,
    gave_up: Vec<IpNet>,
    left: DepartedKeptCounts,
}

impl DepartedNodeReport {
    fn of(location: &Location, departed: &DepartedNode) -> Self {
        Self {
            store: location.to_string(),
            node: departed.node.clone(),
            failed: false,
            candidates: departed.holds.iter().map(Candidate::new).collect(),
            freed: Vec::new(),
            changed: Vec::new(),
            endpoints: departed.endpoints.iter().map(EndpointRow::from).collect(),
            deleted_endpoints: Vec::new(),
            blocks: departed.parts.iter().filter(|(_, part)| part.is_own).map(|(cidr, _)| *cidr).collect(),
            gave_up: Vec::new(),
            left: DepartedKeptCounts {
                two_owners: departed.shared,
                no_node: departed.nameless,
                other_nodes: departed.of_others,
            },
        }
    }

    fn text(&self, applied: bool, text: &mut String) {
        let node = printable(&self.node);
        *text += &EndpointRow::table(&self.endpoints);
        let and = |verb: &str, count: usize| match count {
            0 => String::new(),
            _ => format!(", {verb} {}", count_endpoints(count)),
        };
        _ = match applied {
            true => writeln!(
                text,
                "freed {}{} and gave up {} of node {node}",
                count_addresses(self.freed.len()),
                and("deleted", self.deleted_endpoints.len()),
                count_blocks(self.gave_up.len())
            ),
            false => writeln!(
                text,
                "would free {}{} and give up {} of node {node}; do it with --apply",
                count_addresses(self.candidates.len()),
                and("delete", self.endpoints.len()),
                count_blocks(self.blocks.len())
            ),
        };
        if !self.changed.is_empty() {
            _ = writeln!(text, "left {}, assigned again or released meanwhile", count_addresses(self.changed.len()));
        }
        let left = self.left.text();
        if !left.is_empty() {
            _ = writeln!(text, "left: {left}");
        }
    }
}

/// A departed node that the command skips, and why.
#[derive(Debug, Serialize)]
struct SkippedNode {
    node: String,
    why: String,
}

#[derive(Debug, Serialize)]
struct DepartedReport {
    applied: bool,
    /// The name of the node that was given with the option `--node`.
    #[serde(skip)]
    node: Option<String>,
    stores: Vec<DepartedNodeReport>,
    skipped: Vec<SkippedNode>,
}

impl DepartedReport {
    fn answer(&mut self) -> CommandResult<CommandAnswer> {
        for report in &mut self.stores {
            report.candidates.sort_by_key(|row| row.address);
            report.freed.sort_unstable();
        }
        let mut text = String::new();
        let rows: Vec<Vec<String>> = self
            .stores
            .iter()
            .flat_map(|read_named_node| read_named_node.candidates.iter().map(|row| row.cells(&read_named_node.node)))
            .collect();
        if !rows.is_empty() {
            let titles = ["NODE", "ADDRESS", "HANDLE", "INTERFACE", "SINCE (UTC)"];
            text += &render(&titles.map(Column::Text), &rows);
        }
        for report in &self.stores {
            report.text(self.applied, &mut text);
        }
        _ = match (&self.node, self.stores.is_empty()) {
            (_, false) => Ok(()),
            (Some(node), true) => writeln!(text, "node {} has nothing in the store", printable(node)),
            (None, true) => writeln!(text, "no node that is gone has anything in the store"),
        };
        for SkippedNode { node, why } in &self.skipped {
            _ = writeln!(text, "left node {}: {why}", printable(node));
        }
        CommandAnswer::new(text, self)
    }
}

pub(super) fn count_blocks(count: usize) -> String {
    if count == 1 { "1 block".to_owned() } else { format!("{count} blocks") }
}
