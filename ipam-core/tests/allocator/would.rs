//! Tests that `would_assign` predicts whether an assignment succeeds.

use ipam_core::Error;
use ipam_core::assign::{AssignRequest, RequestedAddresses};

use crate::world::{World, attachment, soon};

#[tokio::test]
async fn would_assign_says_what_assign_does_and_writes_nothing() {
    let world = World::new().await;
    // The pool has two blocks of four addresses.
    world.add_pool("v4", "10.0.0.0/29").await;
    let request = AssignRequest::new(attachment("a", "new"), RequestedAddresses::any(1, 0));
    for number in 0..8 {
        let node = if number < 4 { "a" } else { "b" };
        let before = world.dump().await;
        let would = world.ipam.would_assign(&request, soon()).await.unwrap();
        assert_eq!(world.dump().await, before, "nothing is written");
        assert_eq!(world.assign(&request).await.unwrap(), would.assigned);
        world.release("a", "new").await;
        world.one(node, &format!("c{number}")).await.unwrap();
    }
    let refused = world.ipam.would_assign(&request, soon()).await.unwrap_err();
    assert!(matches!(refused, Error::Exhausted { .. }), "{refused}");
    world.release("b", "c7").await;
    world.ipam.would_assign(&request, soon()).await.unwrap();
}
