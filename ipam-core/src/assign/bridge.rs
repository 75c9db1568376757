//! Prepares the pools of bridged networks: chooses the gateway, and reserves the addresses that no container may have.
//!
//! A bridge, ptp or macvlan network is a subnet with a network address, a broadcast address and a gateway. The commit
//! of the first assignment for a bridged network reserves the network address, the broadcast address and the gateway.
//! An IPReservation named `margay-bridge-<pool>` lists the reserved addresses of the network, and its annotation
//! records the gateway. Neither Margay nor Calico assigns reserved addresses.

use std::net::IpAddr;

use ipnet::IpNet;

use super::request::Gateway;
use crate::error::{BridgeError, Result};
use crate::ipam::Ipam;
use crate::model::keys::{self, ResourceKind};
use crate::model::{AddressState, Document, IpReservation, Pool};
use crate::net::{Family, nth};
use crate::pools;
use crate::write_set::WriteSet;

/// The annotation that records a bridged network's gateway. It is set on the reservation for the network's pool.
pub const GATEWAY_ANNOTATION: &str = "margay.io/gateway";

/// The outcome of [`prepare`] for a pool of a bridged network.
#[derive(Debug)]
pub(crate) struct PreparedBridge {
    pub(crate) gateway: Option<IpAddr>,
    /// The reservation for the pool, if [`prepare`] created or changed the reservation.
    pub(crate) written: Option<IpReservation>,
}

/// Returns the name of the reservation for a bridged network's pool.
pub fn reservation_name(pool: &str) -> String {
    format!("margay-bridge-{pool}")
}

/// Ensures that the reservation for a bridged network's pool exists, and returns the gateway of the network's
/// containers.
///
/// The commit of an assignment on a bridged network guards the pool's reservation and, if the gateway is new, the block
/// that contains the gateway.
pub(crate) async fn prepare(
    ipam: &Ipam,
    work: &mut WriteSet<'_>,
    pool: &Pool,
    wanted: Gateway,
) -> Result<PreparedBridge> {
    let cidr = pool.cidr();
    if cidr.prefix_len() == cidr.max_prefix_len() {
        return Err(BridgeError::PoolTooSmall { pool: pool.name().to_owned(), cidr }.into());
    }
    let name = reservation_name(pool.name());
    let key = keys::resource(ResourceKind::IpReservation, &name);
    let stored = work.tx.get(&key).await?;
    let stored = stored.map(|value| IpReservation::decode(&key, value.as_bytes())).transpose()?;
    let recorded = stored.as_ref().and_then(recorded_gateway);

    let gateway = match wanted {
        Gateway::Recorded => recorded,
        Gateway::First => recorded.or_else(|| first_host(cidr)),
        Gateway::At(address) => Some(address),
    };
    if let Some(gateway) = gateway {
        check(cidr, gateway)?;
        match recorded {
            Some(recorded) if recorded != gateway => {
                return Err(BridgeError::OtherGateway { wanted: gateway, recorded, reservation: name }.into());
            }
            Some(_) => {}
            None => require_free(work, pool, gateway).await?,
        }
    }
    let networks = reserved(cidr, gateway);
    if gateway == recorded && (stored.is_some() || networks.is_empty()) {
        return Ok(PreparedBridge { gateway, written: None });
    }
    let mut document = stored.unwrap_or_else(|| IpReservation::new(&name, &[], &ipam.uid(), ipam.now()));
    document.set_networks(&networks);
    if let Some(gateway) = gateway {
        document.resource_mut().set_annotation(GATEWAY_ANNOTATION, &gateway.to_string());
    }
    work.tx.put(&key, document.encode()?)?;
    Ok(PreparedBridge { gateway, written: Some(document) })
}

/// Returns the gateway in the annotation of a bridged network's reservation.
pub fn recorded_gateway(reservation: &IpReservation) -> Option<IpAddr> {
    reservation.resource().annotation(GATEWAY_ANNOTATION)?.parse().ok()
}

/// Returns the first host address of a network: the address after the network address, or the first address if the
/// network has no network address.
pub fn first_host(cidr: IpNet) -> Option<IpAddr> {
    nth(cidr, u128::from(!is_point_to_point(cidr)))
}

/// Returns the addresses of a bridged network that no container may have: the network address, the broadcast address
/// and the gateway. IPv6 has no broadcast address, and the first address of an IPv6 network is the routers' anycast
/// address. A network of two addresses has no network address and no broadcast address (RFC 3021, RFC 6164).
pub fn reserved(cidr: IpNet, gateway: Option<IpAddr>) -> Vec<IpNet> {
    let mut addresses = Vec::new();
    if !is_point_to_point(cidr) {
        addresses.push(cidr.network());
        if Family::of_net(cidr) == Family::V4 {
            addresses.push(cidr.broadcast());
        }
    }
    addresses.extend(gateway);
    addresses.into_iter().map(IpNet::from).collect()
}

