//! `margay gc`: taking back what nobody on this machine uses any more.
//!
//! The stores are read and closed, then the network namespaces are looked at, then it is decided, then the stores are opened
//! again to free what is to go. So no container waits for a look, and what is given meanwhile is no candidate.

mod looks;
mod report;

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use datastore::{Chosen, Create, Environment, Location, Source, all_for_operator};
use ipam_core::Ipam;
use ipam_core::gc::{Allocation, Evidence, Holdings, batches};
use kv::{Deadline, ErrorKind};
use tokio::runtime::Runtime;

use crate::args::{Cli, Gc};
use crate::error::{Failure, Result};
use crate::store::{self, Use};
use crate::verbs::nodes;
use looks::{APART, Looks};
use report::{Left, Reason, Report, Row, StoreReport};

/// How long one opening of a store may take to be read or freed from.
const PATIENCE: Duration = Duration::from_secs(60);
/// How many commits are made before the store is closed for a moment, so that containers get their turn.
const COMMITS_AT_ONCE: usize = 16;

/// What is known of this machine.
struct Machine {
    boot_id: String,
    node: String,
}

/// A store, and what was found in it.
struct Found {
    location: Location,
    report: StoreReport,
    /// What may be freed.
    ready: Vec<Allocation>,
    /// How long the oldest look that is not old enough has to wait.
    missing: Option<Duration>,
}

/// Looks, decides, and with `--apply` frees.
pub(crate) fn run(cli: &Cli, args: &Gc, env: &Environment<'_>, out: &mut dyn Write, err: &mut dyn Write) -> Result<()> {
    let stores = choose(cli, args, env, err)?;
    let machine = Machine {
        boot_id: host::boot_id().ok_or_else(|| Failure::new("the kernel does not tell its boot id"))?,
        node: host::NodeNames {
            given: args.node.as_deref().unwrap_or_default(),
            file: Path::new(host::NODENAME_FILE),
            former: "",
            hostname: &host::hostname(),
        }
        .choose(),
    };
    let runtime = crate::runtime()?;
    let mut found = once(args, &machine, &stores, &runtime, err)?;
    let missing = found.iter().filter_map(|store| store.missing).max();
    if let Some(missing) = missing.filter(|_| args.wait) {
        _ = writeln!(err, "note: looking again in {} s", missing.as_secs() + 1);
        std::thread::sleep(missing);
        found = once(args, &machine, &stores, &runtime, err)?;
    }
    if args.apply {
        for store in &mut found {
            if let Err(failure) = runtime.block_on(free(store)) {
                failure.print(err);
                store.report.failed = true;
            }
        }
    }
    let failed = found.iter().any(|store| store.report.failed);
    let mut report = Report { applied: args.apply, stores: found.into_iter().map(|store| store.report).collect() };
    report.answer()?.print(cli.output, out, err)?;
    if failed { Err(Failure::new("not every store was gone through; see above")) } else { Ok(()) }
}

/// The stores to go through.
fn choose(cli: &Cli, args: &Gc, env: &Environment<'_>, err: &mut dyn Write) -> Result<Vec<Chosen>> {
    if !args.all_stores {
        return Ok(vec![store::choose(cli, env, err)?]);
    }
    let stores = all_for_operator(env, &cli.cni_conf_dir)?;
    for chosen in &stores {
        for problem in &chosen.unreadable {
            _ = writeln!(err, "warning: skipped {problem}");
        }
        if chosen.source == Source::Default {
            _ = writeln!(err, "store: {} ({})", chosen.location, chosen.source);
        }
    }
    Ok(stores)
}

/// Reads all stores, looks at the machine, and decides.
fn once(args: &Gc, machine: &Machine, stores: &[Chosen], runtime: &Runtime, err: &mut dyn Write) -> Result<Vec<Found>> {
    let mut read = Vec::new();
    for chosen in stores {
        match runtime.block_on(holdings(&chosen.location, &machine.node)) {
            Ok(found) => read.push((&chosen.location, Ok(found))),
            // With several stores one that cannot be read must not keep the others from being cleaned.
            Err(failure) if args.all_stores => {
                failure.print(err);
                read.push((&chosen.location, Err(())));
            }
            Err(failure) => return Err(failure),
        }
    }
    let evidence = evidence(machine)?;
    let decide = |(location, read): (&Location, std::result::Result<_, ()>)| match read {
        Ok(Some((ipam, holdings))) => decide(args, machine, location, &ipam, &holdings, &evidence),
        Ok(None) => Ok(Found::nothing(location, StoreReport { missing: true, ..StoreReport::of(location) })),
        Err(()) => Ok(Found::nothing(location, StoreReport { failed: true, ..StoreReport::of(location) })),
    };
    read.into_iter().map(decide).collect()
}

