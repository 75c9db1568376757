//! Predicts which address a new container would get, for the command `margay ipam explain`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use async_trait::async_trait;
use clap::{ArgGroup, Args};
use ipam_core::Error;
use ipam_core::assign::{AddressSource, Explanation, PoolState, PoolStock, PredictedOutcome};
use ipam_core::model::{Labels, Pool};
use ipam_core::net::{Count, Family};
use ipam_core::pools::{Obstacle, PoolError};
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;

use crate::command::{CommandAnswer, OpenStoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, Columns, TableRow, as_text, printable, table};
use crate::store::StoreUse;

pub(crate) const HELP: &str = "\
Goes through an assignment as the plugin does, up to the commit, and writes nothing. The exit code is 0 even if the
answer is that a container would get no address.

Examples:
  margay ipam explain --node node1
  margay ipam explain --node node1 --pool main --pool 10.70.0.0/24
  margay ipam explain --node node1 -6 --namespace shop --namespace-label tier=web";

/// The arguments of `ipam explain`: the container for which the assignment is predicted.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("family"))]
pub(crate) struct Explain {
    /// The node on which the container would start
    #[arg(long, value_name = "NAME")]
    pub(crate) node: String,

    /// Assume that the network configuration names this pool (by name or CIDR); repeatable
    #[arg(long = "pool", value_name = "POOL")]
    pub(crate) pools: Vec<String>,

    /// Explain how an IPv4 address would be assigned [default, unless every --pool is IPv6]
    #[arg(short = '4', group = "family")]
    pub(crate) v4: bool,

    /// Explain how an IPv6 address would be assigned
    #[arg(short = '6', group = "family")]
    pub(crate) v6: bool,

    /// Namespace of the pod; margay assumes that the namespace has the labels kubernetes.io/metadata.name=NAME and
    /// projectcalico.org/name=NAME
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,

    /// Label of the namespace, as NAME=VALUE; repeatable
    #[arg(long = "namespace-label", value_name = "NAME=VALUE", requires = "namespace")]
    pub(crate) namespace_labels: Vec<String>,
}

/// The predicted address assignment for a container, and the state of every pool.
#[derive(Debug, Serialize)]
struct ExplainReport {
    node: String,
    labels: BTreeMap<String, String>,
    family: u8,
    revision: i64,
    strict_affinity: bool,
    claims_blocks: bool,
    block_limit: Option<usize>,
    pools: Vec<PoolReport>,
    outcome: OutcomeReport,
}

/// Whether a pool would be chosen for the container, or else why not, and how full the pool is.
#[derive(Debug, Serialize)]
struct PoolReport {
    name: String,
    #[serde(serialize_with = "as_text")]
    cidr: IpNet,
    chosen: bool,
    /// The reason why the pool would not be chosen, as one word; absent if the pool would be chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    obstacle: Option<&'static str>,
    reason: String,
    capacity: Count,
    in_use: Count,
    reserved: Count,
    quarantined: usize,
    available: Count,
    resting: usize,
    blocks: usize,
    own_blocks: usize,
    own_free: usize,
}

impl TableRow for PoolReport {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("POOL"), |pool| printable(&pool.name)),
            (Column::Text("CIDR"), |pool| pool.cidr.to_string()),
            (Column::Text("CHOSEN"), |pool| if pool.chosen { "yes" } else { "no" }.to_owned()),
            (Column::Text("WHY"), |pool| pool.reason.clone()),
        ]
    }
}

