//! The verbs. Each reads and writes through one open store; the store is closed before the answer is printed.

mod address;
mod explain;
mod history;
mod pool;
mod release;
mod reservation;
pub(crate) mod store;

use std::time::Duration;

use datastore::Location;
use ipam_core::{Ipam, Nodes};
use kv::Deadline;

use crate::answer::Answer;
use crate::args::{self, OnStore, Show};
use crate::error::{Failure, Result};
use crate::store::Use;
use crate::usage::{self, Detail};

/// How long a verb may take once the store is open.
const PATIENCE: Duration = Duration::from_secs(60);

/// Checks the request, opens the store, runs the verb and closes the store. Only `pool create` makes a store that is not
/// there, and only for a pool that can be made.
pub(crate) async fn run(command: &OnStore, location: &Location) -> Result<Answer> {
    if let OnStore::Ipam(args::Ipam::History(args)) = command {
        return history::run(location, args).await;
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
        OnStore::Pool(args::Pool::Delete { .. })
        | OnStore::Reservation(args::Reservation::Delete { .. })
        | OnStore::Ipam(args::Ipam::Release(_)) => Use::Release,
        _ => Use::Existing,
    };
    let open = crate::store::open(location, what_for).await?;
    let ipam = Ipam::new(open.store(), nodes(location));
    let answer = verb(command, &ipam).await;
    drop(ipam);
    let closed = open.close().await;
    let answer = answer?;
    closed?;
    Ok(answer)
}

async fn verb(command: &OnStore, ipam: &Ipam) -> Result<Answer> {
    let deadline = Deadline::after(PATIENCE);
    match command {
        OnStore::Pool(args::Pool::Create(request)) => pool::create(ipam, request, deadline).await,
        OnStore::Pool(args::Pool::List) => pool::list(ipam, deadline).await,
        OnStore::Pool(args::Pool::Delete { name }) => pool::delete(ipam, name, deadline).await,
        OnStore::Reservation(args::Reservation::Create { name, cidrs }) => {
            reservation::create(ipam, name, cidrs, deadline).await
        }
        OnStore::Reservation(args::Reservation::List) => reservation::list(ipam, deadline).await,
        OnStore::Reservation(args::Reservation::Delete { name }) => reservation::delete(ipam, name, deadline).await,
        OnStore::Ipam(args::Ipam::Show(Show { ip: Some(ip), .. })) => address::show(ipam, *ip, deadline).await,
        OnStore::Ipam(args::Ipam::Show(Show { show_blocks, ip: None })) => {
            let detail = if *show_blocks { Detail::Blocks } else { Detail::Pools };
            usage::answer(&ipam.utilization().await?, detail)
        }
        OnStore::Ipam(args::Ipam::Explain(args)) => explain::run(ipam, args, deadline).await,
        // It opens the store itself, again and again.
        OnStore::Ipam(args::Ipam::History(_)) => Err(Failure::new("internal error: the store is open already")),
        OnStore::Ipam(args::Ipam::Release(what)) => release::run(ipam, what, deadline).await,
    }
}

/// On a store of a single host the host need not be registered.
pub(crate) fn nodes(location: &Location) -> Nodes {
    match location {
        Location::Etcd(_) => Nodes::Registered,
        _ => Nodes::FirstSeen,
    }
}
