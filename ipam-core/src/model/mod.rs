//! Defines the stored documents exactly as Calico writes them: their keys, their JSON, and the operations on each
//! document.
//!
//! An unchanged document is written back exactly as it was read: unknown fields and `null` fields are kept, and absent
//! fields stay absent. Margay also reads documents of earlier Calico versions. Margay writes a changed document in the
//! form of Calico's current version.

mod attribute;
mod block;
mod cluster;
mod codec;
mod config;
mod endpoint;
mod handle;
pub mod keys;
mod overlap;
mod owner;
mod pool;
mod pool_spec;
mod prefixes;
mod quota;
mod resource;
mod short_attributes;
pub(crate) mod spec;

pub use attribute::Attribute;
pub use block::{
    AddressState, AlreadyAssigned, Block, BlockFlaws, Cooldown, ExpectedOwner, HostReserved, MAX_BLOCK_ADDRESSES,
    NotOwner, OtherOwner, OwnerChange, OwnerRefusal, OwnerUpdate, ReleaseConflict, ReleaseConflictKind, ReleaseRequest,
    ReleaseResult, StickyAddress, StickyRecord, StoredBlock, UnusableBlock, WINDOWS_RESERVED_HANDLE,
};
pub use cluster::ClusterInformation;
pub use codec::{Document, JsonObject, Malformed};
pub use config::{AddressPersistence, ContradictorySettings, IpamConfig, SETTINGS_FIELDS};
pub use endpoint::{
    ENDPOINT_FIELDS, EndpointFacts, EndpointPort, Orchestrator, WorkloadEndpoint, check_endpoint, endpoint_name_on,
    host_network, new_profile, split_endpoint_name,
};
pub use handle::{
    Handle, InvalidWorkload, handle_id, is_node_handle, renamed_node_handle, same_handle, workload_endpoint_name,
};
pub use overlap::{Cover, Precision, covers_of_overlaps, overlaps_of_addresses, ranges_around};
pub use owner::{Affinity, AffinityState, Owner};
pub use pool::{AssignmentMode, NETWORK_ANNOTATION, NewPool, Pool, PoolUse};
pub use pool_spec::{
    POOL_FIELDS, check_changed_pool, check_new_pool, check_stored_pool, default_block_size, fitting_block_size,
    read_pool_spec, without_tunnels,
};
pub use prefixes::{PREFIX_LENGTH_ANNOTATION, block_size_for, is_of_prefixes, node_prefix_handle};
pub use quota::{QuotaCount, QuotaKind, QuotaSubject, Quotas};
pub use resource::{
    IpReservation, Labels, Node, NodeFacts, RESERVATION_FIELDS, Resource, check_name, read_reservation_spec,
};
pub use spec::InvalidPool;
