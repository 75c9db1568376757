//! `margay gc --gone` and `--free`: the estates of nodes that are gone for good.
//!
//! The workload endpoints are deleted first, then the addresses are released, then the blocks: no other container gets
//! an address that an endpoint still has. The same command goes on with a run that was broken off. The guards of each
//! commit are its addresses, as they were read, and that the node is still not registered.

use std::collections::{BTreeMap, BTreeSet};

use ipam_core::gc::{Estate, Estates, Evidence, Known, MOST_ENDPOINTS, NodeEndpoint, batches};
use ipnet::IpNet;
use kv::Deadline;
use tokio::runtime::Runtime;

use super::args::Gc;
use super::gone_report::{GoneReport, NodeReport, Skipped};
use super::machine::{Machine, own_names};
use super::report::EndpointRow;
use super::{COMMITS_AT_ONCE, PATIENCE, nodes, survey};
use crate::command::{Call, runtime};
use crate::error::{Failure, Result};
use crate::output::printable;
use crate::store::{Need, StoreAt};

/// Finds the nodes and their estates, and with `--apply` frees them.
pub(super) fn run(args: &Gc, call: &mut Call<'_>) -> Result<u8> {
    let list = args.nodes.as_deref().map(|path| nodes::read(path, args.empty)).transpose()?;
    let location = call.choose()?.location;
    let at = call.at(&location);
    let (machine, own) = (Machine::of(None)?, own_names());
    let runtime = runtime()?;
    let named = args.free.then(|| args.node.clone().unwrap_or_default());
    let (estates, mut skipped) = match &named {
        Some(node) => (one(at, &runtime, node, &own)?, Vec::new()),
        None => all(at, &runtime, list.as_ref(), &own)?,
    };
    // The stores were read before: an address that is assigned meanwhile is no candidate.
    let evidence = machine.whole_evidence()?;
    let mut reports = Vec::new();
    for estate in estates.values() {
        match here(estate, &evidence) {
            Some(why) if named.is_some() => return Err(is_this_machine(&estate.node, &why)),
            Some(why) => skipped.push(Skipped { node: estate.node.clone(), why }),
            None => reports.push((estate, NodeReport::of(&location, estate))),
        }
    }
    if args.apply {
        for (estate, report) in &mut reports {
            if let Err(failure) = runtime.block_on(free(at, estate, report)) {
                failure.print(call.err);
                report.failed = true;
            }
        }
    }
    let stores: Vec<NodeReport> = reports.into_iter().map(|(_, report)| report).collect();
    let failed = stores.iter().any(|report| report.failed);
    call.print(GoneReport { applied: args.apply, node: named, stores, skipped }.answer()?)?;
    match failed {
        true => {
            Err(Failure::new("not everything could be freed; see above").hint("the same command goes on where it was"))
        }
        false => Ok(0),
    }
}

/// Nodes by name.
type ByNode = BTreeMap<String, Estate>;

/// The estate of a named node; an error unless it is gone.
fn one(at: StoreAt<'_>, runtime: &Runtime, node: &str, own: &BTreeSet<String>) -> Result<ByNode> {
    let found = runtime.block_on(survey(at, |_, name| name == node))?;
    if found.known.registered.contains(node) {
        return Err(Failure::new(format!("node {} is registered in the store; nothing was freed", printable(node)))
            .hint(format!("if it is gone for good, delete it first: margay delete node {}", printable(node))));
    }
    if own.contains(node) || found.known.pinned.as_deref() == Some(node) {
        return Err(is_this_machine(node, "it is the name of this machine"));
    }
    Ok(found.estates)
}

/// The estates of all nodes that are gone, and the nodes that are skipped.
fn all(
    at: StoreAt<'_>,
    runtime: &Runtime,
    list: Option<&BTreeSet<String>>,
    own: &BTreeSet<String>,
) -> Result<(ByNode, Vec<Skipped>)> {
    let wanted = |known: &Known, node: &str| {
        !known.registered.contains(node)
            && known.pinned.as_deref() != Some(node)
            && list.is_none_or(|list| !list.contains(node))
    };
    let Estates { known, nodes, mut estates } = runtime.block_on(survey(at, wanted))?;
    let ours: BTreeSet<&String> = own.iter().chain(&known.pinned).collect();
    match list {
        None if known.registered.is_empty() => {
            return Err(Failure::new(
                "no node is registered in the store, so nobody can tell which are gone; nothing was freed",
            )
            .hint(
                "list the nodes that there are with --nodes FILE, or name the one that is gone: --node NAME --free",
            ));
        }
        Some(list) => check_list(list, &known, &nodes, &ours)?,
        None => {}
    }
    let mut skipped = Vec::new();
    for name in own {
        if estates.remove(name).is_some() {
            skipped.push(Skipped { node: name.clone(), why: "it is the name of this machine".to_owned() });
        }
    }
    Ok((estates, skipped))
}

