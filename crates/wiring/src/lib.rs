//! Sets up the network of one container over netlink, like Calico's main CNI plugin: interfaces, addresses, routes and
//! kernel settings. The crate knows nothing about stores, CNI or container runtimes.
//!
//! Each container is connected by a pair of interfaces. One end of the pair is in the container's network namespace and
//! has the container's addresses. The host keeps the other end, with a host route for each of the container's
//! addresses. The container sends all packets to a next hop whose address no machine has. The host's end of the pair
//! answers ARP and NDP requests for the address of the next hop.
//!
//! The module [`masquerade`] adds the rules that translate the source addresses of packets from containers to
//! destinations outside all pools.
//!
//! All functions of the crate are synchronous. A call uses one netlink socket for each of the two network namespaces
//! (host and container), puts several requests into one message where possible, and runs no other program. Only
//! [`disconnect`] needs a second process, for which the caller starts its own program again.

mod connect;
mod disconnect;
mod error;
mod inspect;
mod link;
pub mod masquerade;
mod messages;
mod namespace;
mod netlink;
mod plan;
mod sysctl;

pub use connect::{ConnectResult, connect};
pub use disconnect::{StartRemover, disconnect, remove_interface};
pub use error::Error;
pub use inspect::inspect;
pub use link::{HostInterface, has_interface, host_interfaces, remove_host_interface};
pub use plan::{Device, Forwarding, NextHop, OldInterface, Plan};
pub use sysctl::ensure_forwarding;
