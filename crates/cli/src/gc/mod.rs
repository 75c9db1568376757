//! `margay gc`: freeing the addresses that nothing on this machine uses any more. The estates of nodes that are gone
//! are in [`gone`], those of a renamed node in [`hand_over`].
//!
//! The stores are read and closed, then the network namespaces are scanned, then the stores are opened again to free
//! the leftovers. So no container waits for a scan, and an address that is assigned meanwhile is no candidate.

pub(crate) mod args;
mod attachments;
mod gone;
mod gone_report;
mod hand_over;
mod list;
mod machine;
mod nodes;
pub(crate) mod reach;
mod report;
mod scans;
mod stores;

use std::io::Write;
use std::time::Duration;

use datastore::OpenStore;
use hand_over::HandOver;
use ipam_core::gc::{
    Allocation, Estates, Evidence, Hold, Holdings, Judged, Known, RuntimeList, batches, unlisted, with_endpoints,
};
use ipam_operator::Operator;
use kv::Deadline;
use machine::Machine;
use reach::Memory;
use report::{EndpointRow, Left, LeftByList, Reason, Report, Row, StoreReport};
use scans::{APART, Scans};
use stores::Stores;
use tokio::runtime::Runtime;

use crate::command::{Call, Standalone, runtime};
use crate::error::{Failure, Result};
use crate::store::{Need, StoreAt};
use args::Gc;

/// The longest time for one read of a store, or one commit.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of commits before the store is closed for a moment, so that containers can start.
const COMMITS_AT_ONCE: usize = 16;

/// The request, and its evidence.
struct Request<'r> {
    args: &'r Gc,
    machine: &'r Machine,
    lists: &'r [RuntimeList],
}

/// A store and the findings in it.
struct Found<'l> {
    at: StoreAt<'l>,
    report: StoreReport,
    /// The holdings of the node.
    holdings: Holdings,
    /// The allocations that may be freed.
    ready: Vec<Allocation>,
    /// The same, with the workload endpoints that are deleted with them.
    going: Vec<Hold>,
    /// The time until all waiting addresses may be freed.
    missing: Option<Duration>,
}

impl Standalone for Gc {
    /// Finds the leftovers, and with `--apply` frees them.
    fn run(&self, call: &mut Call<'_>) -> Result<u8> {
        match &self.move_to {
            Some(to) => return call.on_store(&HandOver::new(self, to)?),
            None if self.gone || self.free => return gone::run(self, call),
            None => {}
        }
        // Lists are read first: the older a list is, the fewer addresses are freed because of it.
        let lists = attachments::read(&self.attachments, self.empty)?;
        let stores = match stores::choose(self, call)? {
            Stores::These(stores) => stores,
            Stores::None(why) => {
                call.print(Report::default().answer_because(why)?)?;
                return Ok(0);
            }
        };
        let stores: Vec<StoreAt<'_>> = stores.iter().map(|chosen| call.at(&chosen.location)).collect();
        let machine = Machine::of(self.node.as_deref())?;
        let request = Request { args: self, machine: &machine, lists: &lists };
        let runtime = runtime()?;
        let (mut found, mut evidence) = once(&request, &stores, &runtime, call.err)?;
        let missing = found.iter().filter_map(|store| store.missing).max();
        if let Some(missing) = missing.filter(|_| self.wait) {
            _ = writeln!(call.err, "note: looking again in {} s", missing.as_secs() + 1);
            std::thread::sleep(missing);
            (found, evidence) = once(&request, &stores, &runtime, call.err)?;
        }
        for store in &mut found {
            if let Err(failure) = runtime.block_on(find_endpoints(&machine.node, &evidence, store)) {
                failure.print(call.err);
                store.report.failed = true;
            }
        }
        if self.apply {
            for store in &mut found {
                if let Err(failure) = runtime.block_on(free(store)) {
                    failure.print(call.err);
                    store.report.failed = true;
                }
            }
        }
        let failed = found.iter().any(|store| store.report.failed);
        let mut report = Report { applied: self.apply, stores: found.into_iter().map(|store| store.report).collect() };
        call.print(report.answer()?)?;
        if failed { Err(Failure::new("not every store was gone through; see above")) } else { Ok(0) }
    }
}

