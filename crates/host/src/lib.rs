//! This machine: its boot, its name, the addresses of the interfaces in its network namespaces, and of the devices on its
//! wires.
//!
//! Nothing here knows a store or CNI. [`scan`] is evidence for a caller that releases addresses: it either saw
//! everything, or it says that it did not.

mod held_blocks;
mod machine;
mod netns_scan;
mod probe;
mod routes;

pub use held_blocks::{BlockNotes, HeldBlocks, ScanRecord};
pub use machine::{NODENAME_FILE, NodeNames, boot_id, hostname, node_name, running, short_boot, uptime};
pub use netns_scan::{IncompleteScan, NetnsScan, network_namespace, scan};
pub use probe::{Mac, ProbeResult, probe};
pub use routes::{Route, all_routes, routes};
