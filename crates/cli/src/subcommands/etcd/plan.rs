//! Estimates the size of an etcd database from the number of nodes and pods and the rate of changes, for the command
//! `margay etcd plan`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use datastore::DEFAULT_QUOTA_BYTES;
use indicatif::{HumanBytes, HumanDuration};
use ipam_core::attachment::{Attachment, BOOT, NAMESPACE, NETNS, POD, TIMESTAMP};
use ipam_core::model::{Attribute, Block, Document, Handle, Owner};
use ipam_core::reservations::Reservations;
use ipnet::{IpNet, Ipv4Net};
use serde::Serialize;
use time::OffsetDateTime;

use super::parse_nonzero_duration;
use crate::command::{CommandAnswer, Invocation, StandaloneCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, Columns, TableRow, table};

pub(super) const HELP: &str = "\
Examples:
  margay etcd plan --nodes 100 --pods-per-node 30 --churn 20
  margay etcd plan --nodes 5000 --pods-per-node 60 --churn 500 --keep 5m

It calculates and asks no etcd. Each ADD and each DEL writes a whole block, and etcd keeps each version of the block
until a compaction deletes it. Smaller blocks make changes smaller, and a node needs more of them.";

/// The block sizes that `etcd plan` compares, as IPv4 prefix lengths.
const BLOCK_SIZES: [u8; 4] = [26, 27, 28, 29];
/// The page size of etcd's database file. A value that is larger than a page occupies whole pages.
const PAGE_BYTES: u64 = 4096;
/// The bytes that etcd stores with a key besides the value: the key itself, its revisions, and its share of a page.
const KEY_BYTES: u64 = 250;
/// The largest database quota that etcd's documentation recommends, in bytes.
const MAX_QUOTA_BYTES: u64 = 8 << 30;

#[derive(Debug, Args)]
pub(crate) struct EtcdPlan {
    /// Number of nodes of the cluster
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    nodes: u64,

    /// Number of pods on a node
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pods_per_node: u64,

    /// Number of pod starts and pod ends per second in the whole cluster
    #[arg(long, value_name = "N", value_parser = parse_rate)]
    churn: f64,

    /// Assume that compaction keeps all history younger than TIME, such as 1h
    #[arg(long, value_name = "TIME", value_parser = parse_nonzero_duration, default_value = "10m")]
    keep: Duration,
}

#[derive(Serialize)]
struct PlanRow {
    block_size: u8,
    blocks_per_node: u64,
    /// Size of the document of a block in which every address is assigned, in bytes.
    block_bytes: u64,
    /// Growth of the database by one ADD or DEL, in bytes.
    bytes_per_change: u64,
    /// Size of the newest versions of all keys, in bytes.
    live_bytes: u64,
    /// Maximum size of the history between two compactions, in bytes.
    history_bytes: u64,
    /// A database quota that is at least twice the size of data and history, in bytes; `None` if it exceeds
    /// [`MAX_QUOTA_BYTES`].
    quota_bytes: Option<u64>,
    /// Time in seconds until a database with etcd's default quota is full, if no program compacts the history.
    full_after_seconds: u64,
}

impl TableRow for PlanRow {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("BLOCK"), |row| format!("/{}", row.block_size)),
            (Column::Number("PER NODE"), |row| row.blocks_per_node.to_string()),
            (Column::Number("CHANGE"), |row| HumanBytes(row.bytes_per_change).to_string()),
            (Column::Number("DATA"), |row| HumanBytes(row.live_bytes).to_string()),
            (Column::Number("HISTORY"), |row| HumanBytes(row.history_bytes).to_string()),
            (Column::Number("QUOTA"), |row| {
                row.quota_bytes.map_or_else(|| "too large".to_owned(), |quota| HumanBytes(quota).to_string())
            }),
            (Column::Text("FULL WITHOUT COMPACTION"), |row| {
                format!("after {}", HumanDuration(Duration::from_secs(row.full_after_seconds)))
            }),
        ]
    }
}

#[derive(Serialize)]
struct PlanJson {
    nodes: u64,
    pods_per_node: u64,
    changes_per_second: f64,
    keep_seconds: u64,
    blocks: Vec<PlanRow>,
}

impl StandaloneCommand for EtcdPlan {
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let rows = BLOCK_SIZES.map(|size| self.row(size)).into_iter().collect::<CommandResult<Vec<_>>>()?;
        let mut text = table(&rows);
        _ = write!(
            text,
            "\nCHANGE is what one ADD or DEL adds to the database, HISTORY what {} s of changes add, twice, because a \
             compaction\nkeeps what is younger. QUOTA is for --quota-backend-bytes and leaves half free; without the flag \
             it is {}.",
            self.keep.as_secs(),
            HumanBytes(DEFAULT_QUOTA_BYTES)
        );
        let json = PlanJson {
            nodes: self.nodes,
            pods_per_node: self.pods_per_node,
            changes_per_second: self.churn,
            keep_seconds: self.keep.as_secs(),
            blocks: rows,
        };
        invocation.print(CommandAnswer::new(text, &json)?)?;
        Ok(0)
    }
}

