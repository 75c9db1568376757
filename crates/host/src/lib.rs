//! This machine: its boot, its name, the addresses of the interfaces in its network namespaces, and of the devices on its
//! wires.
//!
//! Nothing here knows a store or CNI. [`scan`] is evidence for a caller that releases addresses: it either saw
//! everything, or it says that it did not.

mod held;
mod machine;
mod probe;
mod routes;
mod sight;

pub use held::{Held, HeldBlocks, Notes};
pub use machine::{NODENAME_FILE, NodeNames, boot_id, hostname, node_name, running, short_boot, uptime};
pub use probe::{Mac, Probed, probe};
pub use routes::{Route, all_routes, routes};
pub use sight::{Blind, Sight, network_namespace, scan};
