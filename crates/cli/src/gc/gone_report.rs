//! The estates of nodes that are gone, and their fate, for people and for programs.

use std::fmt::Write;
use std::net::IpAddr;

use datastore::Location;
use ipam_core::gc::{Estate, Hold};
use ipnet::IpNet;
use serde::Serialize;

use super::report::{EndpointRow, addresses, endpoints, since};
use crate::answer::Answer;
use crate::error::Result;
use crate::output::{Column, printable, render};

/// Why an address may be freed: there is only one reason.
const REASON: &str = "node_gone";

/// An address that may be freed.
#[derive(Debug, Serialize)]
pub(super) struct Candidate {
    address: IpAddr,
    handle: Option<String>,
    network: Option<String>,
    interface: Option<String>,
    reason: &'static str,
    /// The recorded time of its assignment.
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
            since(self.since.as_deref()),
        ]
    }
}

/// The numbers of addresses that stay in a node's blocks, by reason.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct LeftOfGone {
    two_owners: usize,
    no_node: usize,
    other_nodes: usize,
}

impl LeftOfGone {
    /// The numbers in words; empty if all are 0.
    fn text(&self) -> String {
        let parts = [
            (self.two_owners, "of virtual machines, or on their way to another owner"),
            (self.no_node, "recorded for no node (margay ipam release frees those)"),
            (self.other_nodes, "of other nodes, in blocks that are nobody's then"),
        ];
        let parts: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        parts.join(", ")
    }
}

/// One node.
#[derive(Debug, Serialize)]
pub(super) struct NodeReport {
    store: String,
    node: String,
    /// True if not everything could be freed.
    pub(super) failed: bool,
    candidates: Vec<Candidate>,
    pub(super) freed: Vec<IpAddr>,
    /// The addresses that were assigned again or released meanwhile.
    pub(super) changed: Vec<IpAddr>,
    /// Its workload endpoints.
    endpoints: Vec<EndpointRow>,
    pub(super) deleted_endpoints: Vec<EndpointRow>,
    /// The node's own blocks, which are released.
    blocks: Vec<IpNet>,
    pub(super) gave_up: Vec<IpNet>,
    left: LeftOfGone,
}

impl NodeReport {
    pub(super) fn of(location: &Location, estate: &Estate) -> Self {
        Self {
            store: location.to_string(),
            node: estate.node.clone(),
            failed: false,
            candidates: estate.holds.iter().map(Candidate::new).collect(),
            freed: Vec::new(),
            changed: Vec::new(),
            endpoints: estate.endpoints.iter().map(EndpointRow::from).collect(),
            deleted_endpoints: Vec::new(),
            blocks: estate.parts.iter().filter(|(_, part)| part.is_own).map(|(cidr, _)| *cidr).collect(),
            gave_up: Vec::new(),
            left: LeftOfGone { two_owners: estate.shared, no_node: estate.nameless, other_nodes: estate.of_others },
        }
    }

    fn text(&self, applied: bool, text: &mut String) {
        let node = printable(&self.node);
        *text += &EndpointRow::table(&self.endpoints);
        let and = |verb: &str, count: usize| match count {
            0 => String::new(),
            _ => format!(", {verb} {}", endpoints(count)),
        };
        _ = match applied {
            true => writeln!(
                text,
                "freed {}{} and gave up {} of node {node}",
                addresses(self.freed.len()),
                and("deleted", self.deleted_endpoints.len()),
                blocks(self.gave_up.len())
            ),
            false => writeln!(
                text,
                "would free {}{} and give up {} of node {node}; do it with --apply",
                addresses(self.candidates.len()),
                and("delete", self.endpoints.len()),
                blocks(self.blocks.len())
            ),
        };
        if !self.changed.is_empty() {
            _ = writeln!(text, "left {}, assigned anew or released meanwhile", addresses(self.changed.len()));
        }
        let left = self.left.text();
        if !left.is_empty() {
            _ = writeln!(text, "left: {left}");
        }
    }
}

/// A node that was not touched.
#[derive(Debug, Serialize)]
pub(super) struct Skipped {
    pub(super) node: String,
    pub(super) why: String,
}

/// All nodes.
#[derive(Debug, Serialize)]
pub(super) struct GoneReport {
    pub(super) applied: bool,
    /// The node that was named.
    #[serde(skip)]
    pub(super) node: Option<String>,
    pub(super) stores: Vec<NodeReport>,
    pub(super) skipped: Vec<Skipped>,
}

impl GoneReport {
    pub(super) fn answer(&mut self) -> Result<Answer> {
        for report in &mut self.stores {
            report.candidates.sort_by_key(|row| row.address);
            report.freed.sort_unstable();
        }
        let mut text = String::new();
        let rows: Vec<Vec<String>> =
            self.stores.iter().flat_map(|one| one.candidates.iter().map(|row| row.cells(&one.node))).collect();
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
        for Skipped { node, why } in &self.skipped {
            _ = writeln!(text, "left node {}: {why}", printable(node));
        }
        Answer::new(text, self)
    }
}

/// A number of blocks in words.
pub(super) fn blocks(count: usize) -> String {
    if count == 1 { "1 block".to_owned() } else { format!("{count} blocks") }
}