impl Found {
    fn nothing(location: &Location, report: StoreReport) -> Self {
        Self { location: location.clone(), report, ready: Vec::new(), missing: None }
    }
}

/// What the node holds in a store, read in one opening; nothing if there is no store.
async fn holdings(location: &Location, node: &str) -> Result<Option<(Ipam, Holdings)>> {
    let open = match datastore::open(location, Create::Never, store::WAIT).await {
        Err(error) if error.kind() == &ErrorKind::Missing => return Ok(None),
        opened => opened.map_err(|error| store::explain(location, error))?,
    };
    let ipam = Ipam::new(open.store(), nodes(location));
    let holdings = ipam.holdings(node, Deadline::after(PATIENCE)).await;
    let closed = open.close().await;
    let holdings = holdings?;
    closed?;
    Ok(Some((ipam, holdings)))
}

/// What is in use on this machine.
fn evidence(machine: &Machine) -> Result<Evidence> {
    let live = host::look().map_err(|blind| {
        Failure::new(format!("nothing was freed: {blind}")).hint(
            "run margay gc as root on the machine itself, not in a container; without a look at every namespace, an \
         address that is in use cannot be told from one that is not",
        )
    })?;
    let known = host::short_boot(&machine.boot_id).zip(host::uptime());
    let (boot, up) = known.ok_or_else(|| Failure::new("the kernel does not tell when it began"))?;
    Ok(Evidence { boot, up, live })
}

/// What is to go, what is to be looked at once more, and what is left.
fn decide(
    args: &Gc,
    machine: &Machine,
    location: &Location,
    ipam: &Ipam,
    holdings: &Holdings,
    evidence: &Evidence,
) -> Result<Found> {
    let mut judged = ipam.judge(holdings, evidence);
    let (mut ready, mut rows, mut waiting, mut missing) = (Vec::new(), Vec::new(), Vec::new(), None);
    if args.boot {
        ready.append(&mut judged.earlier);
        rows.extend(ready.iter().map(|one| Row::new(one, Reason::EarlierBoot)));
    }
    if args.netns {
        let mut unused = judged.earlier;
        unused.append(&mut judged.idle);
        judged.earlier = Vec::new();
        let now = host::running().ok_or_else(|| Failure::new("the kernel does not tell its clock"))?;
        let mut looks = Looks::load(&args.looks, &location.to_string(), &machine.boot_id, now);
        let since = looks.note(&unused, now);
        looks.save().map_err(|error| {
            Failure::new(format!("looks cannot be kept in {}: {error}", args.looks.display()))
                .hint("it has to be a folder that root can write to, in memory, such as /run/margay")
        })?;
        for (one, seen) in unused.into_iter().zip(since) {
            let age = now.saturating_sub(seen);
            if age >= APART {
                rows.push(Row::new(&one, Reason::NoInterface));
                ready.push(one);
            } else {
                missing = missing.max(Some(APART - age));
                waiting.push(Row::new(&one, Reason::NoInterface));
            }
        }
    }
    let left = Left {
        live: judged.live.len(),
        of_this_boot: judged.idle.len(),
        of_earlier_boots: judged.earlier.len(),
        of_another_machine: judged.elsewhere.len(),
        not_margays: holdings.unmarked,
        no_workloads: holdings.special,
    };
    let report =
        StoreReport { node: holdings.node.clone(), candidates: rows, waiting, left, ..StoreReport::of(location) };
    Ok(Found { location: location.clone(), report, ready, missing })
}

/// Frees what may go.
async fn free(found: &mut Found) -> Result<()> {
    let batches = batches(&found.ready);
    for some in batches.chunks(COMMITS_AT_ONCE) {
        let open = store::open(&found.location, Use::Release).await?;
        let ipam = Ipam::new(open.store(), nodes(&found.location));
        let mut done = Ok(());
        for batch in some {
            match ipam.free(batch, Deadline::after(PATIENCE)).await {
                Ok(freed) => {
                    found.report.freed.extend(freed.released);
                    found.report.changed.extend(freed.changed);
                }
                Err(error) => {
                    done = Err(error);
                    break;
                }
            }
        }
        drop(ipam);
        let closed = open.close().await;
        done?;
        closed?;
    }
    Ok(())
}
