//! The verbs. Each of them reads and writes an open store, which is closed before the answer is printed.

mod address;
mod borrowed;
mod check;
pub(crate) mod documents;
mod explain;
mod forecast;
mod from_report;
mod history;
mod map;
mod metrics;
pub(crate) mod moving;
mod outgoing;
mod pool;
mod pool_auto;
mod quarantine;
mod quota;
mod rehearsal;
mod release;
mod reservation;
mod settings;
mod split;
mod sticky;
pub(crate) mod store;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use datastore::{Create, Location, OpenStore, Sharing};
use ipam_core::Nodes;
use ipam_core::quarantine::quarantine_of;
use ipam_operator::Operator;
use kv::{Deadline, Store};
use rehearsal::Run;

use crate::answer::Answer;
use crate::args::{self, OnStore, PoolCreate, Show};
use crate::error::{Failure, Result};
use crate::quarantine::note;
use crate::store::Use;
use crate::usage::{self, Detail};

/// The longest time for a verb once the store is open.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest time for a verb that reads all blocks: millions of addresses on a slow etcd take minutes.
const READING: Duration = Duration::from_secs(600);

/// Checks the request, opens the store, runs the verb and closes the store. Only `pool create` makes a store, and only
/// for a pool that can be made.
///
/// A verb that reads or changes much opens the store by itself, again and again. `conf_dir` is the folder of the CNI
/// configuration.
pub(crate) async fn run(command: &OnStore, location: &Location, conf_dir: &Path) -> Result<Answer> {
    match command {
        OnStore::Pool(args::Pool::Create(request @ PoolCreate { auto: Some(bits), .. })) => {
            return pool_auto::run(command, request, *bits, location, conf_dir).await;
        }
        OnStore::Ipam(args::Ipam::Check(args)) => return check::run(args, conf_dir, location).await,
        OnStore::Ipam(args::Ipam::Release(args)) if !args.from_report.is_empty() => {
            return from_report::run(args, location).await;
        }
        OnStore::Ipam(args::Ipam::History(args)) => return history::run(location, args).await,
        OnStore::Ipam(args::Ipam::Show(Show { forecast: true, .. })) => return forecast::run(location).await,
        OnStore::Metrics(args) => return metrics::run(args, location).await,
        _ if reads_all(command) => return yielding(location, async |ipam| verb(command, ipam).await).await,
        _ => {}
    }
    let what_for = match command {
        OnStore::Pool(args::Pool::Create(request)) => {
            pool::check(request)?;
            Use::Make
        }
        OnStore::Reservation(args::Reservation::Create { name, .. }) => {
            reservation::check(name)?;
            Use::Existing
        }
        OnStore::Pool(args::Pool::Delete(_))
        | OnStore::Reservation(args::Reservation::Delete { .. })
        | OnStore::Ipam(args::Ipam::Release(_) | args::Ipam::Unpin(_))
        | OnStore::Ipam(args::Ipam::Quarantine(args::Quarantine::Release { .. })) => Use::Release,
        _ => Use::Existing,
    };
    let run = run_of(command);
    let work = async |ipam: &Operator| match command {
        OnStore::Pool(args::Pool::Delete(_)) => {
            outgoing::follow(ipam, location, run, Deadline::after(PATIENCE), verb(command, ipam)).await
        }
        _ => verb(command, ipam).await,
    };
    with_ipam(location, what_for, run, work).await
}

/// Whether a command writes or is a dry run.
fn run_of(command: &OnStore) -> Run {
    Run::new(match command {
        OnStore::Pool(args::Pool::Create(create)) => create.dry_run,
        OnStore::Pool(args::Pool::Delete(delete)) => delete.dry_run,
        OnStore::Reservation(args::Reservation::Create { dry_run, .. } | args::Reservation::Delete { dry_run, .. }) => {
            *dry_run
        }
        OnStore::Quota(args::Quota::Set { dry_run, .. } | args::Quota::Delete { dry_run, .. }) => *dry_run,
        OnStore::Ipam(args::Ipam::Release(release)) => release.dry_run,
        OnStore::Ipam(args::Ipam::Quarantine(args::Quarantine::Release { dry_run, .. })) => *dry_run,
        OnStore::Ipam(args::Ipam::Configure(configure)) => configure.dry_run,
        OnStore::Ipam(args::Ipam::Split(split)) => split.dry_run,
        OnStore::Ipam(args::Ipam::AssignPrefix(what)) => what.dry_run,
        OnStore::Ipam(args::Ipam::Pin(pin)) => pin.dry_run,
        OnStore::Ipam(args::Ipam::Unpin(unpin)) => unpin.dry_run,
        _ => false,
    })
}

/// Opens the store, runs a verb on it, and closes it. A dry run writes nothing.
async fn with_ipam(
    location: &Location,
    what_for: Use,
    run: Run,
    verb: impl AsyncFnOnce(&Operator) -> Result<Answer>,
) -> Result<Answer> {
    if run == Run::Dry {
        return rehearsal::rehearse(location, what_for, verb).await;
    }
    on_ipam(location, what_for, verb).await
}

/// Opens the store, works on it, and closes it, also after an error.
pub(crate) async fn on_ipam<T>(
    location: &Location,
    what_for: Use,
    work: impl AsyncFnOnce(&Operator) -> Result<T>,
) -> Result<T> {
    let open = crate::store::open(location, what_for).await?;
    let store = open.store();
    worked_on(open, store, location, work).await
}

