//! `margay gc`: frees the addresses that nothing on this machine uses any more. The estates of nodes that are gone
//! are in [`gone`], those of a renamed node in [`hand_over`].
//!
//! The stores are read and closed, then the network namespaces are scanned, then the stores are opened again to free
//! the leftovers. So no container waits for a scan, and an address that is assigned meanwhile is no candidate.

mod gone;
mod hand_over;
mod lists;
mod report;
pub(crate) mod scans;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args};
use datastore::{ChoiceSource, ChosenStore, OpenStore, all_for_operator};
use ipam_core::gc::{
    Allocation, Estates, Evidence, Hold, Holdings, Judged, Known, RuntimeList, batches, unlisted, with_endpoints,
};
use ipam_operator::Operator;
use kv::Deadline;
use tokio::runtime::Runtime;

use self::hand_over::HandOver;
use self::report::{EndpointRow, Left, LeftByList, Reason, Report, Row, StoreReport};
use self::scans::{APART, Memory, Scans};
use crate::command::{Call, Standalone, runtime};
use crate::error::{Failure, Result};
use crate::store::{Need, StoreAt};

pub(crate) const HELP: &str = "\
Without --apply it only shows. Never freed are addresses that an interface of
this machine has, and those whose network namespace is there. A container's
workload endpoint goes with its addresses. Run it as root, where the container
runtime runs.

Examples:
  margay gc --boot --apply
  margay gc --netns --wait --apply
  crictl pods -o json | margay gc --attachments -
  kubectl get nodes -o name | margay gc --gone --nodes -
  margay gc --node old-name --move-to new-name --apply
  margay gc --node dead --free --apply";

/// The arguments of `gc`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("evidence").required(true).multiple(true))]
pub(crate) struct Gc {
    /// Free what this node holds from an earlier boot
    #[arg(long, group = "evidence")]
    pub(crate) boot: bool,

    /// Free what two scans, 60 s apart, find unused
    #[arg(long, group = "evidence")]
    pub(crate) netns: bool,

    /// Free what these lists of runtimes lack (-: stdin)
    #[arg(long, group = "evidence", value_name = "FILE", conflicts_with_all = ["boot", "netns"])]
    pub(crate) attachments: Vec<PathBuf>,

    /// Free what nodes hold that are not registered
    #[arg(long, group = "evidence", conflicts_with_all = ["boot", "netns", "attachments", "node", "all_stores", "local_stores"])]
    pub(crate) gone: bool,

    /// With --gone: spare these nodes, too (-: stdin)
    #[arg(long, value_name = "FILE", requires = "gone")]
    pub(crate) nodes: Option<PathBuf>,

    /// Free all that the node NAME holds, gone for good
    #[arg(long, group = "evidence", requires = "node", conflicts_with_all = ["boot", "netns", "attachments", "gone", "all_stores", "local_stores"])]
    pub(crate) free: bool,

    /// Make what node NAME holds NEW's; no address changes
    #[arg(long, group = "evidence", requires = "node", value_name = "NEW", conflicts_with_all = ["boot", "netns", "attachments", "gone", "free", "all_stores", "local_stores"])]
    move_to: Option<String>,

    /// Do it; without this, it is only shown
    #[arg(long)]
    pub(crate) apply: bool,

    /// Take an empty list as such, instead of refusing it
    #[arg(long)]
    pub(crate) empty: bool,

    /// Make both scans in one run
    #[arg(long, requires = "netns")]
    pub(crate) wait: bool,

    /// The node for --free and --move-to; else another name of this very machine
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Go through every store that the CNI configuration names; one that does not exist is no error
    #[arg(long, conflicts_with = "store")]
    all_stores: bool,

    /// The same, but leave out those of clusters
    #[arg(long, conflicts_with_all = ["store", "all_stores"])]
    local_stores: bool,

    /// Read all blocks of a cluster, not only those that concern this node
    #[arg(long)]
    all_blocks: bool,

