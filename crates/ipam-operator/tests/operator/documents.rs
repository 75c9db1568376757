//! Tests writes of documents: concurrent writes, and writes into a store that already has many documents.

use std::net::IpAddr;

use ipam_core::model::{NewPool, Owner};
use ipam_core::{Error, Result};
use ipam_operator::documents::{DocumentKind, Manifest, Namespaces, WriteMode, WriteOutcome};
use ipam_operator::{InUse, PoolChoice};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::Operated;
use crate::world::{World, soon};

fn pool(name: &str, cidr: &str) -> Manifest {
    let document = json!({"kind": "IPPool", "apiVersion": "projectcalico.org/v3", "metadata": {"name": name},
        "spec": {"cidr": cidr}});
    Manifest::read(document).unwrap().remove(0)
}

#[tokio::test]
async fn pools_that_overlap_are_made_only_once() {
    let world = World::new().await;
    // In a store with 70 pools, a commit cannot guard each pool separately, because it would have too many guards.
    for others in [0, 70] {
        for number in 0..others {
            let cidr = format!("10.{}.0.0/24", number + 100);
            world.add(NewPool::new(format!("p{number}"), cidr.parse().unwrap())).await;
        }
        let (name, cidr) = (format!("x{others}"), format!("10.{others}.0.0/16"));
        let tasks: Vec<_> = (0..4)
            .map(|task| {
                let (world, manifest) = (world.clone(), pool(&format!("{name}-{task}"), &cidr));
                tokio::spawn(async move { world.operator().write_document(&manifest, WriteMode::Create, soon()).await })
            })
            .collect();
        let mut made = 0;
        for task in tasks {
            match task.await.unwrap() {
                Ok(written) => made += usize::from(written == WriteOutcome::Created),
                Err(error) => assert!(error.to_string().contains("CIDR overlaps with IPPool"), "{error}"),
            }
        }
        assert_eq!(made, 1);
    }
}

#[tokio::test]
async fn documents_applied_by_several_at_once_all_succeed() {
    let world = World::new().await;
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let (world, manifest) = (world.clone(), pool("one", "10.0.0.0/16"));
            tokio::spawn(async move {
                let way = if task % 2 == 0 { WriteMode::Apply } else { WriteMode::Create };
                (way, world.operator().write_document(&manifest, way, soon()).await)
            })
        })
        .collect();
    let mut created = 0;
    for task in tasks {
        match task.await.unwrap() {
            (_, Ok(WriteOutcome::Created)) => created += 1,
            (WriteMode::Apply, Ok(written)) => assert_eq!(written, WriteOutcome::Unchanged),
            (way, Err(Error::Document(error))) => {
                assert_eq!(
                    (way, error.to_string()),
                    (WriteMode::Create, "resource already exists: IPPool(one)".to_owned())
                );
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(created, 1);
    assert_eq!(world.operator().documents(DocumentKind::Pool, &Namespaces::All, soon()).await.unwrap().items.len(), 1);
}

/// Starts a task that assigns an address to each of `containers` containers, one after the other, and returns all
/// results.
fn assign(world: &World, containers: usize) -> JoinHandle<Vec<Result<IpAddr>>> {
    let world = world.clone();
    tokio::spawn(async move {
        let mut said = Vec::new();
        for number in 0..containers {
            said.push(world.one(["a", "b", "c"][number % 3], &format!("c{number}")).await);
            tokio::task::yield_now().await;
        }
        said
    })
}

#[tokio::test]
async fn pool_deletion_beside_assignments_is_all_or_nothing() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    let assigning = assign(&world, 30);
    tokio::task::yield_now().await;
    let deleted = world.operator().delete_pool_if("main", InUse::Refuse, soon()).await;
    let given = assigning.await.unwrap().into_iter().flatten().count();
    world.check().await;
    let pools = world.ipam.inventory(soon()).await.unwrap().pools;
    match deleted {
        Ok(()) => assert!(given == 0 && pools.is_empty(), "{given} addresses of no pool"),
        Err(error) => {
            assert!(matches!(error, Error::PoolInUse { .. }), "{error}");
            assert!(pools[0].is_enabled() && given > 0);
        }
    }
}

#[tokio::test]
async fn pool_split_is_not_noticed_by_assignments() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/22").await;
    let assigning = assign(&world, 60);
    for (name, number) in [("main", 2), ("split-main-0", 4), ("split-main-1", 32)] {
        tokio::task::yield_now().await;
        world.operator().split_pool(PoolChoice::Name(name), number, soon()).await.unwrap();
    }
    for said in assigning.await.unwrap() {
        said.unwrap();
    }
    world.check().await;
    assert_eq!(world.ipam.inventory(soon()).await.unwrap().pools.len(), 36);
}

#[tokio::test]
async fn node_deletion_takes_its_affinities() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/28").await;
    world.one("a", "c1").await.unwrap();
    world.ipam.claim_affinity(&Owner::host("a"), "10.0.0.0/28".parse().unwrap(), soon()).await.unwrap();
    let node = Manifest::named(DocumentKind::Node, "a");
    world.operator().delete_document(&node, InUse::Refuse, soon()).await.unwrap();
    let mine = world.dump().await;
    let affinities = mine.iter().filter(|kv| kv.key.to_string().contains("/ipam/v2/host/a/")).count();
    assert_eq!(affinities, 1, "that of the block in use");
    assert!(matches!(world.one("a", "c2").await, Err(Error::UnknownNode(_))));
}
