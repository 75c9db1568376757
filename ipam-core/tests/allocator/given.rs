//! Tests assignments of requested addresses on routed networks.

use ipam_core::Error;
use ipam_core::assign::{AssignRequest, RepeatPolicy, RequestedAddresses};
use ipam_core::model::IpamConfig;

use crate::world::{World, attachment, ip};

pub(crate) fn these(node: &str, container: &str, ips: &[&str]) -> AssignRequest {
    let addresses: Vec<_> = ips.iter().map(|text| ip(text)).collect();
    AssignRequest::new(attachment(node, container), RequestedAddresses::these(addresses))
}

#[tokio::test]
async fn given_addresses_are_all_or_none() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    world.add_pool("v6", "fd00::/112").await;
    world.assign(&these("a", "c1", &["10.0.0.9"])).await.unwrap();
    let before = world.dump().await;
    let error = world.assign(&these("a", "c2", &["fd00::9", "10.0.0.9"])).await.unwrap_err();
    assert_eq!(error.to_string(), "resource already exists: 10.0.0.9 with error: Address already assigned in block");
    let error = world.assign(&these("a", "c2", &["fd00::9", "10.1.0.9"])).await.unwrap_err();
    assert_eq!(error.to_string(), "The provided IP address is not in a configured pool\n");
    assert_eq!(world.dump().await, before);
    let assigned = world.assign(&these("a", "c2", &["fd00::9", "10.0.0.10"])).await.unwrap();
    assert_eq!(assigned.iter().map(|one| one.ip).collect::<Vec<_>>(), [ip("fd00::9"), ip("10.0.0.10")]);
    world.check().await;
}

#[tokio::test]
async fn given_address_again_is_same_answer_or_calico_error() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    let mut request = these("a", "c1", &["10.0.0.9"]);
    let first = world.assign(&request).await.unwrap();
    assert_eq!(world.assign(&request).await.unwrap(), first);
    request.repeated = RepeatPolicy::Refused;
    assert!(matches!(world.assign(&request).await, Err(Error::AlreadyAssigned(_))));
}

#[tokio::test]
async fn given_addresses_respect_strict_affinity() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    world.assign(&these("a", "c1", &["10.0.0.1"])).await.unwrap();
    world.configure(IpamConfig::default().with_strict_affinity(true)).await;
    let error = world.assign(&these("b", "c2", &["10.0.0.2"])).await.unwrap_err();
    assert_eq!(error.to_string(), "Block host affinity does not match");
}