/// Refuses a list that cannot be of the nodes of this store: a list without this machine, if the machine is a node of
/// the store, and a list without any registered node. Such a list was made elsewhere.
fn check_list(
    list: &BTreeSet<String>,
    known: &Known,
    nodes: &BTreeSet<String>,
    ours: &BTreeSet<&String>,
) -> Result<()> {
    let refused = |what: String| {
        Failure::new(format!("{what}; nothing was freed"))
            .hint("see that the list and the store are of the same cluster, and that names are written as in the store")
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

/// Why a node is this very machine under another name; `None` if it is not.
fn here(estate: &Estate, evidence: &Evidence) -> Option<String> {
    let of_endpoints = estate.endpoints.iter().flat_map(|endpoint| &endpoint.addresses);
    let mut units = estate.holds.iter().map(|hold| hold.unit).chain(of_endpoints.map(|ip| IpNet::from(*ip)));
    if let Some(unit) = units.find(|unit| evidence.is_on_an_interface(*unit)) {
        return Some(format!("an interface of this machine has its address {}", unit.addr()));
    }
    let of_this_boot = estate.holds.iter().find(|hold| hold.boot() == Some(evidence.boot.as_str()))?;
    Some(format!("its address {} was given in this very boot of this machine", of_this_boot.address))
}

fn is_this_machine(node: &str, why: &str) -> Failure {
    let node = printable(node);
    Failure::new(format!("node {node} is this very machine: {why}; nothing was freed")).hint(format!(
        "margay gc --boot and --netns free what it does not use; to make all that it has another node's: margay gc --node \
         {node} --move-to NAME"
    ))
}

/// Frees the addresses of a node, and releases its blocks. The store is opened for some commits at a time, so that
/// containers can start meanwhile.
async fn free(at: StoreAt<'_>, estate: &Estate, report: &mut NodeReport) -> Result<()> {
    let endpoints: Vec<&[NodeEndpoint]> = estate.endpoints.chunks(MOST_ENDPOINTS).collect();
    for some in endpoints.chunks(COMMITS_AT_ONCE) {
        at.on_ipam(Need::Release, async |operator| {
            for batch in some {
                let deleted =
                    operator.ipam().delete_endpoints_of_gone(&estate.node, batch, Deadline::after(PATIENCE)).await;
                report.deleted_endpoints.extend(deleted.map_err(reported)?.into_iter().map(EndpointRow::from));
            }
            Ok(())
        })
        .await?;
    }
    for some in batches(&estate.holds).chunks(COMMITS_AT_ONCE) {
        at.on_ipam(Need::Release, async |operator| {
            for batch in some {
                let freed = operator
                    .ipam()
                    .free_of_gone(&estate.node, batch, Deadline::after(PATIENCE))
                    .await
                    .map_err(reported)?;
                report.freed.extend(freed.released);
                report.changed.extend(freed.changed);
            }
            Ok(())
        })
        .await?;
    }
    let blocks: Vec<IpNet> = estate.blocks().collect();
    let mut damaged = None;
    for some in blocks.chunks(COMMITS_AT_ONCE) {
        at.on_ipam(Need::Release, async |operator| {
            for cidr in some {
                match operator.ipam().give_up_block(&estate.node, *cidr, Deadline::after(PATIENCE)).await {
                    Ok(true) => report.gave_up.push(*cidr),
                    Ok(false) => {}
                    // One block that cannot be read must not keep the other blocks from their release.
                    Err(error @ ipam_core::Error::Malformed(_)) => damaged = Some(error),
                    Err(error) => return Err(reported(error)),
                }
            }
            Ok(())
        })
        .await?;
    }
    at.on_ipam(Need::Release, async |operator| {
        operator.ipam().drop_legacy(&estate.node, Deadline::after(PATIENCE)).await.map_err(reported)
    })
    .await?;
    damaged.map_or(Ok(()), |error| Err(reported(error)))
}

/// A failure with control characters escaped: the error may have names from the store in it.
fn reported(error: ipam_core::Error) -> Failure {
    Failure::new(printable(&error.to_string()))
}
