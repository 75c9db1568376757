//! The allocator on an open store, as plugins and the daemon have it.

use std::sync::Arc;

use datastore::{Blocking, ClusterStore, Location, OpenOptions};
use ipam_core::{Ipam, Nodes};
use kv::Store;

use crate::hints::{FileHints, FullPools, HINTS_FOLDER};
use crate::intents::{FileIntents, INTENTS_FOLDER};
use crate::sight::Sight;

/// For a process that does one thing at a time and ends.
pub(crate) fn in_place(options: OpenOptions) -> OpenOptions {
    options.with_blocking(Blocking::InPlace)
}

/// The allocator on a store. On etcd a commit of a killed process may still be carried out, so the allocator records
/// each commit as pending before it sends it. On a store that a process has to itself nothing is carried out after its
/// death. On etcd it also remembers where it found room, which saves a round trip. Everywhere it remembers which of several
/// pools were full.
pub fn ipam_on(store: Arc<dyn Store>, location: &Location, cluster: Option<Arc<dyn ClusterStore>>) -> Ipam {
    if location.is_shared() {
        let intents = FileIntents::new(INTENTS_FOLDER, location.to_string()).on(cluster);
        // Hints are read before the cluster has reported its id.
        let hints = FileHints::new(HINTS_FOLDER, location.in_order());
        Ipam::new(store, Nodes::Registered).with_intents(Arc::new(intents)).with_hints(Arc::new(hints))
    } else {
        let hints = FullPools(FileHints::new(HINTS_FOLDER, location.to_string()));
        Ipam::new(store, Nodes::FirstSeen).with_hints(Arc::new(hints))
    }
}

/// The allocator as [`ipam_on`] makes it, for a process that scans the machine when it finds no room.
pub(crate) fn on_machine(store: Arc<dyn Store>, location: &Location, cluster: Option<Arc<dyn ClusterStore>>) -> Ipam {
    ipam_on(store, location, cluster).with_live(Arc::new(Sight))
}
