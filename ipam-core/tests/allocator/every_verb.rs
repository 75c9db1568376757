//! Runs all operations of the allocator concurrently, with store faults. Every revision must be consistent, and no
//! handle or affinity may be left at the end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{BlockRequest, HandleRequest, RequestedAddresses};
use ipam_core::model::{ExpectedOwner, NewPool, Owner, OwnerChange, OwnerUpdate, PoolUse, ReleaseRequest, keys};
use ipam_core::net::Family;
use ipam_core::{Error, Result};
use ipnet::IpNet;
use kv::{Range, StoreExt};

use crate::concurrent::{every_revision_is_consistent, faulty};
use crate::world::{World, soon};

/// Runs one operation that is neither an assignment nor a release of an address; `turn` selects which one. The
/// allocator rejects many of the random operations.
async fn meddle(world: &World, owner: &Owner, turn: usize) -> Result<&'static str> {
    let pool: IpNet = "10.0.0.0/27".parse().unwrap();
    let part: IpNet = format!("10.0.0.{}/29", turn * 8 % 32).parse().unwrap();
    let which = if turn.is_multiple_of(2) { ReleaseIf::Empty } else { ReleaseIf::Any };
    Ok(match turn % 8 {
        0 => {
            let request = BlockRequest::new(owner.clone(), &[Family::V4]).with_usage(PoolUse::Workload);
            world.ipam.ensure_blocks(&request, soon()).await?;
            "ensure"
        }
        1 => {
            world.ipam.claim_affinity(owner, part, soon()).await?;
            "claim"
        }
        2 => {
            world.ipam.release_affinity(owner, part, which, soon()).await?;
            "release"
        }
        3 => {
            world.ipam.release_pool_affinities(pool, which, soon()).await?;
            "pool"
        }
        4 => {
            world.ipam.remove_owner(owner, soon()).await?;
            "remove"
        }
        5 => {
            let seconds = u32::try_from(turn / 8 % 2 * 3).unwrap();
            let change = move |config: ipam_core::model::IpamConfig| config.with_cooldown_seconds(seconds);
            world.ipam.change_config(change, soon()).await?;
            "settings"
        }
        6 => {
            world.ipam.release_all_affinities(owner, which, soon()).await?;
            "all"
        }
        _ => {
            world.ipam.utilization(soon()).await?;
            "utilization"
        }
    })
}

/// Assigns addresses to a handle, changes the owner attributes of one address, and releases the addresses by handle or
/// one by one.
async fn hold(world: &World, owner: &Owner, handle: &str, turn: usize) -> Result<()> {
    let request = HandleRequest::new(handle, owner.clone(), RequestedAddresses::any(turn % 3 + 1, 0))
        .with_usage(PoolUse::Workload);
    let assigned = world.ipam.assign_to_handle(&request.with_most_per_family(3), soon()).await?;
    let mut held: Vec<_> = assigned.iter().map(|one| one.ip).collect();
    held.sort_unstable();
    assert_eq!(world.ipam.addresses_of_handle(handle, soon()).await?, held);
    let pod: BTreeMap<String, String> =
        [("pod", "target"), ("namespace", handle)].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let change = OwnerChange::to(pod.clone()).if_owned_by(ExpectedOwner::None);
    let update = OwnerUpdate { active: None, alternate: Some(change) };
    world.ipam.set_owner_attributes(held[0], handle, &update, soon()).await?;
    assert_eq!(world.ipam.attributes_of(held[0], soon()).await?.alternate_attributes(), &pod);
    if turn.is_multiple_of(2) {
        assert_eq!(world.ipam.release_by_handle(handle, soon()).await?, held);
    } else {
        let requests: Vec<_> = held.iter().map(|ip| ReleaseRequest::new(*ip).with_handle(handle)).collect();
        assert_eq!(world.ipam.release_ips(&requests, soon()).await?.released, held);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn verbs_all_at_once_keep_every_revision_consistent() {
    let quiet = World::new().await;
    quiet.add(NewPool::new("v4", "10.0.0.0/27".parse().unwrap()).with_block_size(30)).await;
    let start = quiet.store.list(Range::All).await.unwrap();
    let world = faulty(&quiet);
    let held = Arc::new(AtomicUsize::new(0));
    let tasks = (0..8).map(|caller: usize| {
        let (world, held) = (world.clone(), Arc::clone(&held));
        tokio::spawn(async move {
            let owners = [Owner::host("a"), Owner::host("b"), Owner::load_balancer()];
            for round in 0..24 {
                let (turn, owner) = (caller * 3 + round, &owners[(caller + round) % 3]);
                let outcome = if round % 3 == 0 {
                    hold(&world, owner, &format!("h{caller}-{round}"), turn).await.map(|()| {
                        held.fetch_add(1, SeqCst);
                    })
                } else {
                    meddle(&world, owner, turn).await.map(drop)
                };
                match outcome {
                    Ok(()) => {}
                    // The pool may have no free address, for example because another caller has set a cooldown.
                    Err(Error::Exhausted { .. } | Error::NoNewBlocks) => {}
                    Err(error) => panic!("caller {caller}, round {round}: {error}"),
                }
                world.pass(20);
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert!(held.load(SeqCst) >= 20, "only {} handles held anything", held.load(SeqCst));
    quiet.ipam.change_config(|config| config.with_cooldown_seconds(0), soon()).await.unwrap();
    for owner in [Owner::host("a"), Owner::host("b"), Owner::load_balancer()] {
        quiet.ipam.remove_owner(&owner, soon()).await.unwrap();
    }
    let end = every_revision_is_consistent(&quiet, start).await;
    // At the end, blocks with addresses in cooldown may exist, but no handle, and therefore no held address.
    assert!(end.iter().all(|kv| keys::parse_handle(&kv.key).is_none() && keys::parse_affinity(&kv.key).is_none()));
}
