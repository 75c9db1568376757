//! Tests the deletion of pools.

use ipam_core::Error;
use ipam_core::model::{NewPool, keys};

use crate::Operated;
use crate::world::{World, soon};

#[tokio::test]
async fn pool_deletion_keeps_used_and_clears_unused_pool() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap())).await;
    world.one("a", "c1").await.unwrap();
    let error = world.operator().delete_pool("v4", soon()).await.unwrap_err();
    assert!(matches!(error, Error::PoolInUse { addresses: 1, .. }), "{error}");
    world.one("a", "c2").await.unwrap();
    world.release("a", "c1").await;
    world.release("a", "c2").await;
    world.operator().delete_pool("v4", soon()).await.unwrap();
    assert!(world.dump().await.iter().all(|kv| keys::parse_resource(keys::ResourceKind::Node, &kv.key).is_some()));
    assert!(matches!(world.operator().delete_pool("v4", soon()).await, Err(Error::NotFound { .. })));
}