/// Works on `store`, which is the open store or a wrapper of it, and closes it, also after an error.
async fn worked_on<T>(
    open: OpenStore,
    store: Arc<dyn Store>,
    location: &Location,
    work: impl AsyncFnOnce(&Operator) -> Result<T>,
) -> Result<T> {
    let ipam = Operator::new(store, nodes(location));
    let done = work(&ipam).await;
    drop(ipam);
    let closed = open.close().await;
    let done = done?;
    closed?;
    Ok(done)
}

/// True for a command that reads all blocks.
fn reads_all(command: &OnStore) -> bool {
    match command {
        OnStore::Ipam(args::Ipam::Map(_) | args::Ipam::Explain(_) | args::Ipam::List(_))
        | OnStore::Quota(args::Quota::List) => true,
        OnStore::Ipam(args::Ipam::Show(show)) => show.ip.is_none(),
        _ => false,
    }
}

/// Runs work that reads much and changes nothing. Other processes that wait for the store lock get it in between; a
/// daemon keeps it.
pub(crate) async fn yielding<T>(location: &Location, work: impl AsyncFnOnce(&Operator) -> Result<T>) -> Result<T> {
    let options = Create::Never.with_wait(crate::store::wait()).with_sharing(Sharing::InTurns);
    let open = datastore::open(location, &options).await.map_err(|error| crate::store::explain(location, error))?;
    let store = open.store();
    worked_on(open, store, location, work).await
}

async fn verb(command: &OnStore, ipam: &Operator) -> Result<Answer> {
    let deadline = Deadline::after(PATIENCE);
    match command {
        OnStore::Pool(args::Pool::Create(request)) => pool::create(ipam, request, deadline).await,
        OnStore::Pool(args::Pool::List) => pool::list(ipam, deadline).await,
        OnStore::Pool(args::Pool::Delete(delete)) => pool::delete(ipam, delete, deadline).await,
        OnStore::Reservation(args::Reservation::Create { name, cidrs, .. }) => {
            reservation::create(ipam, name, cidrs, deadline).await
        }
        OnStore::Reservation(args::Reservation::List) => reservation::list(ipam, deadline).await,
        OnStore::Reservation(args::Reservation::Delete { name, dry_run }) => {
            reservation::delete(ipam, name, Run::new(*dry_run), deadline).await
        }
        OnStore::Quota(args::Quota::Set { of, limit, dry_run }) => {
            quota::set(ipam, &of.subject(), *limit, Run::new(*dry_run), deadline).await
        }
        OnStore::Quota(args::Quota::List) => quota::list(ipam, Deadline::after(READING)).await,
        OnStore::Quota(args::Quota::Delete { of, dry_run }) => {
            quota::delete(ipam, &of.subject(), Run::new(*dry_run), deadline).await
        }
        OnStore::Ipam(args::Ipam::Show(Show { ip: Some(ip), .. })) => address::show(ipam, *ip, deadline).await,
        OnStore::Ipam(args::Ipam::Show(Show { show_borrowed: true, .. })) => borrowed::show(ipam).await,
        OnStore::Ipam(args::Ipam::Show(Show { show_configuration: true, .. })) => settings::show(ipam, deadline).await,
        OnStore::Ipam(args::Ipam::Show(Show { show_blocks, .. })) => {
            let detail = if *show_blocks { Detail::Blocks } else { Detail::Pools };
            let answer = usage::answer(&ipam.utilization(Deadline::after(READING)).await?, detail)?;
            let quarantined = quarantine_of(&ipam.inventory(deadline).await?.reservations);
            Ok(note(quarantined.len()).into_iter().fold(answer, Answer::note))
        }
        OnStore::Ipam(args::Ipam::Map(what)) => map::run(ipam, what).await,
        OnStore::Ipam(args::Ipam::Explain(args)) => explain::run(ipam, args, deadline).await,
        OnStore::Ipam(args::Ipam::Release(what)) => release::run(ipam, what, deadline).await,
        OnStore::Ipam(args::Ipam::Quarantine(what)) => match what {
            args::Quarantine::List => quarantine::list(ipam, deadline).await,
            args::Quarantine::Release { address, .. } => quarantine::release(ipam, *address, deadline).await,
        },
        // These verbs open the store by themselves, again and again.
        OnStore::Metrics(_) | OnStore::Ipam(args::Ipam::Check(_) | args::Ipam::History(_)) => {
            Err(Failure::new("internal error: the store is open already"))
        }
        OnStore::Ipam(args::Ipam::Configure(what)) => settings::configure(ipam, what, deadline).await,
        OnStore::Ipam(args::Ipam::Split(what)) => split::run(ipam, what, deadline).await,
        OnStore::Ipam(args::Ipam::AssignPrefix(what)) => pool::assign_prefix(ipam, what, deadline).await,
        OnStore::Ipam(args::Ipam::Pin(what)) => sticky::pin(ipam, what, deadline).await,
        OnStore::Ipam(args::Ipam::Unpin(what)) => sticky::unpin(ipam, what, deadline).await,
        OnStore::Ipam(args::Ipam::List(what)) => sticky::list(ipam, what, Deadline::after(READING)).await,
    }
}

/// The nodes that a store accepts: in the store of a single host, the host need not be registered.
pub(crate) fn nodes(location: &Location) -> Nodes {
    if location.is_shared() { Nodes::Registered } else { Nodes::FirstSeen }
}
