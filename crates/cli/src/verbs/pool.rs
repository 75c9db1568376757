//! Pools.

use std::path::Path;

use async_trait::async_trait;
use ipam_core::assign::bridge::{self, GATEWAY_ANNOTATION, reservation_name};
use ipam_core::model::{AssignmentMode, IpReservation, NewPool, Pool, check_new_pool};
use ipam_core::net::overlap;
use ipam_core::{Error, Inventory, free_range};
use ipam_operator::{InUse, NodePrefix, Operator};
use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;
use serde_json::json;

use crate::answer::Answer;
use crate::args::{AssignPrefix, Bridged, PoolCreate, PoolDelete};
use crate::command::{OnOpenStore, OnStore};
use crate::error::{Failure, Result};
use crate::output::{Column, Columns, Row, as_text, printable};
use crate::store::{Need, StoreAt};

/// The attempts to make a pool in a free range, as another process may make a pool meanwhile.
const ATTEMPTS: usize = 3;

/// A pool as a row.
#[derive(Clone, Debug, Serialize)]
struct PoolRow {
    /// Its name.
    name: String,
    /// Its range.
    #[serde(serialize_with = "as_text")]
    cidr: IpNet,
    /// The prefix length of its blocks.
    block_size: u8,
    /// The length of the prefixes that are assigned from it; `None` if it has addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_length: Option<u8>,
    /// The selector of the nodes that may use it.
    node_selector: String,
    /// The selector of the namespaces that may use it; empty means all.
    #[serde(skip_serializing_if = "String::is_empty")]
    namespace_selector: String,
    /// `Automatic`, or `Manual` if only networks that name the pool get addresses from it.
    assignment_mode: String,
    /// True if it is disabled.
    disabled: bool,
    /// The gateway, if it is the pool of a bridged network.
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<String>,
}

impl Row for PoolRow {
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
impl OnOpenStore for PoolCreate {
    fn need(&self) -> Need {
        Need::Make
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    fn check(&self) -> Result<()> {
        let (new, _) = new_pool(self)?;
        check_new_pool(&new, &[], &[]).map_err(Failure::new)?;
        match self.gateway {
            Some(gateway) => bridge::check(new.cidr, gateway).map_err(|error| Error::from(error).into()),
            None => Ok(()),
        }
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
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
        Ok(Answer::new(text, &row)?.notes(note))
    }
}

/// With `--auto BITS`: a pool in a range that collides with nothing that this machine knows.
#[async_trait(?Send)]
impl OnStore for PoolCreate {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let (used, notes) = used_here(at.conf_dir);
        Ok(at.carry_out(&Auto { request: self, used }).await?.notes(notes))
    }
}

/// A pool in a range that is free here and in the store.
struct Auto<'a> {
    request: &'a PoolCreate,
    /// The networks that this machine uses.
    used: Vec<IpNet>,
}

impl Auto<'_> {
    /// The request with a range that overlaps with none of these.
    fn beside(&self, taken: &[IpNet]) -> Result<(IpNet, PoolCreate)> {
        let bits = self.request.auto.unwrap_or_default();
        let cidr = free_range::choose(bits, taken, || fastrand::u64(..)).ok_or_else(|| {
            Failure::new(format!("there is no free private range of /{bits}")).hint("name the range yourself")
        })?;
        Ok((cidr, PoolCreate { cidr: Some(cidr), auto: None, ..self.request.clone() }))
    }
}

#[async_trait(?Send)]
impl OnOpenStore for Auto<'_> {
    fn need(&self) -> Need {
        Need::Make
    }

    fn dry_run(&self) -> bool {
        self.request.dry_run
    }

    fn check(&self) -> Result<()> {
        OnOpenStore::check(&self.beside(&self.used)?.1)
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let pools = operator.ipam().inventory(deadline).await?.pools;
            let taken: Vec<IpNet> = self.used.iter().copied().chain(pools.iter().map(Pool::cidr)).collect();
            let (cidr, request) = self.beside(&taken)?;
            match OnOpenStore::run(&request, operator, deadline).await {
                Err(_) if attempt < ATTEMPTS && has_new(operator, cidr, deadline).await? => {}
                done => return done,
            }
        }
    }
}

/// The pools.
pub(super) struct List;

#[async_trait(?Send)]
impl OnOpenStore for List {
    fn need(&self) -> Need {
        Need::Read
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let Inventory { pools, reservations } = operator.ipam().inventory(deadline).await?;
        let rows: Vec<_> = pools.iter().map(|pool| PoolRow::of(pool, gateway(pool, &reservations))).collect();
        let none = "there is no pool yet; make one with: margay pool create NAME CIDR";
        Ok(Answer::rows("pools", &rows)?.notes(rows.is_empty().then(|| none.to_owned())))
    }
}

#[async_trait(?Send)]
impl OnOpenStore for PoolDelete {
    fn need(&self) -> Need {
        Need::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    fn changes_pools(&self) -> bool {
        true
    }

    /// Deletes a pool that is not in use, or whose deletion the arguments allow.
    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let (name, in_use) = (&self.name, in_use(&self.bridged, &self.name));
        operator.delete_pool_if(name, in_use, deadline).await.map_err(|error| match &error {
            Error::NotFound { .. } => Failure::from(error).hint("see which there are with: margay pool list"),
            Error::PoolInUse { gateway, .. } => {
                let advice = advice_in_use(name, gateway.is_some());
                Failure::from(error).hint(advice)
            }
            _ => error.into(),
        })?;
        match self.dry_run {
            true => Answer::new(format!("Dry run: would delete pool {name}"), &json!({ "would_delete": name })),
            false => Answer::new(format!("Successfully deleted pool {name}"), &json!({ "deleted": name })),
        }
    }
}