    /// Where scans are kept until the next boot
    #[arg(long, hide = true, value_name = "DIR", default_value = "/run/margay")]
    pub(crate) looks: PathBuf,
}

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
        let lists = lists::read_attachments(&self.attachments, self.empty)?;
        let stores = match choose_stores(self, call)? {
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

/// The stores of a collection.
enum Stores {
    /// These stores, at least one.
    These(Vec<ChosenStore>),
    /// No store, for this reason.
    None(String),
}

/// Chooses the stores.
///
/// For the systemd units a machine without a network of ours is no error. Nor is a machine that has only stores of
/// clusters, for the unit that runs before there is a network.
fn choose_stores(args: &Gc, call: &mut Call<'_>) -> Result<Stores> {
    if !args.all_stores && !args.local_stores {
        return Ok(Stores::These(vec![call.choose()?]));
    }
    let stores = all_for_operator(call.drivers, call.env, &call.options.cni_conf_dir);
    let mut stores = stores.map_err(|error| call.explain(&error))?;
    for chosen in &stores {
        for problem in &chosen.unreadable {
            _ = writeln!(call.err, "warning: skipped {problem}");
        }
        if chosen.source == ChoiceSource::Default {
            if chosen.location.path().is_none_or(|path| !path.exists()) {
                let folder = call.options.cni_conf_dir.display();
                return Ok(Stores::None(format!(
                    "no network in {folder} takes its addresses from Margay; nothing to free"
                )));
            }
            _ = writeln!(call.err, "store: {} ({})", chosen.location, chosen.source);
        }
    }
    if args.local_stores {
        stores.retain(|chosen| !chosen.location.is_shared());
    }
    Ok(match stores.is_empty() {
        true => Stores::None("all stores are clusters'; margay-gc.timer goes through them".to_owned()),
        false => Stores::These(stores),
    })
}

/// The evidence of this machine.
struct Machine {
    /// The boot's whole id.
    boot_id: String,
    /// The node's name.
    node: String,
}

impl Machine {
    /// This machine, under the `given` name or else its own.
    ///
    /// # Errors
    /// The kernel does not report its boot id.
    fn of(given: Option<&str>) -> Result<Self> {
        Ok(Self {
            boot_id: host::boot_id().ok_or_else(|| Failure::new("the kernel does not tell its boot id"))?,
            node: host::node_name(given.unwrap_or_default()),
        })
    }

    /// The addresses in use on this machine.
    ///
    /// # Errors
    /// Not everything can be scanned, or the kernel does not report when it began.
    fn evidence(&self) -> Result<Evidence> {
        let host::Sight { addresses: live, namespaces, within } = host::scan().map_err(|blind| {
            Failure::new(format!("nothing was freed: {blind}")).hint(
                "run margay gc as root, where the container runtime runs; without a scan of every namespace, an address \
                 that is in use cannot be told from one that is not",
            )
        })?;
        let known = host::short_boot(&self.boot_id).zip(host::uptime());
        let (boot, up) = known.ok_or_else(|| Failure::new("the kernel does not tell when it began"))?;
        Ok(Evidence { boot, up, live, namespaces, within })
    }

    /// The same, but of the whole machine. It serves for addresses of other nodes: only the machine's interfaces show
    /// whether this machine has them.
    ///
    /// # Errors
    /// Those of `evidence`; this process runs in a container.
    fn whole_evidence(&self) -> Result<Evidence> {
        let evidence = self.evidence()?;
        match evidence.within {
            None => Ok(evidence),
            Some(_) => Err(Failure::new("nothing was freed: in a container nothing is seen of the machine around it")
                .hint("run margay gc --gone and --free on a machine itself, or in a pod with hostPID")),
        }
    }
}

/// All names that this machine may have in a store.
fn own_names() -> BTreeSet<String> {
    let hostname = host::hostname();
    let mut names = BTreeSet::from([host::node_name(""), hostname.to_lowercase(), hostname]);
    names.remove("");
    names
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
            live: BTreeSet::new(),
            namespaces: None,
            within: None,
        };
        let mut found = Found::nothing(StoreAt::of(&nowhere), StoreReport::of(&nowhere));
        let looked = runtime().unwrap().block_on(find_endpoints("node1", &evidence, &mut found));
        assert!(looked.is_ok(), "the store was opened");
    }
}