/// Reads all stores, scans the machine, and decides.
fn once<'l>(
    request: &Request<'_>,
    stores: &[StoreAt<'l>],
    runtime: &Runtime,
    err: &mut dyn Write,
) -> Result<(Vec<Found<'l>>, Evidence)> {
    let Request { args, machine, .. } = request;
    let mut read = Vec::new();
    for at in stores {
        match runtime.block_on(holdings(request, *at)) {
            Ok(found) => read.push((*at, Ok(found))),
            // One of several stores that cannot be read must not keep the other stores from being cleaned.
            Err(failure) if args.all_stores || args.local_stores => {
                failure.print(err);
                read.push((*at, Err(())));
            }
            Err(failure) => return Err(failure),
        }
    }
    let evidence = machine.evidence()?;
    let decide = |(at, read): (StoreAt<'l>, std::result::Result<_, ()>)| match read {
        Ok(Some((operator, holdings))) => decide(request, at, &operator, holdings, &evidence),
        Ok(None) => Ok(Found::nothing(at, StoreReport { missing: true, ..StoreReport::of(at.location) })),
        Err(()) => Ok(Found::nothing(at, StoreReport { failed: true, ..StoreReport::of(at.location) })),
    };
    let found = read.into_iter().map(decide).collect::<Result<_>>()?;
    Ok((found, evidence))
}

impl<'l> Found<'l> {
    fn nothing(at: StoreAt<'l>, report: StoreReport) -> Self {
        let (holdings, ready, going) = (Holdings::default(), Vec::new(), Vec::new());
        Self { at, report, holdings, ready, going, missing: None }
    }

    /// Adds allocations that may be freed.
    fn take(&mut self, allocations: Vec<Allocation>, reason: Reason) {
        self.report.candidates.extend(allocations.iter().map(|one| Row::new(one, reason)));
        self.ready.extend(allocations);
    }
}

/// The holdings of the node in a store, read in one opening; `None` if there is no store.
async fn holdings(request: &Request<'_>, at: StoreAt<'_>) -> Result<Option<(Operator, Holdings)>> {
    let Some(open) = at.open_if_there().await? else { return Ok(None) };
    let operator = Operator::new(open.store(), at.nodes());
    let holdings = at.and_close(open, async |_: &OpenStore| read(request, at, &operator).await).await?;
    Ok(Some((operator, holdings)))
}

/// The addresses that the node holds, in the blocks that this scan reads.
async fn read(request: &Request<'_>, at: StoreAt<'_>, operator: &Operator) -> Result<Holdings> {
    let Request { args, machine: Machine { node, boot_id }, .. } = request;
    let Some(memory) = Memory::of(&args.looks, at.location, node, boot_id) else {
        return Ok(operator.ipam().holdings(node, Deadline::after(PATIENCE)).await?);
    };
    let plan = memory.plan(operator, args.all_blocks).await?;
    let (holdings, passed) = operator.ipam().holdings_within(node, &plan.reach, Deadline::after(PATIENCE)).await?;
    plan.keep(&holdings, passed);
    Ok(holdings)
}

/// Sorts the allocations: those that may be freed, those that need another scan, and those that stay.
fn decide<'l>(
    request: &Request<'_>,
    at: StoreAt<'l>,
    operator: &Operator,
    holdings: Holdings,
    evidence: &Evidence,
) -> Result<Found<'l>> {
    let args = request.args;
    let mut judged = operator.ipam().judge(&holdings, evidence);
    let mut found = Found::nothing(at, StoreReport::of(at.location));
    if args.boot {
        found.take(std::mem::take(&mut judged.earlier), Reason::EarlierBoot);
    }
    let by_list = match request.lists {
        [] => None,
        lists => Some(by_list(lists, &mut judged, &mut found)?),
    };
    if args.netns {
        let earlier = std::mem::take(&mut judged.earlier).into_iter().map(|one| (one, Reason::EarlierBoot));
        let gone = std::mem::take(&mut judged.gone).into_iter().map(|one| (one, Reason::NamespaceGone));
        by_scans(request, earlier.chain(gone).collect(), &mut found)?;
    }
    found.report.node.clone_from(&holdings.node);
    found.report.left = Left {
        live: judged.live.len(),
        namespace_gone: judged.gone.len(),
        outside: judged.outside.len(),
        of_this_boot: judged.idle.len(),
        of_earlier_boots: judged.earlier.len(),
        of_another_machine: judged.elsewhere.len(),
        not_margays: holdings.unmarked,
        no_workloads: holdings.special,
        by_list,
    };
    found.holdings = holdings;
    Ok(found)
}

