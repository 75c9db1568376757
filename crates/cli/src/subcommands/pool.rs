//! Creates, lists and deletes pools, and assigns prefixes to nodes, for the commands `margay pool` and `margay ipam
//! assign-prefix`.

use std::net::IpAddr;
use std::path::Path;

use async_trait::async_trait;
use clap::{Args, Subcommand};
use ipam_core::assign::bridge::{self, GATEWAY_ANNOTATION, reservation_name};
use ipam_core::model::{AssignmentMode, IpReservation, NewPool, Pool, check_new_pool};
use ipam_core::net::overlap;
use ipam_core::{Error, Inventory, free_range};
use ipam_operator::{InUse, NodePrefix, Operator};
use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;
use serde_json::json;

use crate::command::{CommandAnswer, OpenStoreCommand, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, Columns, TableRow, as_text, printable};
use crate::store::{StoreAccess, StoreUse};

#[derive(Debug, Subcommand)]
pub(crate) enum PoolSubcommand {
    /// Create a pool, and the store if the store does not exist
    #[command(after_help = "\
Examples:
  margay pool create main 10.65.0.0/16
  margay pool create pods fd00:10:65::/48 --prefix-length 64
  margay pool create lab 10.70.0.0/24 --gateway 10.70.0.1
  margay pool create lab --auto /24
  margay pool create racks-b 10.80.0.0/16 --node-selector \"rack == 'b'\"")]
    Create(PoolCreate),
    /// List the pools
    #[command(visible_alias = "ls", after_help = "Examples:\n  margay pool list\n  margay pool list -o json")]
    List,
    /// Delete a pool that has no address in use
    #[command(
        visible_alias = "rm",
        after_help = "\
A pool with addresses in use is not deleted; the error says where they are.

Examples:
  margay pool delete lab
  margay pool delete lab --dry-run"
    )]
    Delete(PoolDelete),
}

#[derive(Debug, Args)]
pub(crate) struct PoolDelete {
    /// The pool's name
    pub(crate) name: String,

    /// Dry run: do all checks, but delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    #[command(flatten)]
    pub(crate) bridged: BridgedPoolArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct PoolCreate {
    /// The pool's name: lower-case letters, digits, '-' and '.'
    pub(crate) name: String,

    /// The range, such as 10.65.0.0/16 or fd00:10:65::/48
    #[arg(value_parser = cidr, required_unless_present = "auto")]
    pub(crate) cidr: Option<IpNet>,

    /// Choose an unused private range of this prefix length: IPv4 16 to 30, IPv6 48 to 126
    #[arg(long, value_name = "BITS", value_parser = auto_bits, conflicts_with_all = ["cidr", "gateway"])]
    pub(crate) auto: Option<u8>,

    /// Prefix length of a block: IPv4 20 to 32 [default: 26], IPv6 116 to 128 [default: 122]; a pool
    /// smaller than a default block becomes one block
    #[arg(long, value_name = "BITS")]
    pub(crate) block_size: Option<u8>,

    /// Assign prefixes of this length instead of single addresses
    #[arg(long, value_name = "BITS", conflicts_with_all = ["block_size", "gateway", "auto"])]
    pub(crate) prefix_length: Option<u8>,

    /// Reserve this address as the gateway of a bridged network, and reserve the network and broadcast addresses
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) gateway: Option<IpAddr>,

    /// Which nodes may use the pool, in Calico's selector language [default: all()]
    #[arg(long, value_name = "SELECTOR")]
    pub(crate) node_selector: Option<String>,

    /// Which namespaces may use the pool, in Calico's selector language [default: all of them]
    #[arg(long, value_name = "SELECTOR")]
    pub(crate) namespace_selector: Option<String>,

    /// Use the pool only in networks whose CNI configuration names the pool
    #[arg(long)]
    pub(crate) manual: bool,

    /// Dry run: do all checks, but create nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Parses an address range in CIDR notation, which must have no host bits. Refuses a single address, since a user
/// rarely wants a pool of one address.
pub(super) fn cidr(text: &str) -> Result<IpNet, String> {
    let net: IpNet = text.parse().map_err(|_| "not a range such as 10.65.0.0/16 or fd00:10:65::/48".to_owned())?;
    masked(net)
}

/// Parses a prefix length, which may start with a slash.
fn auto_bits(text: &str) -> Result<u8, String> {
    let bits = text.strip_prefix('/').unwrap_or(text).parse().ok();
    bits.filter(|bits| (16..=30).contains(bits) || (48..=126).contains(bits))
        .ok_or_else(|| "not a prefix length of 16 to 30, or of 48 to 126 for IPv6".to_owned())
}

/// Parses a single address, or an address range in CIDR notation without host bits.
pub(super) fn cidr_or_address(text: &str) -> Result<IpNet, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(address.into());
    }
    let net: IpNet = text.parse().map_err(|_| "not an address or a range such as 10.65.0.0/28".to_owned())?;
    masked(net)
}

