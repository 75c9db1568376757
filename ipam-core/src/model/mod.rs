//! The stored documents, exactly as Calico writes them: their keys, their JSON, and what may be done to each.
//!
//! A document that was read and not changed is written back equal, down to `null` against absent and to fields that
//! this version does not know. Documents of earlier versions of Calico are read, too; a document that is changed is
//! written in the current form.

mod affinity;
mod attribute;
mod block;
mod codec;
mod config;
mod config_spec;
mod endpoint;
mod endpoint_rules;
mod handle;
mod kept;
pub mod keys;
mod lazy_map;
mod node;
mod node_handles;
mod overlap;
mod owner;
mod pool;
mod pool_rules;
mod pool_spec;
mod prefixes;
mod profile;
mod quota;
mod reservation;
mod resource;
mod spec_field;
mod sticky;
mod workload;

pub use affinity::{Affinity, AffinityState};
pub use attribute::Attribute;
pub use block::{
    AddressState, AlreadyAssigned, Block, Cooldown, ExpectedOwner, HostReserved, MAX_BLOCK_ADDRESSES, NotOwner,
    OtherOwner, OwnerChange, OwnerRefusal, OwnerUpdate, ReleaseConflict, ReleaseConflictKind, ReleaseRequest, Released,
    UnusableBlock, WINDOWS_RESERVED_HANDLE,
};
pub use block::{Flaws, StoredBlock};
pub use codec::{Document, Malformed};
pub use config::{AddressPersistence, ContradictorySettings, IpamConfig};
pub use config_spec::SETTINGS_FIELDS;
pub use endpoint::{ENDPOINT_FIELDS, EndpointFacts, EndpointPort, Orchestrator, WorkloadEndpoint, host_network};
pub use endpoint_rules::{check_endpoint, endpoint_name_on, split_endpoint_name};
pub use handle::Handle;
pub use node::Node;
pub use node_handles::{is_node_handle, renamed_node_handle};
pub use overlap::{Cover, Precision, covers_of_overlaps, overlaps_of_addresses, ranges_around};
pub use owner::Owner;
pub use pool::{AssignmentMode, NETWORK_ANNOTATION, NewPool, Pool, PoolUse};
pub use pool_rules::{
    check_changed_pool, check_new_pool, check_stored_pool, default_block_size, fitting_block_size, without_tunnels,
};
pub use pool_spec::{POOL_FIELDS, read_pool_spec};
pub use prefixes::{PREFIX_LENGTH_ANNOTATION, block_size_for, is_of_prefixes, node_prefix_handle};
pub use profile::new_profile;
pub use quota::{QuotaCount, QuotaKind, Quotas, Subject};
pub use reservation::{IpReservation, RESERVATION_FIELDS, read_reservation_spec};
pub use resource::{Labels, Resource, check_name};
pub use spec_field::InvalidPool;
pub use sticky::{StickyAddress, StickyRecord};
pub use workload::{InvalidWorkload, handle_id, same_handle, workload_endpoint_name};