/// Finds the workload endpoints of the allocations that may be freed. They are read only if there are such
/// allocations, so that a scan without findings costs no more.
async fn find_endpoints(node: &str, evidence: &Evidence, found: &mut Found<'_>) -> Result<()> {
    if found.ready.is_empty() {
        return Ok(());
    }
    // A store may know the node under a name that the plugin does not use any more.
    let names = [found.holdings.node.as_str(), node];
    let endpoints = found.at.on_ipam(Need::ReadAll, async |operator| {
        Ok(operator.ipam().node_endpoints(|node| names.contains(&node), Deadline::after(PATIENCE)).await?)
    });
    found.going = with_endpoints(&found.ready, &found.holdings, &endpoints.await?, evidence);
    for endpoint in found.going.iter().filter_map(|hold| hold.endpoint.as_ref()) {
        let row = EndpointRow::from(endpoint);
        if !found.report.endpoints.contains(&row) {
            found.report.endpoints.push(row);
        }
    }
    Ok(())
}

/// Takes the unused addresses that are not in the lists. The other unused addresses are counted by reason.
///
/// # Errors
/// The lists cannot be of this machine.
fn by_list(lists: &[RuntimeList], judged: &mut Judged, found: &mut Found<'_>) -> Result<LeftByList> {
    let live = unlisted(judged.live.iter().cloned(), lists);
    if live.listed == 0 && !live.gone.is_empty() && !lists.iter().all(RuntimeList::is_empty) {
        let count = live.gone.len();
        return Err(Failure::new(format!(
            "nothing was freed: of what is in use on this machine ({count}) nothing is in the list"
        ))
        .hint(
            "it is of another machine or runtime, or has other ids: networks belong to pods, so it is crictl pods, not \
             crictl ps; several runtimes need an --attachments each",
        ));
    }
    let unused = [&mut judged.earlier, &mut judged.gone, &mut judged.idle].into_iter().flat_map(std::mem::take);
    let said = unlisted(unused, lists);
    found.take(said.gone, Reason::NotListed);
    Ok(LeftByList {
        listed: said.listed,
        young: said.young,
        undated: said.undated,
        of_other_networks: said.unspoken,
        live_unlisted: live.gone.len(),
    })
}

/// Takes the addresses that are unused now and were unused at a scan at least [`APART`] ago.
fn by_scans(request: &Request<'_>, unused: Vec<(Allocation, Reason)>, found: &mut Found<'_>) -> Result<()> {
    let folder = &request.args.looks;
    let now = host::running().ok_or_else(|| Failure::new("the kernel does not tell its clock"))?;
    let mut scans = Scans::load(folder, &found.at.to_string(), &request.machine.boot_id, now);
    let since = scans.note(unused.iter().map(|(one, _)| one), now);
    scans.save().map_err(|error| {
        Failure::new(format!("looks cannot be kept in {}: {error}", folder.display()))
            .hint("it has to be a folder that root can write to, in memory, such as /run/margay")
    })?;
    for ((one, reason), seen) in unused.into_iter().zip(since) {
        let age = now.saturating_sub(seen);
        if age >= APART {
            found.take(vec![one], reason);
        } else {
            found.missing = found.missing.max(Some(APART - age));
            found.report.waiting.push(Row::new(&one, reason));
        }
    }
    Ok(())
}

/// Frees the allocations that may be freed.
async fn free(found: &mut Found<'_>) -> Result<()> {
    let batches = batches(&found.going);
    for some in batches.chunks(COMMITS_AT_ONCE) {
        let at = found.at;
        at.on_ipam(Need::Release, async |operator| {
            for batch in some {
                let freed = operator.ipam().free(batch, Deadline::after(PATIENCE)).await?;
                found.report.freed.extend(freed.released);
                found.report.changed.extend(freed.changed);
                found.report.deleted_endpoints.extend(freed.endpoints.iter().map(EndpointRow::from));
            }
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// The estates of the `wanted` nodes in a store, read in several openings.
async fn survey(at: StoreAt<'_>, wanted: impl Fn(&Known, &str) -> bool + Send + Sync) -> Result<Estates> {
    at.on_ipam(Need::ReadAll, async |operator| Ok(operator.ipam().estates(wanted, Deadline::after(PATIENCE)).await?))
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_only_if_something_may_be_freed() {
        let nowhere = ::stores::at("redb:///nowhere/at/all").unwrap();
        let evidence = Evidence {
            boot: "0badcafe".into(),
            up: Duration::from_secs(1),
            live: std::collections::BTreeSet::new(),
            namespaces: None,
            within: None,
        };
        let mut found = Found::nothing(StoreAt::of(&nowhere), StoreReport::of(&nowhere));
        let looked = runtime().unwrap().block_on(find_endpoints("node1", &evidence, &mut found));
        assert!(looked.is_ok(), "the store was opened");
    }
}