fn masked(net: IpNet) -> Result<IpNet, String> {
    let trunc = net.trunc();
    if trunc == net { Ok(net) } else { Err(format!("it has host bits set; did you mean {trunc}?")) }
}

pub(crate) const ASSIGN_PREFIX: &str = "\
Examples:
  margay ipam assign-prefix racks --node node1
  margay ipam assign-prefix racks --node node1 -o json | jq -r .prefix
  margay ipam assign-prefix racks --node node1 --dry-run

The pool has prefixes (margay pool create NAME CIDR --prefix-length BITS). A node that has one of the pool keeps it: the
command says the same again. To release it: margay ipam release --handle HANDLE, with the handle that the command says.";

/// The arguments of `ipam assign-prefix`.
#[derive(Debug, Args)]
pub(crate) struct AssignPrefix {
    /// The name of the pool
    #[arg(value_name = "POOL")]
    pub(crate) pool: String,

    /// Node for which the prefix is reserved
    #[arg(long, value_name = "NODE")]
    pub(crate) node: String,

    /// Show what would be done, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The option that allows deleting the pool of a bridged network while it is in use.
#[derive(Debug, Args)]
pub(crate) struct BridgedPoolArgs {
    /// Delete this pool of a bridged network even if containers have addresses in it; their addresses stay assigned,
    /// but the gateway's address is no longer reserved
    #[arg(long, value_name = "POOL")]
    pub(crate) yes_delete_bridged_pool: Vec<String>,
}

/// Maximum number of attempts to create a pool in an unused address range. Between the choice of the address range and
/// the creation of the pool, another process may create an overlapping pool.
const MAX_ATTEMPTS: usize = 3;

/// A pool in the output of `pool list`.
#[derive(Clone, Debug, Serialize)]
struct PoolRow {
    name: String,
    #[serde(serialize_with = "as_text")]
    cidr: IpNet,
    /// The prefix length of the pool's blocks.
    block_size: u8,
    /// The length of the prefixes that the pool assigns; `None` for a pool that assigns addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_length: Option<u8>,
    /// The selector that a node must match to use the pool.
    node_selector: String,
    /// The selector that a namespace must match to use the pool; an empty string if all namespaces may use the pool.
    #[serde(skip_serializing_if = "String::is_empty")]
    namespace_selector: String,
    /// `Automatic` for a pool that all networks may use, or `Manual` for a pool that only networks that name the pool
    /// may use.
    assignment_mode: String,
    disabled: bool,
    /// The gateway of the bridged network that uses the pool, if there is a gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<String>,
}

impl TableRow for PoolRow {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("NAME"), |pool| pool.name.clone()),
            (Column::Text("CIDR"), |pool| pool.cidr.to_string()),
            (Column::Text("BLOCKS"), |pool| match pool.prefix_length {
                Some(length) => format!("/{} of /{length}", pool.block_size),
                None => format!("/{}", pool.block_size),
            }),
            (Column::Text("GATEWAY"), |pool| pool.gateway.clone().unwrap_or_default()),
            (Column::Text("NODES"), |pool| pool.node_selector.clone()),
            (Column::Text("STATE"), |pool| match (pool.disabled, pool.assignment_mode.as_str()) {
                (true, _) => "disabled".to_owned(),
                (false, "Manual") => "by name only".to_owned(),
                (false, _) => "enabled".to_owned(),
            }),
        ]
    }
}

