//! Pools.

use ipam_core::assign::bridge::{self, GATEWAY_ANNOTATION, reservation_name};
use ipam_core::model::{AssignmentMode, IpReservation, NewPool, Pool, check_new_pool};
use ipam_core::{Error, Inventory};
use ipam_operator::{InUse, NodePrefix, Operator};
use kv::Deadline;
use serde_json::json;

use crate::answer::Answer;
use crate::args::{AssignPrefix, Bridged, PoolCreate, PoolDelete};
use crate::error::{Failure, Result};
use crate::output::printable;
use crate::pools::{PoolRow, block_size, listing};

/// Checks the request without the store, so that a wrong request makes no store.
pub(super) fn check(request: &PoolCreate) -> Result<()> {
    let (new, _) = new_pool(request)?;
    check_new_pool(&new, &[], &[]).map_err(Failure::new)?;
    match request.gateway {
        Some(gateway) => bridge::check(new.cidr, gateway).map_err(|error| Error::from(error).into()),
        None => Ok(()),
    }
}

/// Makes a pool.
pub(super) async fn create(ipam: &Operator, request: &PoolCreate, deadline: Deadline) -> Result<Answer> {
    let (new, note) = new_pool(request)?;
    let pool = ipam.create_pool(&new, request.gateway, deadline).await?;
    let row = row(&pool, request.gateway.map(|gateway| gateway.to_string()));
    let (name, cidr) = (&row.name, row.cidr);
    let mut text = match row.prefix_length {
        Some(length) => format!("Successfully created pool {name}: {cidr} in prefixes of /{length}"),
        None => format!("Successfully created pool {name}: {cidr} in blocks of /{}", row.block_size),
    };
    if let Some(gateway) = &row.gateway {
        text.push_str(&format!(", gateway {gateway}"));
    }
    let answer = Answer::new(text, &row)?;
    Ok(match note {
        Some(note) => answer.note(note),
        None => answer,
    })
}

/// Lists the pools.
pub(super) async fn list(ipam: &Operator, deadline: Deadline) -> Result<Answer> {
    let Inventory { pools, reservations } = ipam.inventory(deadline).await?;
    let rows: Vec<PoolRow> = pools.iter().map(|pool| row(pool, gateway(pool, &reservations))).collect();
    listing(&rows)
}

/// Deletes a pool that is not in use, or whose deletion the arguments allow.
pub(super) async fn delete(ipam: &Operator, args: &PoolDelete, deadline: Deadline) -> Result<Answer> {
    let (name, in_use) = (&args.name, in_use(&args.bridged, &args.name));
    ipam.delete_pool_if(name, in_use, deadline).await.map_err(|error| match &error {
        Error::NotFound { .. } => Failure::from(error).hint("see which there are with: margay pool list"),
        Error::PoolInUse { gateway, .. } => {
            let advice = advice_in_use(name, gateway.is_some());
            Failure::from(error).hint(advice)
        }
        _ => error.into(),
    })?;
    if args.dry_run {
        return Answer::new(format!("Dry run: would delete pool {name}"), &json!({ "would_delete": name }));
    }
    Answer::new(format!("Successfully deleted pool {name}"), &json!({ "deleted": name }))
}

/// Assigns a prefix of a pool to a node.
pub(super) async fn assign_prefix(ipam: &Operator, what: &AssignPrefix, deadline: Deadline) -> Result<Answer> {
    let (pool, node) = (&what.pool, &what.node);
    let NodePrefix { prefix, handle, is_new } = ipam.assign_node_prefix(pool, node, deadline).await?;
    let text = match is_new {
        true => format!("Successfully assigned {prefix} of pool {pool} to node {} ({handle})", printable(node)),
        false => format!("Node {} has {prefix} of pool {pool} already ({handle})", printable(node)),
    };
    let prefix = prefix.to_string();
    Answer::new(text, &json!({ "prefix": prefix, "pool": pool, "node": node, "handle": handle, "new": is_new }))
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

fn row(pool: &Pool, gateway: Option<String>) -> PoolRow {
    PoolRow {
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

/// The gateway that is on record for a pool.
fn gateway(pool: &Pool, reservations: &[IpReservation]) -> Option<String> {
    let name = reservation_name(pool.name());
    let reservation = reservations.iter().find(|reservation| reservation.name() == name)?;
    reservation.resource().annotation(GATEWAY_ANNOTATION).map(str::to_owned)
}
