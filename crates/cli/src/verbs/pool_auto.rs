//! `margay pool create NAME --auto BITS`: a range that collides with nothing that this machine knows.

use std::path::Path;

use datastore::Location;
use ipam_core::free_range;
use ipam_core::net::overlap;
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::Deadline;

use super::{PATIENCE, pool, run_of, with_ipam};
use crate::answer::Answer;
use crate::args::{OnStore, PoolCreate};
use crate::error::{Failure, Result};
use crate::store::Use;

/// The attempts, as another process may make a pool meanwhile.
const ATTEMPTS: usize = 3;

/// Makes a pool in a range of its own choice.
pub(super) async fn run(
    command: &OnStore,
    request: &PoolCreate,
    bits: u8,
    location: &Location,
    conf_dir: &Path,
) -> Result<Answer> {
    let (used, notes) = used_here(conf_dir);
    let chosen = |taken: &[IpNet]| {
        let cidr = free_range::choose(bits, taken, || fastrand::u64(..)).ok_or_else(|| {
            Failure::new(format!("there is no free private range of /{bits}")).hint("name the range yourself")
        })?;
        Ok::<_, Failure>((cidr, PoolCreate { cidr: Some(cidr), auto: None, ..request.clone() }))
    };
    // A wrong request makes no store.
    pool::check(&chosen(&used)?.1)?;
    let make = async |ipam: &Operator| {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let pools = ipam.inventory(Deadline::after(PATIENCE)).await?.pools;
            let taken: Vec<IpNet> = used.iter().copied().chain(pools.iter().map(|pool| pool.cidr())).collect();
            let (cidr, request) = chosen(&taken)?;
            match pool::create(ipam, &request, Deadline::after(PATIENCE)).await {
                Err(_) if attempt < ATTEMPTS && has_new(ipam, cidr).await? => {}
                done => return done,
            }
        }
    };
    let answer = with_ipam(location, Use::Make, run_of(command), make).await?;
    Ok(notes.into_iter().fold(answer, Answer::note))
}

/// True if a pool overlaps with this range by now.
async fn has_new(ipam: &Operator, cidr: IpNet) -> Result<bool> {
    let pools = ipam.inventory(Deadline::after(PATIENCE)).await?.pools;
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