impl PoolRow {
    fn of(pool: &Pool, gateway: Option<String>) -> Self {
        Self {
            name: pool.name().to_owned(),
            cidr: pool.cidr(),
            block_size: pool.block_size(),
            prefix_length: pool.prefix_length(),
            node_selector: match pool.node_selector() {
                "" => "all()".to_owned(),
                selector => selector.to_owned(),
            },
            namespace_selector: pool.namespace_selector().to_owned(),
            assignment_mode: pool.assignment_mode().as_str().to_owned(),
            disabled: !pool.is_enabled(),
            gateway,
        }
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for PoolCreate {
    fn store_use(&self) -> StoreUse {
        StoreUse::Make
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    fn check(&self) -> CommandResult<()> {
        let (new, _) = new_pool(self)?;
        check_new_pool(&new, &[], &[]).map_err(CommandFailure::new)?;
        match self.gateway {
            Some(gateway) => bridge::check(new.cidr, gateway).map_err(|error| Error::from(error).into()),
            None => Ok(()),
        }
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let (new, note) = new_pool(self)?;
        let pool = operator.ipam().create_pool(&new, self.gateway, deadline).await?;
        let row = PoolRow::of(&pool, self.gateway.map(|gateway| gateway.to_string()));
        let (name, cidr) = (&row.name, row.cidr);
        let mut text = match row.prefix_length {
            Some(length) => format!("Successfully created pool {name}: {cidr} in prefixes of /{length}"),
            None => format!("Successfully created pool {name}: {cidr} in blocks of /{}", row.block_size),
        };
        if let Some(gateway) = &row.gateway {
            text.push_str(&format!(", gateway {gateway}"));
        }
        Ok(CommandAnswer::new(text, &row)?.notes(note))
    }
}

/// With `--auto BITS`, creates a pool in an address range that overlaps with no network of this machine and with no
/// other pool.
#[async_trait(?Send)]
impl StoreCommand for PoolCreate {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let (used, notes) = read_used_networks(at.conf_dir);
        Ok(at.carry_out(&AutoRangePool { request: self, used }).await?.notes(notes))
    }
}

/// A request for a new pool whose address range is to overlap with no network of this machine and with no pool of the
/// store.
struct AutoRangePool<'a> {
    request: &'a PoolCreate,
    /// The networks that are in use on this machine.
    used: Vec<IpNet>,
}

impl AutoRangePool<'_> {
    /// Chooses a random address range that overlaps with no network in `taken`. Returns the chosen range together with
    /// the request that creates a pool of this range.
    fn choose_range(&self, taken: &[IpNet]) -> CommandResult<(IpNet, PoolCreate)> {
        let bits = self.request.auto.unwrap_or_default();
        let cidr = free_range::choose(bits, taken, || fastrand::u64(..)).ok_or_else(|| {
            CommandFailure::new(format!("there is no free private range of /{bits}"))
                .hint("name a CIDR instead of --auto")
        })?;
        Ok((cidr, PoolCreate { cidr: Some(cidr), auto: None, ..self.request.clone() }))
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for AutoRangePool<'_> {
    fn store_use(&self) -> StoreUse {
        StoreUse::Make
    }

    fn dry_run(&self) -> bool {
        self.request.dry_run
    }

    fn check(&self) -> CommandResult<()> {
        OpenStoreCommand::check(&self.choose_range(&self.used)?.1)
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let pools = operator.ipam().inventory(deadline).await?.pools;
            let taken: Vec<IpNet> = self.used.iter().copied().chain(pools.iter().map(Pool::cidr)).collect();
            let (cidr, request) = self.choose_range(&taken)?;
            match OpenStoreCommand::run(&request, operator, deadline).await {
                Err(_) if attempt < MAX_ATTEMPTS && overlaps_new_pool(operator, cidr, deadline).await? => {}
                done => return done,
            }
        }
    }
}

pub(crate) struct ListPools;

