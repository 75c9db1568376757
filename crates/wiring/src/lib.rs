//! Sets up the network of one container by netlink, like Calico's main CNI plugin: interfaces, addresses, routes and
//! kernel settings. The crate is independent of stores, CNI and runtimes.
//!
//! A container gets a pair of interfaces. One end is in the container's network namespace and has the addresses. The
//! other end stays on the host, with a host route for each address. The container sends all packets to a next hop that
//! no machine has, and the host's end answers for it.
//!
//! [`masquerade`] translates the source addresses of packets that containers send to the world.
//!
//! The crate is synchronous. It uses one netlink socket for each of the two namespaces, sends requests together where
//! their order allows it, and runs no other program. Only for [`disconnect`] the caller starts a second process of its
//! own program.

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
