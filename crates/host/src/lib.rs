//! Collects facts about this machine: its boot id, its node name, the addresses in its network namespaces, and the
//! addresses that other devices on a link use.
//!
//! The crate does not depend on Margay's stores or on CNI. Callers use the result of [`scan`] as evidence that an
//! address can be released. A scan covers every network namespace of the machine, or fails with [`IncompleteScan`].

mod held_blocks;
mod machine;
mod netns_scan;
mod probe;
mod routes;

pub use held_blocks::{BlockNotes, HeldBlocks, ScanRecord};
pub use machine::{NODENAME_FILE, NodeNames, boot_id, felix_file, hostname, node_name, running, short_boot, uptime};
pub use netns_scan::{IncompleteScan, NetnsScan, network_namespace, scan};
pub use probe::{Mac, ProbeResult, probe};
pub use routes::{Route, all_routes, routes};