fn is_point_to_point(cidr: IpNet) -> bool {
    cidr.prefix_len() + 1 == cidr.max_prefix_len()
}

/// True if a gateway lies outside an IPv6 network, like the link-local address of a router, which containers can use as
/// their gateway. A gateway outside the network needs no reservation, because no address outside the network is
/// assigned.
pub fn is_outside(cidr: IpNet, gateway: IpAddr) -> bool {
    let is_host = !gateway.is_multicast() && !gateway.is_unspecified() && !gateway.is_loopback();
    cidr.addr().is_ipv6() && gateway.is_ipv6() && is_host && !cidr.contains(&gateway)
}

/// Fails if a gateway is not a host address of the network.
pub fn check(cidr: IpNet, gateway: IpAddr) -> Result<(), BridgeError> {
    let is_host = cidr.contains(&gateway) && !reserved(cidr, None).contains(&IpNet::from(gateway));
    let is_router = gateway.is_ipv4() || is_outside(cidr, gateway);
    match is_host {
        true => Ok(()),
        false if !cidr.contains(&gateway) && is_router => Err(BridgeError::GatewayOutside { gateway, cidr }),
        false => Err(BridgeError::BadGateway { gateway, cidr }),
    }
}

/// Fails if the address of a new gateway is assigned to a container.
async fn require_free(work: &mut WriteSet<'_>, pool: &Pool, gateway: IpAddr) -> Result<()> {
    let Some(cidr) = pools::block_of(pool, gateway) else { return Ok(()) };
    work.tx.get(&keys::block(cidr)).await?;
    if let Some(block) = work.block(cidr).await?
        && let AddressState::Assigned(entry) = block.lookup(gateway)
    {
        let handle = entry.handle().unwrap_or("an unknown owner").to_owned();
        return Err(BridgeError::GatewayInUse { gateway, handle }.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn texts(nets: &[IpNet]) -> Vec<String> {
        nets.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn bridge_reservations_depend_on_size_and_family() {
        let gateway = |text: &str| Some(text.parse().unwrap());
        assert_eq!(
            texts(&reserved(net("10.0.0.0/24"), gateway("10.0.0.1"))),
            ["10.0.0.0/32", "10.0.0.255/32", "10.0.0.1/32"]
        );
        assert_eq!(texts(&reserved(net("10.0.0.0/31"), gateway("10.0.0.0"))), ["10.0.0.0/32"]);
        assert_eq!(texts(&reserved(net("fd00::/64"), gateway("fd00::1"))), ["fd00::/128", "fd00::1/128"]);
        assert_eq!(texts(&reserved(net("fd00::/127"), None)), Vec::<String>::new());
    }

    #[test]
    fn bridge_first_host_follows_network_address() {
        assert_eq!(first_host(net("10.0.0.0/24")), Some("10.0.0.1".parse().unwrap()));
        assert_eq!(first_host(net("10.0.0.4/31")), Some("10.0.0.4".parse().unwrap()));
        assert_eq!(first_host(net("fd00::/64")), Some("fd00::1".parse().unwrap()));
    }

    #[test]
    fn bridge_gateway_is_host_address() {
        let cidr = net("10.0.0.0/24");
        assert!(check(cidr, "10.0.0.254".parse().unwrap()).is_ok());
        for bad in ["10.0.0.0", "10.0.0.255", "10.0.1.1", "fd00::1"] {
            assert!(check(cidr, bad.parse().unwrap()).is_err(), "{bad}");
        }
        let outside = |cidr: &str, gateway: &str| is_outside(net(cidr), gateway.parse().unwrap());
        assert!(outside("fd00::/64", "fe80::1") && outside("fd00::/64", "fd00:0:0:1::1"));
        for (cidr, gateway) in [
            ("10.0.0.0/24", "10.0.1.1"),
            ("10.0.0.0/24", "fe80::1"),
            ("fd00::/64", "10.0.0.1"),
            ("fd00::/64", "fd00::1"),
            ("fd00::/64", "fd00::"),
            ("fd00::/64", "ff02::1"),
            ("fd00::/64", "::"),
            ("fd00::/64", "::1"),
        ] {
            assert!(!outside(cidr, gateway), "{cidr} {gateway}");
        }
    }
}
