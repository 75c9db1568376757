//! The kinds of document that people write and read, and the errors about them. `margay-ipam-operator` has the documents.

use std::fmt;

use crate::model::keys::ResourceKind;

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
    /// A field that cannot have its value.
    pub fn field(name: impl fmt::Display, value: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self::Invalid(format!("error with field {name} = '{value}' ({reason})"))
    }
}
