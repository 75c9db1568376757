//! Makes another node the holder of everything that a node holds, for `margay gc --move-to`. The containers of the old
//! node keep their addresses.
//!
//! An embedded store stays open from the first to the last commit of a move to another node. A DEL between two commits
//! of the move might search for an address under one node name while the address is recorded under the other name. One
//! commit moves about thirty blocks to the new node name.

use std::fmt::Write as _;

use async_trait::async_trait;
use datastore::Location;
use ipam_core::gc::{DepartedNode, DepartedNodes, HandOverResult, MAX_ENDPOINTS_MOVED_PER_COMMIT, NodeEndpoint};
use ipam_core::model::endpoint_name_on;
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;

use super::departed::count_blocks;
use super::report::count_addresses;
use super::{Gc, STORE_CALL_TIMEOUT, survey};
use crate::command::{CommandAnswer, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, printable, render};
use crate::store::{StoreAccess, StoreUse};

/// A block that is affine to the old node, or in which the old node has addresses.
#[derive(Debug, Serialize)]
struct MovedBlock {
    block: IpNet,
    /// True if the block is affine to the old node.
    own: bool,
    addresses: usize,
}

/// The old and the new name of a handle whose name contains the node's name.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct RenamedHandle {
    from: String,
    to: String,
}

/// The old and the new name of a workload endpoint whose name contains the node's name.
#[derive(Debug, Serialize)]
struct RenamedEndpoint {
    namespace: String,
    from: String,
    to: String,
}

impl RenamedEndpoint {
    fn new(endpoint: &NodeEndpoint, to: String) -> Self {
        Self { namespace: endpoint.namespace.clone(), from: endpoint.name.clone(), to }
    }
}

/// The report of a planned or completed move of blocks and addresses to another node.
#[derive(Debug, Serialize)]
struct NodeMoveReport {
    applied: bool,
    store: String,
    from: String,
    to: String,
    blocks: Vec<MovedBlock>,
    handles: Vec<RenamedHandle>,
    endpoints: Vec<RenamedEndpoint>,
    /// True if the old node is recorded as the only node of the store, so that the move must change this record, too.
    pinned: bool,
    /// True if the old node holds anything in the store, even if it is only an affinity to a missing block.
    #[serde(skip)]
    has_any: bool,
    /// The other nodes that hold anything in the store; the report suggests them if the old node holds nothing.
    #[serde(skip)]
    others: Vec<String>,
}

/// A request to move everything that one node holds to another node.
pub(super) struct NodeMove<'a> {
    from: &'a str,
    to: &'a str,
    apply: bool,
}

impl<'a> NodeMove<'a> {
    /// Refuses a new name that equals the old name or is not a valid node name.
    pub(super) fn new(args: &'a Gc, to: &'a str) -> CommandResult<Self> {
        let from = args.node.as_deref().unwrap_or_default();
        if to.is_empty() || to.contains('/') || to == from {
            return Err(CommandFailure::new(format!("{:?} cannot be the name of another node", printable(to))));
        }
        Ok(Self { from, to, apply: args.apply })
    }
}

#[async_trait(?Send)]
impl StoreCommand for NodeMove<'_> {
    /// Reports the blocks, addresses and endpoints that the old node holds in the store. With `--apply`, makes the new
    /// node the holder of everything that the old node holds.
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let Self { from, to, apply } = *self;
        let report = match apply {
            true => {
                at.with_operator(StoreUse::Write, async |operator| move_node(at.location, operator, from, to).await)
                    .await?
            }
            false => {
                let found = survey(at, |_: &_, node: &str| node == from).await?;
                check(at.location, &found, from, to)?;
                NodeMoveReport::planned(at.location, &found, from, to)
            }
        };
        report.answer()
    }
}

async fn move_node(location: &Location, operator: &Operator, from: &str, to: &str) -> CommandResult<NodeMoveReport> {
    let found = operator.ipam().departed_nodes(|_, node| node == from, Deadline::after(STORE_CALL_TIMEOUT)).await?;
    check(location, &found, from, to)?;
    let planned = NodeMoveReport::planned(location, &found, from, to);
    if planned.is_nothing() {
        return Ok(planned);
    }
    let mut report =
        NodeMoveReport { applied: true, blocks: Vec::new(), handles: Vec::new(), endpoints: Vec::new(), ..planned };
    let nothing = DepartedNode::default();
    let departed = found.departed.get(from).unwrap_or(&nothing);
    for share in departed.shares() {
        let done = operator.ipam().hand_over(from, to, &share, Deadline::after(STORE_CALL_TIMEOUT)).await?;
        report.add(&share, done);
    }
    for some in departed.endpoints.chunks(MAX_ENDPOINTS_MOVED_PER_COMMIT) {
        let moved = operator.ipam().hand_over_endpoints(from, to, some, Deadline::after(STORE_CALL_TIMEOUT)).await?;
        report.endpoints.extend(moved.into_iter().map(|(endpoint, new)| RenamedEndpoint::new(endpoint, new)));
    }
    Ok(report)
}

