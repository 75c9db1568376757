//! Frees addresses whose containers on this machine are gone, for the command `margay gc`. The module [`departed`]
//! frees everything that departed nodes hold. The module [`node_move`] records the blocks and addresses of a renamed
//! node under the node's new name.
//!
//! The command `margay gc` reads and closes the stores, then scans the network namespaces of this machine, and then
//! opens the stores again to free the leftover addresses. Because the stores are closed during the scan of network
//! namespaces, no plugin waits for the scan. An address that is assigned during the scan is no candidate for freeing.

mod departed;
mod lists;
mod node_move;
mod report;
pub(crate) mod scans;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args};
use datastore::{ChoiceSource, ChosenStore, OpenStore};
use ipam_core::gc::{
    Allocation, DepartedNodes, Evidence, Hold, Holdings, JudgedAllocations, KnownNodes, RuntimeList, batches,
    find_unlisted, with_endpoints,
};
use ipam_operator::Operator;
use kv::Deadline;
use tokio::runtime::Runtime;

use self::node_move::NodeMove;
use self::report::{EndpointRow, FreeReason, GcReport, KeptByListCounts, KeptCounts, LeftoverRow, StoreReport};
use self::scans::{MIN_SCAN_INTERVAL, ScanMemory, StoreScans};
use crate::command::{Invocation, StandaloneCommand, runtime};
use crate::error::{CommandFailure, CommandResult};
use crate::store::{StoreAccess, StoreUse};

pub(crate) const HELP: &str = "\
Without --apply it only shows what it would free. It never frees an address that
an interface of this machine has, or whose network namespace exists. A
container's workload endpoint is deleted with its addresses. Run it as root,
where the container runtime runs.

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
    /// Release addresses of this node that were assigned before its last boot
    #[arg(long, group = "evidence")]
    pub(crate) boot: bool,

    /// Release addresses that two scans of network namespaces, 60 s apart, found unused
    #[arg(long, group = "evidence")]
    pub(crate) netns: bool,

    /// Release addresses of containers whose pod is in none of these lists of the runtime's pods (- for stdin)
    #[arg(long, group = "evidence", value_name = "FILE", conflicts_with_all = ["boot", "netns"])]
    pub(crate) attachments: Vec<PathBuf>,

    /// Release addresses of nodes that are not registered
    #[arg(long, group = "evidence", conflicts_with_all = ["boot", "netns", "attachments", "node", "all_stores", "local_stores"])]
    pub(crate) gone: bool,

    /// File that names all existing nodes (- for stdin)
    #[arg(long, value_name = "FILE", requires = "gone")]
    pub(crate) nodes: Option<PathBuf>,

    /// Free all addresses of --node NAME
    #[arg(long, group = "evidence", requires = "node", conflicts_with_all = ["boot", "netns", "attachments", "gone", "all_stores", "local_stores"])]
    pub(crate) free: bool,

    /// Move the addresses of --node NAME to the node NEW
    #[arg(long, group = "evidence", requires = "node", value_name = "NEW", conflicts_with_all = ["boot", "netns", "attachments", "gone", "free", "all_stores", "local_stores"])]
    move_to: Option<String>,

    /// Release or move addresses [default: only show them]
    #[arg(long)]
    pub(crate) apply: bool,

    /// Accept an empty --attachments or --nodes list
    #[arg(long)]
    pub(crate) empty: bool,

    /// With --netns, do both scans in one run, 60 s apart
    #[arg(long, requires = "netns")]
    pub(crate) wait: bool,

    /// This machine's node name; with --free or --move-to, the node whose addresses are freed or moved
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Process every store that the CNI configuration names; skip missing stores
    #[arg(long, conflicts_with = "store")]
    all_stores: bool,

    /// Like --all-stores, but without etcd clusters
    #[arg(long, conflicts_with_all = ["store", "all_stores"])]
    local_stores: bool,

    /// Read all blocks of a cluster, not only the blocks of this node
    #[arg(long)]
    all_blocks: bool,

    /// Folder that keeps the results of network namespace scans until the next boot
    #[arg(long, hide = true, value_name = "DIR", default_value = "/run/margay")]
    pub(crate) looks: PathBuf,
}