#[async_trait(?Send)]
impl OnOpenStore for AssignPrefix {
    fn need(&self) -> Need {
        Need::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let Self { pool, node, .. } = self;
        let NodePrefix { prefix, handle, is_new } = operator.assign_node_prefix(pool, node, deadline).await?;
        let text = match is_new {
            true => format!("Successfully assigned {prefix} of pool {pool} to node {} ({handle})", printable(node)),
            false => format!("Node {} has {prefix} of pool {pool} already ({handle})", printable(node)),
        };
        let prefix = prefix.to_string();
        Answer::new(text, &json!({ "prefix": prefix, "pool": pool, "node": node, "handle": handle, "new": is_new }))
    }
}

/// The fate of a pool in use.
pub(super) fn in_use(leave: &Bridged, name: &str) -> InUse {
    let given = leave.yes_delete_bridged_pool.iter().any(|named| named == name);
    if given { InUse::DeleteBridged } else { InUse::Refuse }
}

/// The advice for a pool in use.
pub(super) fn advice_in_use(name: &str, is_bridged: bool) -> String {
    let advice = "end what uses them, or take them back with: margay ipam release; who has one: margay ipam show --ip";
    if is_bridged {
        format!("{advice}; to delete it although its containers run on: --yes-delete-bridged-pool {name}")
    } else {
        advice.to_owned()
    }
}

/// The pool that the arguments describe, and a note about the size of its blocks.
fn new_pool(request: &PoolCreate) -> Result<(NewPool, Option<String>)> {
    let cidr = request.cidr.ok_or_else(|| Failure::new("a pool needs a range"))?;
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

/// The gateway that is on record for a pool.
fn gateway(pool: &Pool, reservations: &[IpReservation]) -> Option<String> {
    let name = reservation_name(pool.name());
    let reservation = reservations.iter().find(|reservation| reservation.name() == name)?;
    reservation.resource().annotation(GATEWAY_ANNOTATION).map(str::to_owned)
}

/// True if a pool overlaps with this range by now.
async fn has_new(operator: &Operator, cidr: IpNet, deadline: Deadline) -> Result<bool> {
    let pools = operator.ipam().inventory(deadline).await?.pools;
    Ok(pools.iter().any(|pool| overlap(pool.cidr(), cidr)))
}

/// The networks that this machine uses: its routes, the CNI's networks and podman's. The notes say which of these could not be
/// read.
fn used_here(conf_dir: &Path) -> (Vec<IpNet>, Vec<String>) {
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

/// The block size of a new pool, with a note.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BlockSize {
    /// The prefix length.
    bits: u8,
    /// The reason if it is not the usual size.
    note: Option<String>,
}

/// The block size for a pool: the wanted one, else /26 or /122, or the whole pool if it is smaller than that.
///
/// # Errors
/// No block can have the wanted size, or it is larger than the pool.
fn block_size(cidr: IpNet, wanted: Option<u8>) -> Result<BlockSize> {
    let (smallest, largest, usual) = if cidr.addr().is_ipv4() { (32, 20, 26) } else { (128, 116, 122) };
    let pool = cidr.prefix_len();
    match wanted {
        Some(bits) if !(largest..=smallest).contains(&bits) => {
            Err(Failure::new(format!("--block-size {bits} is not between {largest} and {smallest}")))
        }
        Some(bits) if bits < pool => Err(Failure::new(format!("a block of /{bits} does not fit into pool {cidr}"))
            .hint(format!("leave --block-size away, or give one between {pool} and {smallest}"))),
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
    use crate::args::Format;

    fn size(cidr: &str, wanted: Option<u8>) -> Result<BlockSize> {
        block_size(cidr.parse().unwrap(), wanted)
    }

    #[test]
    fn the_block_size_fits_the_pool() {
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
    fn a_block_size_that_cannot_be_is_refused() {
        for (cidr, wanted) in [("10.0.0.0/16", 19), ("10.0.0.0/16", 33), ("fd00::/64", 26), ("10.0.0.0/28", 26)] {
            assert!(size(cidr, Some(wanted)).is_err(), "{cidr} {wanted}");
        }
    }

    #[test]
    fn a_listing() {
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
        Answer::rows("pools", std::slice::from_ref(&pool)).unwrap().print(Format::Table, &mut out, &mut err).unwrap();
        let expected = "\
+------+--------------+--------+-----------+-------+---------+
| NAME | CIDR         | BLOCKS | GATEWAY   | NODES | STATE   |
+------+--------------+--------+-----------+-------+---------+
| lab  | 10.70.0.0/24 | /26    | 10.70.0.1 | all() | enabled |
+------+--------------+--------+-----------+-------+---------+
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let mut out = Vec::new();
        Answer::rows("pools", &[pool]).unwrap().print(Format::Json, &mut out, &mut err).unwrap();
        let found: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let expected = serde_json::json!({"pools": [{
            "name": "lab", "cidr": "10.70.0.0/24", "block_size": 26, "node_selector": "all()",
            "assignment_mode": "Automatic", "disabled": false, "gateway": "10.70.0.1",
        }]});
        assert_eq!(found, expected);
        assert!(err.is_empty());
    }
}