#[allow(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::cast_possible_truncation,
    reason = "sizes are estimates"
)]
impl EtcdPlan {
    fn row(&self, block_size: u8) -> CommandResult<PlanRow> {
        let capacity = 1_u64 << (32 - block_size);
        let blocks_per_node = self.pods_per_node.div_ceil(capacity);
        let pods_per_block = self.pods_per_node.div_ceil(blocks_per_node);
        let (block_bytes, handle_bytes) = document_sizes(block_size, pods_per_block)?;
        let bytes_per_change = stored(block_bytes) + handle_bytes + KEY_BYTES;
        let live_bytes = self.nodes
            * (blocks_per_node * (stored(block_bytes) + 2 * KEY_BYTES)
                + self.pods_per_node * (handle_bytes + KEY_BYTES));
        let bytes_per_second = self.churn * bytes_per_change as f64;
        let history_bytes = (bytes_per_second * self.keep.as_secs_f64() * 2.0) as u64;
        let needed = live_bytes.saturating_add(history_bytes).saturating_mul(2).max(DEFAULT_QUOTA_BYTES);
        Ok(PlanRow {
            block_size,
            blocks_per_node,
            block_bytes,
            bytes_per_change,
            live_bytes,
            history_bytes,
            quota_bytes: needed.checked_next_power_of_two().filter(|quota| *quota <= MAX_QUOTA_BYTES),
            full_after_seconds: (DEFAULT_QUOTA_BYTES.saturating_sub(live_bytes) as f64 / bytes_per_second) as u64,
        })
    }
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| (0.001..=100_000.0).contains(rate));
    rate.ok_or_else(|| "not a number between 0.001 and 100000".to_owned())
}

/// Returns the number of bytes that a value of `bytes` bytes takes in etcd's database file.
fn stored(bytes: u64) -> u64 {
    let with_key = bytes + KEY_BYTES;
    if with_key < PAGE_BYTES { with_key } else { with_key.div_ceil(PAGE_BYTES) * PAGE_BYTES }
}

/// Returns the size in bytes of the document of a block with `pods` pods, and of the document of one pod's handle. Each
/// pod's name is 33 characters long, which is typical.
fn document_sizes(block_size: u8, pods: u64) -> CommandResult<(u64, u64)> {
    let failed =
        |error: &dyn std::fmt::Display| CommandFailure::new(format!("the sizes cannot be calculated: {error}"));
    let now = OffsetDateTime::UNIX_EPOCH + time::Duration::days(20_000);
    let net = Ipv4Net::new([10, 65, 179, 0].into(), block_size).map_err(|error| failed(&error))?;
    let node = "ip-10-0-123-45.internal";
    let mut block = Block::new(IpNet::V4(net), Some(&Owner::host(node)), now, None).map_err(|error| failed(&error))?;
    let mut handle = String::new();
    for pod in 0..pods {
        let attachment = Attachment {
            network: "k8s-pod-network".to_owned(),
            container: format!("{pod:064x}"),
            interface: "eth0".to_owned(),
            node: node.to_owned(),
            boot: None,
        };
        handle = attachment.handle();
        let attributes = [
            (NAMESPACE, "production-payments".to_owned()),
            (POD, format!("checkout-service-7d9f8b6c54-{pod:05x}")),
            ("node", node.to_owned()),
            (TIMESTAMP, "2026-11-21 02:41:03.957 +0000 UTC".to_owned()),
            ("margay.io/ifname", "eth0".to_owned()),
            ("margay.io/net", "k8s-pod-network".to_owned()),
            (BOOT, "191b29e2".to_owned()),
            (NETNS, "4:4026532265".to_owned()),
        ];
        let attributes: BTreeMap<_, _> = attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        block.assign_auto(1, &Attribute::new(Some(&handle), attributes), &Reservations::default());
    }
    let mut of_pod = Handle::default();
    of_pod.increment(IpNet::V4(net), 1);
    let size = |document: Result<kv::Value, _>| -> CommandResult<u64> {
        let document = document.map_err(|error: ipam_core::model::Malformed| failed(&error))?;
        Ok(document.as_bytes().len() as u64)
    };
    Ok((size(block.encode())?, size(of_pod.encode())? + handle.len() as u64))
}