/// The predicted outcome of an address assignment.
#[derive(Debug, Serialize)]
struct OutcomeReport {
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_length: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    /// Where the predicted address comes from, which is `own`, `new`, `taken_over` or `borrowed`; absent if no address
    /// would be assigned.
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    free_in_block: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_owner: Option<String>,
    /// The error that the plugin would return instead of an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

#[async_trait(?Send)]
impl OpenStoreCommand for Explain {
    fn store_use(&self) -> StoreUse {
        StoreUse::ReadAll
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let family = match (self.v4, self.v6) {
            (true, _) => Some(Family::V4),
            (_, true) => Some(Family::V6),
            _ => None,
        };
        let namespace = namespace_labels(self)?;
        let explained = operator.ipam().explain(&self.node, family, &self.pools, namespace.as_ref(), deadline).await?;
        let report = ExplainReport::of(&explained, namespace.as_ref());
        CommandAnswer::new(report.text(), &report)
    }
}

/// Returns the labels of the namespace: the two labels that Kubernetes and Calico give every namespace, and the labels
/// in the arguments.
fn namespace_labels(args: &Explain) -> CommandResult<Option<Labels>> {
    let Some(name) = &args.namespace else { return Ok(None) };
    let mut labels = Labels::new();
    for label in ["kubernetes.io/metadata.name", "projectcalico.org/name"] {
        labels.insert(label.to_owned(), name.clone());
    }
    for text in &args.namespace_labels {
        let (label, value) = text.split_once('=').ok_or_else(|| {
            CommandFailure::new(format!("--namespace-label {text} has no \"=\"")).hint("write the label as NAME=VALUE")
        })?;
        labels.insert(label.to_owned(), value.to_owned());
    }
    Ok(Some(labels))
}

impl ExplainReport {
    fn of(explained: &Explanation, namespace: Option<&Labels>) -> Self {
        let labels: BTreeMap<String, String> =
            explained.labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        Self {
            node: explained.node.clone(),
            family: if explained.family == Family::V4 { 4 } else { 6 },
            revision: explained.revision.get(),
            strict_affinity: explained.strict_affinity,
            claims_blocks: explained.claims_blocks,
            block_limit: explained.block_limit,
            pools: explained.pools.iter().map(|pool| PoolReport::of(pool, &labels, namespace)).collect(),
            outcome: OutcomeReport::of(explained),
            labels,
        }
    }

    fn text(&self) -> String {
        let node = printable(&self.node);
        let mut text = format!("IPv{} for a container on node {node} ({})\n", self.family, labelled(&self.labels));
        if !self.pools.is_empty() {
            text += &table(&self.pools);
        }
        _ = writeln!(text, "{}", self.outcome.text);
        if let Some(hint) = &self.outcome.hint {
            _ = writeln!(text, "{hint}");
        }
        text
    }
}

fn labelled(labels: &BTreeMap<String, String>) -> String {
    if labels.is_empty() {
        return "no labels".to_owned();
    }
    let labels: Vec<String> = labels.iter().map(|(name, value)| printable(&format!("{name}={value}"))).collect();
    labels.join(", ")
}

impl PoolReport {
    fn of(state: &PoolState, node: &BTreeMap<String, String>, namespace: Option<&Labels>) -> Self {
        let PoolState { pool, obstacle, stock, .. } = state;
        let PoolStock { usage, quarantined, in_cooldown, blocks, own_blocks, own_free, .. } = *stock;
        let (word, reason) = match obstacle {
            Ok(None) => (None, stock_text(stock)),
            Ok(Some(obstacle)) => (Some(word(*obstacle)), reason(pool, *obstacle, node, namespace)),
            Err(error) => (Some("bad_selector"), printable(&format!("a selector cannot be read: {error}"))),
        };
        Self {
            name: pool.name().to_owned(),
            cidr: pool.cidr(),
            chosen: word.is_none(),
            obstacle: word,
            reason,
            capacity: usage.capacity,
            in_use: usage.in_use,
            reserved: usage.reserved,
            quarantined,
            available: usage.available,
            resting: in_cooldown,
            blocks,
            own_blocks,
            own_free,
        }
    }
}

/// Describes how many addresses of a pool are in use.
fn stock_text(stock: &PoolStock) -> String {
    let PoolStock { usage, quarantined, in_cooldown, own_blocks, own_free, .. } = stock;
    let mut text = format!("{} of {} in use", usage.in_use, usage.capacity);
    if *in_cooldown > 0 {
        _ = write!(text, " ({in_cooldown} in cooldown)");
    }
    if usage.reserved != Count::ZERO {
        _ = write!(text, ", {} reserved", usage.reserved);
    }
    if *quarantined > 0 {
        _ = write!(text, " ({quarantined} in quarantine)");
    }
    let blocks = if *own_blocks == 1 { "block" } else { "blocks" };
    _ = write!(text, "; the node has {own_blocks} {blocks} with {own_free} free");
    text
}

fn word(obstacle: Obstacle) -> &'static str {
    match obstacle {
        Obstacle::OtherFamily => "other_family",
        Obstacle::NotEnabled => "not_enabled",
        Obstacle::BlocksTooSmall => "blocks_too_small",
        Obstacle::NotRequested => "not_requested",
        Obstacle::Manual => "manual",
        Obstacle::Node => "node_selector",
        Obstacle::Namespace => "namespace_selector",
        Obstacle::Use => "use",
    }
}

