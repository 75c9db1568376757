//! The verbs of pools and reservations.

use std::net::IpAddr;

use clap::{Args, Subcommand};
use ipnet::IpNet;

use super::Bridged;

#[derive(Debug, Subcommand)]
pub(crate) enum Pool {
    /// Make a pool, and the store if there is none yet
    #[command(after_help = "\
Examples:
  margay pool create main 10.65.0.0/16
  margay pool create pods fd00:10:65::/48 --prefix-length 64
  margay pool create lab 10.70.0.0/24 --gateway 10.70.0.1
  margay pool create lab --auto /24
  margay pool create racks-b 10.80.0.0/16 --node-selector \"rack == 'b'\"")]
    Create(PoolCreate),
    /// List the pools
    #[command(visible_alias = "ls", after_help = "Examples:\n  margay pool list\n  margay pool list -o json")]
    List,
    /// Delete a pool from which no address is in use
    #[command(
        visible_alias = "rm",
        after_help = "\
A pool from which addresses are in use is left alone, and it is said where they are.

Examples:
  margay pool delete lab
  margay pool delete lab --dry-run"
    )]
    Delete(PoolDelete),
}

#[derive(Debug, Args)]
pub(crate) struct PoolDelete {
    /// The pool's name
    pub(crate) name: String,

    /// Check everything and delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    #[command(flatten)]
    pub(crate) bridged: Bridged,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct PoolCreate {
    /// The pool's name: lower-case letters, digits, '-' and '.'
    pub(crate) name: String,

    /// The range, such as 10.65.0.0/16 or fd00:10:65::/48
    #[arg(value_parser = cidr, required_unless_present = "auto")]
    pub(crate) cidr: Option<IpNet>,

    /// Choose a private range of this prefix length (IPv4 16 to 30, IPv6 48 to 126) that no pool, route or network here has
    #[arg(long, value_name = "BITS", value_parser = auto_bits, conflicts_with_all = ["cidr", "gateway"])]
    pub(crate) auto: Option<u8>,

    /// The prefix length of the blocks that nodes take: 20 to 32, for IPv6 116 to 128 [default: 26 or 122, or a smaller pool]
    #[arg(long, value_name = "BITS")]
    pub(crate) block_size: Option<u8>,

    /// Assign prefixes of this length instead of addresses
    #[arg(long, value_name = "BITS", conflicts_with_all = ["block_size", "gateway", "auto"])]
    pub(crate) prefix_length: Option<u8>,

    /// For a bridged network: reserve this address as its gateway, and the network and broadcast addresses
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) gateway: Option<IpAddr>,

    /// Which nodes may use the pool, in Calico's selector language [default: all()]
    #[arg(long, value_name = "SELECTOR")]
    pub(crate) node_selector: Option<String>,

    /// Which namespaces may use the pool, in Calico's selector language [default: all of them]
    #[arg(long, value_name = "SELECTOR")]
    pub(crate) namespace_selector: Option<String>,

    /// Use the pool only where a network asks for it by name
    #[arg(long)]
    pub(crate) manual: bool,

    /// Check everything and make nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Reservation {
    /// Reserve addresses, so that they are never handed out
    #[command(after_help = "\
Examples:
  margay reservation create routers 10.65.0.1 10.65.0.2
  margay reservation create dhcp 10.70.0.128/25 --dry-run

An address that is in use stays in use; it is only not handed out again.")]
    Create(ReservationCreate),
    /// List the reservations
    #[command(
        visible_alias = "ls",
        after_help = "Examples:\n  margay reservation list\n  margay reservation list -o json"
    )]
    List,
    /// Delete a reservation: its addresses can be handed out again
    #[command(visible_alias = "rm", after_help = "Examples:\n  margay reservation delete routers --dry-run")]
    Delete(ReservationDelete),
}

#[derive(Debug, Args)]
pub(crate) struct ReservationCreate {
    /// The reservation's name: lower-case letters, digits, '-' and '.'
    pub(crate) name: String,

    /// Addresses and ranges
    #[arg(required = true, value_name = "CIDR", value_parser = cidr_or_address)]
    pub(crate) cidrs: Vec<IpNet>,

    /// Check everything and make nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReservationDelete {
    /// The reservation's name
    pub(crate) name: String,

    /// Check everything and delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// A range without host bits; a bare address is refused, since a pool of one address is rarely what is meant.
fn cidr(text: &str) -> Result<IpNet, String> {
    let net: IpNet = text.parse().map_err(|_| "not a range such as 10.65.0.0/16 or fd00:10:65::/48".to_owned())?;
    masked(net)
}

/// A prefix length, with or without a slash.
fn auto_bits(text: &str) -> Result<u8, String> {
    let bits = text.strip_prefix('/').unwrap_or(text).parse().ok();
    bits.filter(|bits| (16..=30).contains(bits) || (48..=126).contains(bits))
        .ok_or_else(|| "not a prefix length of 16 to 30, or of 48 to 126 for IPv6".to_owned())
}

/// A range without host bits, or an address.
fn cidr_or_address(text: &str) -> Result<IpNet, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(address.into());
    }
    let net: IpNet = text.parse().map_err(|_| "not an address or a range such as 10.65.0.0/28".to_owned())?;
    masked(net)
}

fn masked(net: IpNet) -> Result<IpNet, String> {
    let trunc = net.trunc();
    if trunc == net { Ok(net) } else { Err(format!("it has host bits set; did you mean {trunc}?")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_no_host_bits() {
        assert_eq!(cidr("10.65.0.0/16").unwrap().to_string(), "10.65.0.0/16");
        assert!(cidr("10.65.0.1/16").unwrap_err().contains("10.65.0.0/16"));
        assert!(cidr("10.65.0.1").is_err());
        assert_eq!(cidr_or_address("fd00::1").unwrap().to_string(), "fd00::1/128");
        assert!(cidr_or_address("10.0.0.0/33").is_err());
    }
}

pub(crate) const ASSIGN_PREFIX: &str = "\
Examples:
  margay ipam assign-prefix racks --node node1
  margay ipam assign-prefix racks --node node1 -o json | jq -r .prefix
  margay ipam assign-prefix racks --node node1 --dry-run

The pool has prefixes (margay pool create NAME CIDR --prefix-length BITS). A node that has one of the pool keeps it: the
command says the same again. To release it: margay ipam release --handle HANDLE, with the handle that the command says.";

/// The arguments of `ipam assign-prefix`.
#[derive(Debug, Args)]
pub(crate) struct AssignPrefix {
    /// The pool's name
    #[arg(value_name = "POOL")]
    pub(crate) pool: String,

    /// The node
    #[arg(long, value_name = "NODE")]
    pub(crate) node: String,

    /// Only say what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
}
