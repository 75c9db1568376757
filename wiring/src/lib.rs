//! The network of one container, by netlink: what Calico's main CNI plugin does with interfaces, addresses, routes and
//! kernel settings, and nothing else. This crate knows no store, no CNI and no runtime.
//!
//! A container gets a pair of interfaces. One end is in the container's network namespace and has the addresses. The other
//! end stays on the host, and a route for each address leads to it. The container sends everything to a next hop that no
//! machine has, and the host's end answers for it.
//!
//! What containers send to the rest of the world may leave under the host's own address: [`masquerade`].
//!
//! Everything is synchronous. The kernel is asked over one netlink socket for each of the two namespaces, and requests go
//! out together where their order allows it. No other program is run.

mod connect;
mod disconnect;
mod error;
mod forwarding;
mod host;
mod inspect;
mod link;
pub mod masquerade;
mod messages;
mod namespace;
mod netlink;
mod nftables;
mod pauses;
mod plan;
mod presence;
mod replies;
mod routes;
mod sysctl;

pub use connect::{Wired, connect};
pub use disconnect::disconnect;
pub use error::Error;
pub use forwarding::ensure_forwarding;
pub use host::{host_interfaces, remove_host_interface};
pub use inspect::inspect;
pub use plan::{Device, Forwarding, NextHop, Plan};
pub use presence::has_interface;