/// Explains why a pool would not be chosen, and advises what to do about it.
fn reason(pool: &Pool, obstacle: Obstacle, node: &BTreeMap<String, String>, namespace: Option<&Labels>) -> String {
    let text = match obstacle {
        Obstacle::OtherFamily => "it is of the other family".to_owned(),
        Obstacle::NotEnabled if pool.is_disabled() => format!(
            "it is disabled; to enable it set spec.disabled to false in what margay get ippool {} -o yaml prints, and: \
             margay apply -f FILE",
            pool.name()
        ),
        Obstacle::NotEnabled => "it is being deleted, or marked as not allocatable".to_owned(),
        Obstacle::BlocksTooSmall => format!("blocks of /{} do not fit into it", pool.block_size()),
        Obstacle::NotRequested => format!("others are named; to add it: --pool {}", pool.name()),
        Obstacle::Manual => format!("only for networks that name it (ipv4_pools, ipv6_pools): --pool {}", pool.name()),
        Obstacle::Node => {
            format!("its node selector {} does not match the node's labels: {}", pool.node_selector(), labelled(node))
        }
        Obstacle::Namespace => {
            let selector = pool.namespace_selector();
            match namespace {
                None => format!("its namespace selector {selector} needs the namespace: --namespace NAME"),
                Some(labels) => {
                    let labels = labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
                    format!(
                        "its namespace selector {selector} does not match the namespace's labels: {}; others are given \
                         with --namespace-label",
                        labelled(&labels)
                    )
                }
            }
        }
        Obstacle::Use => format!("it is not for containers (allowedUses: {})", pool.allowed_uses().join(", ")),
    };
    printable(&text)
}

impl OutcomeReport {
    fn of(explained: &Explanation) -> Self {
        match &explained.outcome {
            PredictedOutcome::Given { address, prefix_length, block, pool, free, source } => {
                let of_pool = |state: &&PoolState| state.pool.cidr() == *pool;
                let name = explained.pools.iter().find(of_pool).map(|state| state.pool.name().to_owned());
                let names = if prefix_length.is_some() { ["prefix", "prefixes"] } else { ["address", "addresses"] };
                let (word, owner, text) = source_text(source, *block, *free, names);
                Self {
                    address: Some(*address),
                    prefix_length: *prefix_length,
                    block: Some(block.to_string()),
                    pool: name,
                    source: Some(word),
                    free_in_block: Some(*free),
                    block_owner: owner,
                    error: None,
                    text: printable(&match prefix_length {
                        Some(length) => format!("it would get the prefix {address}/{length}, {text}"),
                        None => format!("it would get {address}, {text}"),
                    }),
                    hint: None,
                }
            }
            PredictedOutcome::Refused(error) => Self {
                address: None,
                prefix_length: None,
                block: None,
                pool: None,
                source: None,
                free_in_block: None,
                block_owner: None,
                error: Some(error.to_string()),
                text: match error {
                    Error::NamespaceWanted => "which pool it would be depends on the namespace of the pod".to_owned(),
                    error => printable(&format!("it would get no address: {}", error.to_string().trim_end())),
                },
                hint: hint(error, explained).map(|hint| printable(&hint)),
            },
            _ => Self::of_unknown(),
        }
    }

