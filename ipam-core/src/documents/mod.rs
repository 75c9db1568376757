//! Documents as people write and read them: pools, reservations, nodes and the settings, in the form of Calico's API.
//! Endpoints of workloads and profiles are shown too, and endpoints deleted; the CNI plugin alone writes them.
//!
//! A document that is written replaces the one of its name: what its spec does not say is as if it had never been said.
//! Some things stay all the same: the unique id and the time of creation, the status, fields that this version does not
//! know, and annotations of Margay's own. An unknown member of a document is refused, so that a slip of the pen is not
//! taken for a value.

mod build;
mod fields;
mod manifest;
mod settings;
mod show;
mod write;

use std::fmt;

use kv::Key;

use crate::model::POOL_FIELDS;
use crate::model::keys::{self, ResourceKind};

pub use manifest::Manifest;
pub use show::{Documents, Namespaces, Shown};
pub use write::{WriteMode, Written};

/// The version of the API that all documents have.
const API_VERSION: &str = "projectcalico.org/v3";

/// The one document of the settings.
const SETTINGS_NAME: &str = "default";

/// The namespace of a document that names none.
pub const DEFAULT_NAMESPACE: &str = "default";

type Object = serde_json::Map<String, serde_json::Value>;

/// The kinds of document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DocumentKind {
    /// An address pool.
    Pool,
    /// A set of addresses never to be handed out.
    Reservation,
    /// A node of the cluster.
    Node,
    /// The settings that all nodes share. There is one document, `default`, and it is what the allocator goes by.
    Settings,
    /// The addresses, profiles and interface of a container or a pod.
    WorkloadEndpoint,
    /// The rules of the traffic that the containers of a network accept.
    Profile,
}

impl DocumentKind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Pool, Self::Reservation, Self::Node, Self::Settings, Self::WorkloadEndpoint, Self::Profile];

    /// The kind as a document names it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pool => ResourceKind::IpPool.kind(),
            Self::Reservation => ResourceKind::IpReservation.kind(),
            Self::Node => ResourceKind::Node.kind(),
            Self::Settings => "IPAMConfiguration",
            Self::WorkloadEndpoint => "WorkloadEndpoint",
            Self::Profile => "Profile",
        }
    }

    /// True if documents of this kind are in namespaces.
    pub fn is_namespaced(self) -> bool {
        self == Self::WorkloadEndpoint
    }

    /// The name by which a document is found among those of its kind, as Calico's messages have it: `NAMESPACE/NAME` of a
    /// kind with namespaces, the name alone of any other.
    pub fn full_name(self, namespace: &str, name: &str) -> String {
        if self.is_namespaced() { format!("{namespace}/{name}") } else { name.to_owned() }
    }

    fn key(self, full_name: &str) -> Key {
        match self {
            Self::Pool => keys::resource(ResourceKind::IpPool, full_name),
            Self::Reservation => keys::resource(ResourceKind::IpReservation, full_name),
            Self::Node => keys::resource(ResourceKind::Node, full_name),
            Self::Settings => keys::config(),
            Self::WorkloadEndpoint => {
                let (namespace, name) = split(full_name);
                keys::workload_endpoint(namespace, name)
            }
            Self::Profile => keys::profile(full_name),
        }
    }

    /// The full name of the document of this kind that a key is of. The settings are found by no name.
    fn named_by(self, key: &Key) -> Option<String> {
        match self {
            Self::Pool => keys::parse_resource(ResourceKind::IpPool, key).map(str::to_owned),
            Self::Reservation => keys::parse_resource(ResourceKind::IpReservation, key).map(str::to_owned),
            Self::Node => keys::parse_resource(ResourceKind::Node, key).map(str::to_owned),
            Self::Settings => None,
            Self::WorkloadEndpoint => {
                keys::parse_workload_endpoint(key).map(|(namespace, name)| self.full_name(namespace, name))
            }
            Self::Profile => keys::parse_profile(key).map(str::to_owned),
        }
    }

    /// The common prefix of the keys of all documents of this kind.
    fn prefix(self, within: &Namespaces) -> Key {
        match (self, within) {
            (Self::Pool, _) => keys::resources_prefix(ResourceKind::IpPool),
            (Self::Reservation, _) => keys::resources_prefix(ResourceKind::IpReservation),
            (Self::Node, _) => keys::resources_prefix(ResourceKind::Node),
            (Self::Settings, _) => keys::config(),
            (Self::WorkloadEndpoint, Namespaces::All) => keys::workload_endpoints_prefix(),
            (Self::WorkloadEndpoint, Namespaces::One(namespace)) => keys::workload_endpoint(namespace, ""),
            (Self::Profile, _) => keys::profiles_prefix(),
        }
    }
}

/// The namespace and the name in a full name.
fn split(full_name: &str) -> (&str, &str) {
    full_name.split_once('/').unwrap_or((DEFAULT_NAMESPACE, full_name))
}

/// The names of a document's fields, in the order in which calicoctl prints those of any of its objects.
pub fn field_order() -> impl Iterator<Item = &'static str> {
    let objects = build::TOP.into_iter().chain(["items"]).chain(build::METADATA);
    objects.chain(POOL_FIELDS).chain(settings::FIELDS).chain(fields::ENDPOINT).chain(fields::PROFILE)
}

impl fmt::Display for DocumentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Why a document was not written, deleted or shown. The texts are Calico's where it has the error. Names are full ones,
/// see [`DocumentKind::full_name`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// It is there already.
    #[error("resource already exists: {0}({1})")]
    Exists(DocumentKind, String),
    /// It is not there.
    #[error("resource does not exist: {0}({1}) with error: <nil>")]
    NotFound(DocumentKind, String),
    /// It is not the version any more that somebody has read.
    #[error("update conflict: {0}({1})")]
    Conflict(DocumentKind, String),
    /// It cannot be like this.
    #[error("{0}")]
    Invalid(String),
    /// The verb, such as `apply`, is not for documents of this kind.
    #[error("operation {0} is not supported on {1}({2}): the CNI plugin keeps it")]
    NotSupported(&'static str, DocumentKind, String),
}

impl DocumentError {
    fn field(name: impl fmt::Display, value: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self::Invalid(format!("error with field {name} = '{value}' ({reason})"))
    }
}