/// Time limit of each read of a store and of each commit.
const STORE_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of commits before the store is closed for a moment, so that plugins can use the store.
const MAX_COMMITS_PER_OPENING: usize = 16;

/// What `margay gc` needs to decide about addresses: its arguments, facts about this machine, and the lists from
/// container runtimes.
struct GcRequest<'r> {
    args: &'r Gc,
    machine: &'r Machine,
    lists: &'r [RuntimeList],
}

/// The findings of a garbage collection about the addresses in one store.
struct StoreFindings<'l> {
    at: StoreAccess<'l>,
    report: StoreReport,
    /// The addresses that this node holds in the store.
    holdings: Holdings,
    ready: Vec<Allocation>,
    /// The allocations in `ready`, each with the workload endpoint to delete in the commit that frees the allocation.
    going: Vec<Hold>,
    /// The time until all unused addresses that need a second scan may be freed, or `None` if no address needs a second
    /// scan.
    missing: Option<Duration>,
}

impl StandaloneCommand for Gc {
    /// Finds leftover addresses on this machine. With `--apply`, frees the leftover addresses.
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        match &self.move_to {
            Some(to) => return invocation.run_on_store(&NodeMove::new(self, to)?),
            None if self.gone || self.free => return departed::run(self, invocation),
            None => {}
        }
        // The lists from container runtimes are read before the stores: the earlier a list was made, the fewer
        // addresses the list can free.
        let lists = lists::read_attachments(&self.attachments, self.empty)?;
        let stores = match choose_stores(self, invocation)? {
            StoreChoice::These(stores) => stores,
            StoreChoice::None(why) => {
                invocation.print(GcReport::default().answer_because(why)?)?;
                return Ok(0);
            }
        };
        let stores: Vec<StoreAccess<'_>> = stores.iter().map(|chosen| invocation.store_at(&chosen.location)).collect();
        let machine = Machine::of(self.node.as_deref())?;
        let request = GcRequest { args: self, machine: &machine, lists: &lists };
        let runtime = runtime()?;
        let (mut found, mut evidence) = scan_once(&request, &stores, &runtime, invocation.err)?;
        let missing = found.iter().filter_map(|store| store.missing).max();
        if let Some(missing) = missing.filter(|_| self.wait) {
            _ = writeln!(invocation.err, "note: looking again in {} s", missing.as_secs() + 1);
            std::thread::sleep(missing);
            (found, evidence) = scan_once(&request, &stores, &runtime, invocation.err)?;
        }
        for store in &mut found {
            if let Err(failure) = runtime.block_on(find_endpoints(&machine.node, &evidence, store)) {
                failure.print(invocation.err);
                store.report.failed = true;
            }
        }
        if self.apply {
            for store in &mut found {
                if let Err(failure) = runtime.block_on(free(store)) {
                    failure.print(invocation.err);
                    store.report.failed = true;
                }
            }
        }
        let failed = found.iter().any(|store| store.report.failed);
        let mut report =
            GcReport { applied: self.apply, stores: found.into_iter().map(|store| store.report).collect() };
        invocation.print(report.answer()?)?;
        if failed { Err(CommandFailure::new("not every store was gone through; see above")) } else { Ok(0) }
    }
}

/// Reads all stores, scans this machine, and decides which addresses may be freed.
fn scan_once<'l>(
    request: &GcRequest<'_>,
    stores: &[StoreAccess<'l>],
    runtime: &Runtime,
    err: &mut dyn Write,
) -> CommandResult<(Vec<StoreFindings<'l>>, Evidence)> {
    let GcRequest { args, machine, .. } = request;
    let mut read = Vec::new();
    for at in stores {
        match runtime.block_on(read_holdings(request, *at)) {
            Ok(found) => read.push((*at, Ok(found))),
            // With several stores, an unreadable store must not stop gc from freeing addresses in the other stores.
            Err(failure) if args.all_stores || args.local_stores => {
                failure.print(err);
                read.push((*at, Err(())));
            }
            Err(failure) => return Err(failure),
        }
    }
    let evidence = machine.evidence()?;
    let decide = |(at, read): (StoreAccess<'l>, Result<_, ()>)| match read {
        Ok(Some((operator, holdings))) => decide(request, at, &operator, holdings, &evidence),
        Ok(None) => Ok(StoreFindings::empty(at, StoreReport { missing: true, ..StoreReport::of(at.location) })),
        Err(()) => Ok(StoreFindings::empty(at, StoreReport { failed: true, ..StoreReport::of(at.location) })),
    };
    let found = read.into_iter().map(decide).collect::<CommandResult<_>>()?;
    Ok((found, evidence))
}