    /// Returns the report for an assignment outcome that this version of margay does not know.
    fn of_unknown() -> Self {
        let text = "the outcome is not known to this version".to_owned();
        let (address, block, pool, source) = (None, None, None, None);
        Self {
            address,
            prefix_length: None,
            block,
            pool,
            source,
            free_in_block: None,
            block_owner: None,
            error: None,
            text,
            hint: None,
        }
    }
}

/// Describes from which block an address would be assigned. Returns where the address would come from: a JSON keyword,
/// the block's current or former owner if it is another node, and a sentence for the user.
fn source_text(
    source: &AddressSource,
    block: IpNet,
    free: usize,
    [one, many]: [&str; 2],
) -> (&'static str, Option<String>, String) {
    let free = if free == 1 { format!("1 {one} free") } else { format!("{free} {many} free") };
    match source {
        AddressSource::Own => ("own", None, format!("from block {block} of the node's own, with {free}")),
        AddressSource::New => {
            ("new", None, format!("from a new block that the node would claim: {block}, with {free}"))
        }
        AddressSource::TakenOver(owner) => {
            let owner = owner.as_ref().map(ToString::to_string);
            let former = owner.as_ref().map(|owner| format!(" from {owner}")).unwrap_or_default();
            ("taken_over", owner, format!("from block {block} without a holder that the node would take over{former}"))
        }
        AddressSource::Borrowed(owner) => {
            let owner = owner.as_ref().map(ToString::to_string);
            let whose = owner.as_ref().map_or("without an owner".to_owned(), |owner| format!("of {owner}"));
            ("borrowed", owner, format!("borrowed from block {block} {whose}, with {free}"))
        }
    }
}

/// Returns advice for an address assignment that would fail.
fn hint(error: &Error, explained: &Explanation) -> Option<String> {
    let own: usize =
        explained.pools.iter().filter(|pool| pool.obstacle == Ok(None)).map(|pool| pool.stock.own_blocks).sum();
    let free: Vec<&str> = explained
        .pools
        .iter()
        .filter(|pool| pool.obstacle == Ok(None) && pool.stock.usage.available != Count::ZERO)
        .map(|pool| pool.pool.name())
        .collect();
    Some(match error {
        Error::UnknownNode(node) => format!(
            "register node {node} with: margay create -f FILE; or use the registered name of the node, which is in \
             the file /var/lib/calico/nodename or is the host name in lower case"
        ),
        Error::NamespaceWanted => "name the namespace of the pod with: --namespace NAME".to_owned(),
        Error::Quota(_) => "list the quotas and the addresses in use with: margay quota list".to_owned(),
        Error::BlockLimit => format!(
            "raise the limit of blocks per node with: margay ipam configure --max-blocks-per-host=N (the node has \
             {own} blocks in these pools; the limit is {}); show the node's history with: margay ipam history {}",
            explained.block_limit.unwrap_or(own),
            explained.node
        ),
        Error::NoNewBlocks => {
            "allow the node to claim new blocks (auto_allocate_blocks is false): all its blocks are full".to_owned()
        }
        Error::Exhausted { .. } if explained.strict_affinity && !free.is_empty() => format!(
            "turn off strict affinity to use free addresses in other nodes' blocks (pools {}): margay ipam configure \
             --strictaffinity=false",
            free.join(", ")
        ),
        Error::Exhausted { .. } => {
            "create another pool with: margay pool create NAME CIDR; show the addresses in use with: margay ipam \
             show --show-blocks; show unused addresses with: margay gc --boot"
                .to_owned()
        }
        Error::Pool(error) => match error {
            PoolError::UnknownName(_) | PoolError::NotGiven(_) | PoolError::WrongFamily(..) => {
                "list the pools with: margay pool list".to_owned()
            }
            PoolError::NoneQualified if explained.pools.is_empty() => {
                "create a pool of this address family with: margay pool create NAME CIDR".to_owned()
            }
            _ => return None,
        },
        _ => return None,
    })
}
