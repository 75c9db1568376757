//! Documents as people write and read them: pools, reservations, nodes and the settings, in the form of Calico's API.
//!
//! A document that is written replaces the one of its name: what its spec does not say is as if it had never been said.
//! Some things stay all the same: the unique id and the time of creation, the status, fields that this version does not
//! know, and annotations of Margay's own. What a document has that nobody knows is refused, so that a slip of the pen is
//! not taken for an answer.

mod build;
mod manifest;
mod settings;
mod show;
mod write;

use std::fmt;

use kv::Key;

use crate::model::POOL_FIELDS;
use crate::model::keys::{self, ResourceKind};

pub use manifest::Manifest;
pub use show::{Documents, Shown};
pub use write::{Way, Written};

/// The version of the API that all documents have.
const API_VERSION: &str = "projectcalico.org/v3";

/// The one document of the settings.
const SETTINGS_NAME: &str = "default";

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
}

impl DocumentKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Pool, Self::Reservation, Self::Node, Self::Settings];

    /// The kind as a document names it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pool => ResourceKind::IpPool.kind(),
            Self::Reservation => ResourceKind::IpReservation.kind(),
            Self::Node => ResourceKind::Node.kind(),
            Self::Settings => "IPAMConfiguration",
        }
    }

    fn resource(self) -> Option<ResourceKind> {
        match self {
            Self::Pool => Some(ResourceKind::IpPool),
            Self::Reservation => Some(ResourceKind::IpReservation),
            Self::Node => Some(ResourceKind::Node),
            Self::Settings => None,
        }
    }

    fn key(self, name: &str) -> Key {
        self.resource().map_or_else(keys::config, |kind| keys::resource(kind, name))
    }
}

/// The names of a document's fields, in the order in which calicoctl prints those of any of its objects.
pub fn field_order() -> impl Iterator<Item = &'static str> {
    build::TOP.into_iter().chain(["items"]).chain(build::METADATA).chain(POOL_FIELDS).chain(settings::FIELDS)
}

impl fmt::Display for DocumentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Why a document was not written, deleted or shown. The texts are Calico's where it has the error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DocumentError {
    /// It is there already.
    Exists(DocumentKind, String),
    /// It is not there.
    NotFound(DocumentKind, String),
    /// It is not the version any more that somebody has read.
    Conflict(DocumentKind, String),
    /// It cannot be like this.
    Invalid(String),
}

impl DocumentError {
    fn field(name: impl fmt::Display, value: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self::Invalid(format!("error with field {name} = '{value}' ({reason})"))
    }
}

impl fmt::Display for DocumentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exists(kind, name) => write!(f, "resource already exists: {kind}({name})"),
            Self::NotFound(kind, name) => write!(f, "resource does not exist: {kind}({name}) with error: <nil>"),
            Self::Conflict(kind, name) => write!(f, "update conflict: {kind}({name})"),
            Self::Invalid(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for DocumentError {}