impl<'l> StoreFindings<'l> {
    fn empty(at: StoreAccess<'l>, report: StoreReport) -> Self {
        let (holdings, ready, going) = (Holdings::default(), Vec::new(), Vec::new());
        Self { at, report, holdings, ready, going, missing: None }
    }

    fn add(&mut self, allocations: Vec<Allocation>, reason: FreeReason) {
        self.report.candidates.extend(allocations.iter().map(|one| LeftoverRow::new(one, reason)));
        self.ready.extend(allocations);
    }
}

/// Opens a store once and reads the addresses that the node holds in the store. Returns `None` if the store does not
/// exist.
async fn read_holdings(request: &GcRequest<'_>, at: StoreAccess<'_>) -> CommandResult<Option<(Operator, Holdings)>> {
    let Some(open) = at.open_existing().await? else { return Ok(None) };
    let operator = Operator::new(open.store(), at.nodes());
    let holdings =
        at.run_and_close(open, async |_: &OpenStore| read_blocks_of_node(request, at, &operator).await).await?;
    Ok(Some((operator, holdings)))
}

/// Reads the addresses that the node holds, from the blocks that this run of `gc` scans.
async fn read_blocks_of_node(
    request: &GcRequest<'_>,
    at: StoreAccess<'_>,
    operator: &Operator,
) -> CommandResult<Holdings> {
    let GcRequest { args, machine: Machine { node, boot_id }, .. } = request;
    let Some(memory) = ScanMemory::of(&args.looks, at.location, node, boot_id) else {
        return Ok(operator.ipam().holdings(node, Deadline::after(STORE_CALL_TIMEOUT)).await?);
    };
    let plan = memory.plan_scan(operator, args.all_blocks).await?;
    let (holdings, passed) =
        operator.ipam().holdings_within(node, &plan.reach, Deadline::after(STORE_CALL_TIMEOUT)).await?;
    plan.save(&holdings, passed);
    Ok(holdings)
}

