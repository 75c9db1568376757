//! Documents as people write and read them: pools, reservations, nodes and the settings, in the form of Calico's API.
//! Endpoints of workloads and profiles are shown too, and endpoints deleted; the CNI plugin alone writes them.
//!
//! A document that is written replaces the one of its name: what its spec does not say is as if it had never been said.
//! Some things stay all the same: the unique id and the time of creation, the status, fields that this version does not
//! know, and annotations of Margay's own. An unknown member of a document is refused, so that a slip of the pen is not
//! taken for a value.

mod build;
mod manifest;
mod settings;
mod show;
mod write;

use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{ENDPOINT_FIELDS, POOL_FIELDS, SETTINGS_FIELDS};
use kv::Key;

pub use ipam_core::{DocumentError, DocumentKind};
pub use manifest::Manifest;
pub use show::{Documents, Namespaces, Shown};
pub use write::{WriteMode, Written};

/// The version of the API that all documents have.
const API_VERSION: &str = "projectcalico.org/v3";

/// The one document of the settings.
const SETTINGS_NAME: &str = "default";

/// The namespace of a document that names none.
pub const DEFAULT_NAMESPACE: &str = "default";

/// The fields of a profile's spec, of its rules and of what a rule is about.
const PROFILE_FIELDS: [&str; 11] = [
    "ingress",
    "egress",
    "labelsToApply",
    "action",
    "ipVersion",
    "nets",
    "selector",
    "notNets",
    "notSelector",
    "source",
    "destination",
];

type Object = serde_json::Map<String, serde_json::Value>;

/// The key of a document.
fn key(kind: DocumentKind, full_name: &str) -> Key {
    match kind {
        DocumentKind::Pool => keys::resource(ResourceKind::IpPool, full_name),
        DocumentKind::Reservation => keys::resource(ResourceKind::IpReservation, full_name),
        DocumentKind::Node => keys::resource(ResourceKind::Node, full_name),
        DocumentKind::Settings => keys::config(),
        DocumentKind::WorkloadEndpoint => {
            let (namespace, name) = split(full_name);
            keys::workload_endpoint(namespace, name)
        }
        DocumentKind::Profile => keys::profile(full_name),
    }
}

/// The full name of the document of a kind that a key is of. The settings are found by no name.
fn named_by(kind: DocumentKind, key: &Key) -> Option<String> {
    match kind {
        DocumentKind::Pool => keys::parse_resource(ResourceKind::IpPool, key).map(str::to_owned),
        DocumentKind::Reservation => keys::parse_resource(ResourceKind::IpReservation, key).map(str::to_owned),
        DocumentKind::Node => keys::parse_resource(ResourceKind::Node, key).map(str::to_owned),
        DocumentKind::Settings => None,
        DocumentKind::WorkloadEndpoint => {
            keys::parse_workload_endpoint(key).map(|(namespace, name)| kind.full_name(namespace, name))
        }
        DocumentKind::Profile => keys::parse_profile(key).map(str::to_owned),
    }
}

/// The common prefix of the keys of all documents of a kind.
fn prefix(kind: DocumentKind, within: &Namespaces) -> Key {
    match (kind, within) {
        (DocumentKind::Pool, _) => keys::resources_prefix(ResourceKind::IpPool),
        (DocumentKind::Reservation, _) => keys::resources_prefix(ResourceKind::IpReservation),
        (DocumentKind::Node, _) => keys::resources_prefix(ResourceKind::Node),
        (DocumentKind::Settings, _) => keys::config(),
        (DocumentKind::WorkloadEndpoint, Namespaces::All) => keys::workload_endpoints_prefix(),
        (DocumentKind::WorkloadEndpoint, Namespaces::One(namespace)) => keys::workload_endpoint(namespace, ""),
        (DocumentKind::Profile, _) => keys::profiles_prefix(),
    }
}

/// The namespace and the name in a full name.
fn split(full_name: &str) -> (&str, &str) {
    full_name.split_once('/').unwrap_or((DEFAULT_NAMESPACE, full_name))
}

/// The names of a document's fields, in the order in which calicoctl prints those of any of its objects.
pub fn field_order() -> impl Iterator<Item = &'static str> {
    let objects = build::TOP.into_iter().chain(["items"]).chain(build::METADATA);
    objects.chain(POOL_FIELDS).chain(SETTINGS_FIELDS).chain(ENDPOINT_FIELDS).chain(PROFILE_FIELDS)
}
