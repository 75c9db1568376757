//! Sets up the network of one container by netlink, like Calico's main CNI plugin: interfaces, addresses, routes and
//! kernel settings. The crate is independent of stores, CNI and runtimes.
//!
//! A container gets a pair of interfaces. One end of the pair is in the container's network namespace and has the
//! container's addresses. The other end of the pair stays on the host, with a host route for each address. The
//! container sends all packets to a next hop whose address no machine has, and the host's end answers for that address.
//!
//! The module [`masquerade`] translates the source addresses of packets that containers send to destinations outside
//! all pools.
//!
//! The crate is synchronous. The crate uses one netlink socket for each of the two namespaces, puts several requests
//! into one message where possible, and runs no other program. Only [`disconnect`] needs a second process, for which
//! the caller starts the caller's own program again.

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