/// Divides the node's allocations by what happens to them: they may be freed now, may be freed after another scan, or
/// stay.
fn decide<'l>(
    request: &GcRequest<'_>,
    at: StoreAccess<'l>,
    operator: &Operator,
    holdings: Holdings,
    evidence: &Evidence,
) -> CommandResult<StoreFindings<'l>> {
    let args = request.args;
    let mut judged = operator.ipam().judge(&holdings, evidence);
    let mut found = StoreFindings::empty(at, StoreReport::of(at.location));
    if args.boot {
        found.add(std::mem::take(&mut judged.earlier), FreeReason::EarlierBoot);
    }
    let by_list = match request.lists {
        [] => None,
        lists => Some(take_unlisted(lists, &mut judged, &mut found)?),
    };
    if args.netns {
        let earlier = std::mem::take(&mut judged.earlier).into_iter().map(|one| (one, FreeReason::EarlierBoot));
        let gone = std::mem::take(&mut judged.gone).into_iter().map(|one| (one, FreeReason::NamespaceGone));
        take_unused_twice(request, earlier.chain(gone).collect(), &mut found)?;
    }
    found.report.node.clone_from(&holdings.node);
    found.report.left = KeptCounts {
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

/// Finds the workload endpoints of the allocations that may be freed. If no allocation may be freed, the endpoints are
/// not read, because reading them is expensive.
async fn find_endpoints(node: &str, evidence: &Evidence, found: &mut StoreFindings<'_>) -> CommandResult<()> {
    if found.ready.is_empty() {
        return Ok(());
    }
    // The store may still know this node under a former name.
    let names = [found.holdings.node.as_str(), node];
    let endpoints = found.at.with_operator(StoreUse::ReadAll, async |operator| {
        Ok(operator.ipam().node_endpoints(|node| names.contains(&node), Deadline::after(STORE_CALL_TIMEOUT)).await?)
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

/// Selects the addresses to free: those that are unused and not in any runtime's list. Counts the unused addresses that
/// are not freed, by reason.
///
/// # Errors
/// None of the addresses in use on this machine is in the lists, so the lists probably come from another machine.
fn take_unlisted(
    lists: &[RuntimeList],
    judged: &mut JudgedAllocations,
    found: &mut StoreFindings<'_>,
) -> CommandResult<KeptByListCounts> {
    let live = find_unlisted(judged.live.iter().cloned(), lists);
    if live.listed == 0 && !live.gone.is_empty() && !lists.iter().all(RuntimeList::is_empty) {
        let count = live.gone.len();
        return Err(CommandFailure::new(format!(
            "nothing was freed: of what is in use on this machine ({count}) nothing is in the list"
        ))
        .hint(
            "check that the list is from this machine's container runtime and lists pods, not containers (crictl \
             pods, not crictl ps); with several runtimes, pass one --attachments for each",
        ));
    }
    let unused = [&mut judged.earlier, &mut judged.gone, &mut judged.idle].into_iter().flat_map(std::mem::take);
    let said = find_unlisted(unused, lists);
    found.add(said.gone, FreeReason::NotListed);
    Ok(KeptByListCounts {
        listed: said.listed,
        young: said.young,
        undated: said.undated,
        of_other_networks: said.unspoken,
        live_unlisted: live.gone.len(),
    })
}

/// Selects the addresses to free: those that are unused now and that a scan at least [`MIN_SCAN_INTERVAL`] ago also
/// found unused.
fn take_unused_twice(
    request: &GcRequest<'_>,
    unused: Vec<(Allocation, FreeReason)>,
    found: &mut StoreFindings<'_>,
) -> CommandResult<()> {
    let folder = &request.args.looks;
    let now = host::running().ok_or_else(|| CommandFailure::new("the kernel does not tell its clock"))?;
    let mut scans = StoreScans::load(folder, &found.at.to_string(), &request.machine.boot_id, now);
    let since = scans.record_unused(unused.iter().map(|(one, _)| one), now);
    scans.save().map_err(|error| {
        CommandFailure::new(format!("looks cannot be kept in {}: {error}", folder.display()))
            .hint("use --looks to name a tmpfs folder that root can write to, such as /run/margay")
    })?;
    for ((one, reason), seen) in unused.into_iter().zip(since) {
        let age = now.saturating_sub(seen);
        if age >= MIN_SCAN_INTERVAL {
            found.add(vec![one], reason);
        } else {
            found.missing = found.missing.max(Some(MIN_SCAN_INTERVAL - age));
            found.report.waiting.push(LeftoverRow::new(&one, reason));
        }
    }
    Ok(())
}

/// Frees the selected allocations, and deletes the workload endpoints of these allocations.
async fn free(found: &mut StoreFindings<'_>) -> CommandResult<()> {
    let batches = batches(&found.going);
    for some in batches.chunks(MAX_COMMITS_PER_OPENING) {
        let at = found.at;
        at.with_operator(StoreUse::Release, async |operator| {
            for batch in some {
                let freed = operator.ipam().free(batch, Deadline::after(STORE_CALL_TIMEOUT)).await?;
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

/// Reads the blocks, addresses and endpoints that the departed nodes selected by `wanted` hold in a store. Processes
/// that wait for the store lock can use the store between two reads.
async fn survey(
    at: StoreAccess<'_>,
    wanted: impl Fn(&KnownNodes, &str) -> bool + Send + Sync,
) -> CommandResult<DepartedNodes> {
    at.with_operator(StoreUse::ReadAll, async |operator| {
        Ok(operator.ipam().departed_nodes(wanted, Deadline::after(STORE_CALL_TIMEOUT)).await?)
    })
    .await
}

/// The stores that one run of `margay gc` processes.
enum StoreChoice {
    /// The run processes at least one store.
    These(Vec<ChosenStore>),
    /// The run processes no store; the text says why.
    None(String),
}

/// Chooses the stores of one run of `margay gc`.
///
/// With `--all-stores`, it is no error if this machine has no networks of Margay, because the systemd units of gc also
/// run on machines without Margay's networks. With `--local-stores`, it is no error if all networks of this machine use
/// clusters. The systemd unit that runs `margay gc --boot --local-stores` starts before clusters can be reached.
fn choose_stores(args: &Gc, invocation: &mut Invocation<'_>) -> CommandResult<StoreChoice> {
    if !args.all_stores && !args.local_stores {
        return Ok(StoreChoice::These(vec![invocation.choose()?]));
    }
    let mut stores = invocation.choose_all()?;
    if stores.is_empty() {
        let folder = invocation.options.cni_conf_dir.display();
        return Ok(StoreChoice::None(format!(
            "no network in {folder} takes its addresses from Margay; nothing to free"
        )));
    }
    for chosen in stores.iter().filter(|chosen| chosen.source == ChoiceSource::Default) {
        _ = writeln!(invocation.err, "store: {} ({})", chosen.location, chosen.source);
    }
    if args.local_stores {
        stores.retain(|chosen| !chosen.location.is_shared());
    }
    Ok(match stores.is_empty() {
        true => StoreChoice::None("all stores are clusters'; margay-gc.timer goes through them".to_owned()),
        false => StoreChoice::These(stores),
    })
}

/// This machine, as a source of evidence about unused addresses.
struct Machine {
    /// The complete id of the current boot.
    boot_id: String,
    node: String,
}

impl Machine {
    /// Returns this machine, with the `given` node name or else with its own node name.
    ///
    /// # Errors
    /// The kernel does not report the boot id.
    fn of(given: Option<&str>) -> CommandResult<Self> {
        Ok(Self {
            boot_id: host::boot_id().ok_or_else(|| CommandFailure::new("the kernel does not tell its boot id"))?,
            node: host::node_name(given.unwrap_or_default()),
        })
    }

    /// Scans which addresses are in use on this machine.
    ///
    /// # Errors
    /// A network namespace cannot be scanned, or the kernel does not report the boot id or the uptime.
    fn evidence(&self) -> CommandResult<Evidence> {
        let host::NetnsScan { addresses: live, namespaces, within } = host::scan().map_err(|blind| {
            CommandFailure::new(format!("nothing was freed: {blind}")).hint(
                "run margay gc as root on the machine of the container runtime: margay must scan every network \
                 namespace to find out which addresses are in use",
            )
        })?;
        let known = host::short_boot(&self.boot_id).zip(host::uptime());
        let (boot, up) = known.ok_or_else(|| CommandFailure::new("the kernel does not tell when it began"))?;
        Ok(Evidence { boot, up, live, namespaces, within })
    }

    /// Like [`evidence`](Self::evidence), but fails inside a container. Only a process outside of a container sees all
    /// interfaces of the machine, and can tell whether the machine has an address of another node.
    ///
    /// # Errors
    /// Any error of [`evidence`](Self::evidence), or the process runs in a container.
    fn whole_evidence(&self) -> CommandResult<Evidence> {
        let evidence = self.evidence()?;
        match evidence.within {
            None => Ok(evidence),
            Some(_) => {
                Err(CommandFailure::new("nothing was freed: in a container nothing is seen of the machine around it")
                    .hint("run margay gc with --gone or --free on the node, outside of pods, or in a pod with hostPID"))
            }
        }
    }
}

/// Returns the names under which a store may know this machine.
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
        let mut found = StoreFindings::empty(StoreAccess::of(&nowhere), StoreReport::of(&nowhere));
        let looked = runtime().unwrap().block_on(find_endpoints("node1", &evidence, &mut found));
        assert!(looked.is_ok(), "the store was opened");
    }
}
