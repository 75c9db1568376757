//! Tests reads of a whole store.

use std::time::Duration;

use ipam_core::Error;
use ipam_operator::inspect::AddressReporting;
use kv::{Deadline, ErrorKind};

use crate::Operated;
use crate::world::World;

#[tokio::test]
async fn inspection_ends_at_its_deadline() {
    let world = World::new().await;
    world.add_pool("p", "10.0.0.0/26").await;
    let error = world.operator().inspect(AddressReporting::Findings, Deadline::after(Duration::ZERO)).await.err();
    assert!(matches!(&error, Some(Error::Store(error)) if *error.kind() == ErrorKind::Timeout), "{error:?}");
}
