//! A place where a store is.

use std::path::PathBuf;

use crate::cluster::ClusterAddress;

/// A place where a store is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The memory of this process.
    Memory,
    /// A folder of this machine.
    Folder(PathBuf),
    /// A cluster that serves many machines.
    Cluster(ClusterAddress),
}
