//! Finds out facts about this machine: its boot, its name, the addresses in its network namespaces, and the addresses
//! that devices on its wires use.
//!
//! The crate depends neither on the store nor on CNI. The function [`scan`] is evidence for a caller that releases
//! addresses. A scan either covers every network namespace or returns [`IncompleteScan`].

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