/// Refuses the move if the old node is still registered, or if the new node is not registered.
fn check(location: &Location, found: &DepartedNodes, from: &str, to: &str) -> CommandResult<()> {
    let registered = &found.known.registered;
    if registered.contains(from) {
        return Err(CommandFailure::new(format!(
            "node {} is registered in the store; nothing was moved",
            printable(from)
        ))
        .hint(format!(
            "if node {0} no longer exists, delete the node first: margay delete node {0}",
            printable(from)
        )));
    }
    // While no node is registered, an embedded store assigns addresses to any node. Once a node is registered, an
    // embedded store assigns addresses only to registered nodes. A cluster never assigns addresses to unregistered
    // nodes.
    let any_will_do = registered.is_empty() && !location.is_shared();
    if !any_will_do && !registered.contains(to) {
        return Err(CommandFailure::new(format!(
            "node {} is not registered in the store; nothing was moved",
            printable(to)
        ))
        .hint("list the registered nodes with: margay get nodes; start calico-node on a node to register the node"));
    }
    Ok(())
}

impl NodeMoveReport {
    fn planned(location: &Location, found: &DepartedNodes, from: &str, to: &str) -> Self {
        let departed = found.departed.get(from);
        let parts = departed.iter().flat_map(|departed| &departed.parts);
        let rows = parts.clone().filter(|(_, part)| part.is_own || part.addresses > 0);
        let tunnels = parts.flat_map(|(_, part)| &part.tunnels);
        let renamed = |one: &NodeEndpoint| endpoint_name_on(&one.name, to).map(|new| RenamedEndpoint::new(one, new));
        let mut report = Self {
            applied: false,
            store: location.to_string(),
            from: from.to_owned(),
            to: to.to_owned(),
            blocks: rows
                .map(|(cidr, part)| MovedBlock { block: *cidr, own: part.is_own, addresses: part.addresses })
                .collect(),
            handles: Vec::new(),
            endpoints: departed.iter().flat_map(|departed| &departed.endpoints).filter_map(renamed).collect(),
            pinned: found.known.pinned.as_deref() == Some(from),
            has_any: departed.is_some(),
            others: found.nodes.iter().filter(|node| *node != from).cloned().collect(),
        };
        for handle in tunnels {
            let kind = handle.strip_suffix(from).unwrap_or(handle);
            report.rename(handle.clone(), format!("{kind}{to}"));
        }
        report
    }

    fn is_nothing(&self) -> bool {
        !self.has_any && !self.pinned
    }

    fn rename(&mut self, from: String, to: String) {
        let handle = RenamedHandle { from, to };
        if !self.handles.contains(&handle) {
            self.handles.push(handle);
        }
    }

    fn add(&mut self, share: &[IpNet], done: HandOverResult) {
        for block in share {
            let addresses = done.addresses.iter().filter(|address| block.contains(*address)).count();
            let own = done.blocks.contains(block);
            if own || addresses > 0 {
                self.blocks.push(MovedBlock { block: *block, own, addresses });
            }
        }
        for (from, to) in done.handles {
            self.rename(from, to);
        }
    }

    fn answer(&self) -> CommandResult<CommandAnswer> {
        let (from, to) = (printable(&self.from), printable(&self.to));
        let mut text = String::new();
        if self.is_nothing() {
            _ = writeln!(text, "node {from} has nothing in the store");
            if !self.others.is_empty() {
                let others: Vec<String> = self.others.iter().map(|node| printable(node)).collect();
                _ = writeln!(text, "those that have: {}", others.join(", "));
            }
            return CommandAnswer::new(text, self);
        }
        if !self.blocks.is_empty() {
            let kind = |own: bool| if own { "own" } else { "another node's" };
            let cells =
                |row: &MovedBlock| vec![row.block.to_string(), kind(row.own).to_owned(), row.addresses.to_string()];
            let rows: Vec<Vec<String>> = self.blocks.iter().map(cells).collect();
            text += &render(&[Column::Text("BLOCK"), Column::Text("OWNER"), Column::Number("ADDRESSES")], &rows);
        }
        for RenamedHandle { from, to } in &self.handles {
            let word = if self.applied { "renamed" } else { "would rename" };
            _ = writeln!(text, "{word} handle {} to {}", printable(from), printable(to));
        }
        for RenamedEndpoint { namespace, from, to } in &self.endpoints {
            let word = if self.applied { "renamed" } else { "would rename" };
            let [namespace, from, to] = [namespace, from, to].map(|text| printable(text));
            _ = writeln!(text, "{word} workload endpoint {namespace}/{from} to {to}");
        }
        let own = count_blocks(self.blocks.iter().filter(|row| row.own).count());
        let held = count_addresses(self.blocks.iter().map(|row| row.addresses).sum());
        _ = match self.applied {
            true => writeln!(text, "made {own} and {held} of node {from} those of {to}"),
            false => writeln!(text, "would make {own} and {held} of node {from} those of {to}; do it with --apply"),
        };
        CommandAnswer::new(text, self)
    }
}
