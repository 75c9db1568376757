#![doc = include_str!("../README.md")]
//!
//! # Structure of the crate
//!
//! This crate defines the IPAM data model and the allocator. Within the workspace, this crate depends only on the crate
//! `kv`.
//!
//! [`model`] defines the documents exactly as Calico stores them. [`pools`], [`reservations`], [`selector`] and
//! [`utilization`] make decisions about stored documents without any I/O. Functions without I/O get the time, host
//! names and random numbers as arguments, so every decision is reproducible. [`Ipam`] is the allocator of addresses.
//! Most methods of [`Ipam`] run one transaction on a store: they read documents, decide and write. The largest
//! operation is the assignment of addresses, in [`assign`].
//!
//! The crate `margay-ipam-operator` implements the operations that an operator of a cluster runs. The modules
//! [`write_set`], [`assign_context`], [`block_lookup`] and [`usage`] are public because the crate
//! `margay-ipam-operator` uses them.
//!
//! # Calico's names
//!
//! Every method of Calico's IPAM library has a counterpart in this crate, as the following table shows. The
//! documentation of each method names its guards and errors. If the store's answer to a commit is lost, a method of
//! [`Ipam`] finds out the commit's outcome before it returns.
//!
//! | Calico | Here | Differs in |
//! |---|---|---|
//! | `AutoAssign` | [`Ipam::assign`], [`Ipam::assign_to_handle`], with [`RequestedAddresses::any`](assign::RequestedAddresses::any) | all or nothing: a shortage is an error, never a partial result |
//! | `AssignIP` | [`Ipam::assign`], [`Ipam::assign_to_handle`], with [`RequestedAddresses::these`](assign::RequestedAddresses::these) | several addresses in one call |
//! | `MaxAllocPerIPVersion` | [`HandleRequest::with_most_per_family`](assign::HandleRequest::with_most_per_family) | counts the addresses in blocks, not the counts in the handle |
//! | `ReleaseIPs` | [`Ipam::release_ips`] | atomic for up to 60 addresses in 4 blocks; Calico's is atomic per block |
//! | `ReleaseByHandle` | [`Ipam::release_by_handle`]; [`Ipam::release_attachment`] for one interface | handle and blocks change together |
//! | `IPsByHandle` | [`Ipam::addresses_of_handle`] | |
//! | `GetAssignmentAttributes` | [`Ipam::attributes_of`], [`Ipam::holding`] | also finds addresses of disabled pools and of blocks whose pool was deleted |
//! | `SetOwnerAttributes` | [`Ipam::set_owner_attributes`] | changes only the given address; each change names the expected owner; an unchanged owner is not written |
//! | owners of a VM's address, in the plugin | [`Ipam::assign_to_vm`], [`Ipam::release_vm_pod`] | each method makes one commit for both families |
//! | `ClaimAffinity` | [`Ipam::claim_affinity`] | at most [`MAX_BLOCKS_CLAIMED`](affinity::MAX_BLOCKS_CLAIMED) blocks |
//! | `ReleaseAffinity`, `ReleaseBlockAffinity` | [`Ipam::release_affinity`] | blocks in use are reported in the result, not as an error |
//! | `ReleaseHostAffinities` | [`Ipam::release_all_affinities`] | blocks in use are reported in the result, not as an error |
//! | `ReleasePoolAffinities` | [`Ipam::release_pool_affinities`] | also releases blocks of virtual owners; can keep blocks in use |
//! | `RemoveIPAMHost` | [`Ipam::remove_owner`] | |
//! | `EnsureBlock` | [`Ipam::ensure_blocks`] | both families in one commit; reserving addresses for the host is optional |
//! | `GetIPAMConfig` | [`Ipam::config`] | |
//! | `SetIPAMConfig` | [`Ipam::change_config`] | guarded, so that concurrent changes do not undo each other |
//! | `GetUtilization` | [`Ipam::utilization`], [`Utilization::of_pools`](utilization::Utilization::of_pools) | exact for pools of any size; blocks outside pools are listed separately |
//! | affinity type `virtual` | [`Owner::Virtual`](model::Owner::Virtual), [`Owner::load_balancer`](model::Owner::load_balancer) | determined by the owner, not by the intended use |
//! | `UpgradeHost` | | nothing to do on etcd |

pub mod affinity;
pub mod assign;
pub mod assign_context;
pub mod attachment;
pub mod block_lookup;
pub mod census;
mod check;
pub mod endpoints;
mod error;
pub mod forwarding;
pub mod free_range;
pub mod gc;
pub mod hints;
pub mod import_lock;
mod ipam;
pub mod model;
pub mod net;
pub mod pending_commits;
pub mod pools;
pub mod quarantine;
mod release;
pub mod reservations;
mod resources;
pub mod samples;
pub mod selector;
pub mod sticky;
pub mod timestamps;
pub mod usage;
pub mod utilization;
pub mod vm;
pub mod workloads;
pub mod write_set;

/// Makes an `async fn` return a boxed future. The compiler generates the code of an `async fn` again in each crate that
/// awaits it, but the code of a boxed future only once, in this crate. With boxed futures, the workspace's programs and
/// tests build in 165 s instead of 198 s after a change of this crate.
pub(crate) use async_recursion::async_recursion as boxed_future;
pub use check::{CheckResult, Standing};
pub use error::{BlockInUse, BridgeError, Error, ErrorSubject, OverlapError, QuotaReached, Result, VmError};
pub use ipam::{Clock, Ipam, Nodes, Uids};
pub use model::spec::{DocumentError, DocumentKind};
pub use release::ReleasedAddresses;
pub use usage::{BorrowedAddress, BorrowedAddresses, Holding, Inventory};