#[async_trait(?Send)]
impl OpenStoreCommand for ListPools {
    fn store_use(&self) -> StoreUse {
        StoreUse::Read
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let Inventory { pools, reservations } = operator.ipam().inventory(deadline).await?;
        let rows: Vec<_> = pools.iter().map(|pool| PoolRow::of(pool, gateway(pool, &reservations))).collect();
        let none = "there is no pool yet; make one with: margay pool create NAME CIDR";
        Ok(CommandAnswer::rows("pools", &rows)?.notes(rows.is_empty().then(|| none.to_owned())))
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for PoolDelete {
    fn store_use(&self) -> StoreUse {
        StoreUse::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    fn changes_pools(&self) -> bool {
        true
    }

    /// Deletes a pool whose addresses are not in use. If addresses of the pool are in use, the pool is deleted only if
    /// the command line explicitly allows the deletion.
    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let (name, in_use) = (&self.name, in_use(&self.bridged, &self.name));
        operator.delete_pool_if(name, in_use, deadline).await.map_err(|error| match &error {
            Error::NotFound { .. } => CommandFailure::from(error).hint("list the pools with: margay pool list"),
            Error::PoolInUse { gateway, .. } => {
                let advice = advice_in_use(name, gateway.is_some());
                CommandFailure::from(error).hint(advice)
            }
            _ => error.into(),
        })?;
        match self.dry_run {
            true => CommandAnswer::new(format!("Dry run: would delete pool {name}"), &json!({ "would_delete": name })),
            false => CommandAnswer::new(format!("Successfully deleted pool {name}"), &json!({ "deleted": name })),
        }
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for AssignPrefix {
    fn store_use(&self) -> StoreUse {
        StoreUse::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let Self { pool, node, .. } = self;
        let NodePrefix { prefix, handle, is_new } = operator.assign_node_prefix(pool, node, deadline).await?;
        let text = match is_new {
            true => format!("Successfully assigned {prefix} of pool {pool} to node {} ({handle})", printable(node)),
            false => format!("Node {} has {prefix} of pool {pool} already ({handle})", printable(node)),
        };
        let prefix = prefix.to_string();
        CommandAnswer::new(
            text,
            &json!({ "prefix": prefix, "pool": pool, "node": node, "handle": handle, "new": is_new }),
        )
    }
}

/// Returns whether the command line allows deleting a pool while its addresses are in use.
pub(super) fn in_use(leave: &BridgedPoolArgs, name: &str) -> InUse {
    let given = leave.yes_delete_bridged_pool.iter().any(|named| named == name);
    if given { InUse::DeleteBridged } else { InUse::Refuse }
}

/// Returns the advice for a pool that cannot be deleted because addresses of the pool are in use.
pub(super) fn advice_in_use(name: &str, is_bridged: bool) -> String {
    let advice = "stop the containers that use the addresses, or release the addresses with: margay ipam release; show \
                  which container has an address with: margay ipam show --ip";
    if is_bridged {
        format!("{advice}; to delete the pool although its containers keep running: --yes-delete-bridged-pool {name}")
    } else {
        advice.to_owned()
    }
}

/// Returns the new pool that the command line describes, and a note about its block size.
fn new_pool(request: &PoolCreate) -> CommandResult<(NewPool, Option<String>)> {
    let cidr = request.cidr.ok_or_else(|| CommandFailure::new("a pool needs a range"))?;
    let mut new = NewPool::new(&request.name, cidr);
    let mut note = None;
    if let Some(length) = request.prefix_length {
        new = new.with_prefix_length(length);
    } else {
        let size = block_size(cidr, request.block_size)?;
        (new, note) = (new.with_block_size(size.bits), size.note);
    }
    if let Some(selector) = &request.node_selector {
        new = new.with_node_selector(selector);
    }
    if let Some(selector) = &request.namespace_selector {
        new = new.with_namespace_selector(selector);
    }
    if request.manual {
        new = new.with_assignment_mode(AssignmentMode::Manual);
    }
    Ok((new, note))
}

/// Returns the gateway that is recorded for a pool, if there is one.
fn gateway(pool: &Pool, reservations: &[IpReservation]) -> Option<String> {
    let name = reservation_name(pool.name());
    let reservation = reservations.iter().find(|reservation| reservation.name() == name)?;
    reservation.resource().annotation(GATEWAY_ANNOTATION).map(str::to_owned)
}

/// True if another process has created a pool that overlaps with `cidr`.
async fn overlaps_new_pool(operator: &Operator, cidr: IpNet, deadline: Deadline) -> CommandResult<bool> {
    let pools = operator.ipam().inventory(deadline).await?.pools;
    Ok(pools.iter().any(|pool| overlap(pool.cidr(), cidr)))
}

/// Returns the networks that are in use on this machine: the networks of its routes, of CNI configurations and of
/// podman. The second list has a note for each source (routes, a CNI configuration, podman's networks) that could not
/// be read.
fn read_used_networks(conf_dir: &Path) -> (Vec<IpNet>, Vec<String>) {
    let mut notes = Vec::new();
    let mut used = host::routes().unwrap_or_else(|error| {
        notes.push(format!("the routes of this machine could not be read: {error}"));
        Vec::new()
    });
    let (networks, unread) = datastore::runtime_subnets(conf_dir);
    notes.extend(unread);
    used.extend(networks);
    (used, notes)
}

/// The block size of a new pool, with a note if the size is not the default size.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BlockSize {
    bits: u8,
    /// A text that says why the block size differs from the default.
    note: Option<String>,
}

/// Returns the block size of a new pool: the requested size, or else /26 for IPv4 and /122 for IPv6. Without a
/// requested size, a pool that is smaller than the default block is a single block.
///
/// # Errors
/// The requested block size is not allowed, or the block is larger than the pool.
fn block_size(cidr: IpNet, wanted: Option<u8>) -> CommandResult<BlockSize> {
    let (smallest, largest, usual) = if cidr.addr().is_ipv4() { (32, 20, 26) } else { (128, 116, 122) };
    let pool = cidr.prefix_len();
    match wanted {
        Some(bits) if !(largest..=smallest).contains(&bits) => {
            Err(CommandFailure::new(format!("--block-size {bits} is not between {largest} and {smallest}")))
        }
        Some(bits) if bits < pool => {
            Err(CommandFailure::new(format!("a block of /{bits} does not fit into pool {cidr}"))
                .hint(format!("leave out --block-size, or set --block-size to a value from {pool} to {smallest}")))
        }
        Some(bits) => Ok(BlockSize { bits, note: None }),
        None if pool > usual => {
            let note = format!("the block size is /{pool}, the whole pool, since the usual /{usual} does not fit in");
            Ok(BlockSize { bits: pool, note: Some(note) })
        }
        None => Ok(BlockSize { bits: usual, note: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Format;

    fn size(cidr: &str, wanted: Option<u8>) -> CommandResult<BlockSize> {
        block_size(cidr.parse().unwrap(), wanted)
    }

    #[test]
    fn pool_block_size_fits_pool() {
        let usual = |bits| BlockSize { bits, note: None };
        assert_eq!(size("10.0.0.0/16", None).unwrap(), usual(26));
        assert_eq!(size("10.0.0.0/26", None).unwrap(), usual(26));
        assert_eq!(size("fd00::/64", None).unwrap(), usual(122));
        assert_eq!(size("10.0.0.0/16", Some(20)).unwrap(), usual(20));
        assert_eq!(size("10.0.0.0/28", Some(32)).unwrap(), usual(32));
        let small = size("10.0.0.0/28", None).unwrap();
        assert_eq!(small.bits, 28);
        assert!(small.note.unwrap().contains("/28"));
        assert_eq!(size("fd00::/126", None).unwrap().bits, 126);
        assert_eq!(size("10.0.0.0/32", None).unwrap().bits, 32);
    }

    #[test]
    fn pool_block_size_is_refused_when_impossible() {
        for (cidr, wanted) in [("10.0.0.0/16", 19), ("10.0.0.0/16", 33), ("fd00::/64", 26), ("10.0.0.0/28", 26)] {
            assert!(size(cidr, Some(wanted)).is_err(), "{cidr} {wanted}");
        }
    }

    #[test]
    fn pool_list_prints_table() {
        let pool = PoolRow {
            name: "lab".into(),
            cidr: "10.70.0.0/24".parse().unwrap(),
            block_size: 26,
            prefix_length: None,
            node_selector: "all()".into(),
            namespace_selector: String::new(),
            assignment_mode: "Automatic".into(),
            disabled: false,
            gateway: Some("10.70.0.1".into()),
        };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        CommandAnswer::rows("pools", std::slice::from_ref(&pool))
            .unwrap()
            .print(Format::Table, &mut out, &mut err)
            .unwrap();
        let expected = "\
+------+--------------+--------+-----------+-------+---------+
| NAME | CIDR         | BLOCKS | GATEWAY   | NODES | STATE   |
+------+--------------+--------+-----------+-------+---------+
| lab  | 10.70.0.0/24 | /26    | 10.70.0.1 | all() | enabled |
+------+--------------+--------+-----------+-------+---------+
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let mut out = Vec::new();
        CommandAnswer::rows("pools", &[pool]).unwrap().print(Format::Json, &mut out, &mut err).unwrap();
        let found: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let expected = serde_json::json!({"pools": [{
            "name": "lab", "cidr": "10.70.0.0/24", "block_size": 26, "node_selector": "all()",
            "assignment_mode": "Automatic", "disabled": false, "gateway": "10.70.0.1",
        }]});
        assert_eq!(found, expected);
        assert!(err.is_empty());
    }

    #[test]
    fn pool_ranges_have_no_host_bits() {
        assert_eq!(cidr("10.65.0.0/16").unwrap().to_string(), "10.65.0.0/16");
        assert!(cidr("10.65.0.1/16").unwrap_err().contains("10.65.0.0/16"));
        assert!(cidr("10.65.0.1").is_err());
        assert_eq!(cidr_or_address("fd00::1").unwrap().to_string(), "fd00::1/128");
        assert!(cidr_or_address("10.0.0.0/33").is_err());
    }
}
