//! The daemon `margay serve` does the verbs, if there is one for the store. Otherwise, and whatever is wrong with it, the plugin
//! does them by itself.

mod call;
mod client;

use std::sync::Arc;

use datastore::{ClusterStore, Location};
use ipam_core::Ipam;
use kv::Store;

pub use call::{Answer, Asked, Call};
pub use client::Served;

pub use crate::host_lock::HostLock;

/// The allocator as the daemon has it: like the plugin's, but it does not scan the machine.
pub fn ipam_on(store: Arc<dyn Store>, location: &Location, cluster: Option<Arc<dyn ClusterStore>>) -> Ipam {
    crate::allocator::ipam_on(store, location, cluster)
}
