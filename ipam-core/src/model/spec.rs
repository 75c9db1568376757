//! Defines the kinds of documents that users write and read, their errors, and the fields of their specs. Each field of
//! a spec has a name in JSON, a name in error messages, and possible values. The crate `margay-ipam-operator` reads and
//! writes documents for users.

use std::fmt;

use serde_json::{Map, Value};

use super::keys::ResourceKind;

/// The kinds of documents that users write and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DocumentKind {
    /// An address pool.
    Pool,
    /// A set of addresses that are never assigned.
    Reservation,
    /// A node of the cluster.
    Node,
    /// The IPAM settings that all nodes share, in a single document named `default`.
    Settings,
    /// The addresses, profiles and interface of a container or a pod.
    WorkloadEndpoint,
    /// The rules for the traffic that the containers of a network accept.
    Profile,
}

impl DocumentKind {
    /// All kinds of documents that users write and read.
    pub const ALL: [Self; 6] =
        [Self::Pool, Self::Reservation, Self::Node, Self::Settings, Self::WorkloadEndpoint, Self::Profile];

    /// Returns the name of the document kind as written in documents.
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

    /// True if documents of this kind belong to namespaces.
    pub fn is_namespaced(self) -> bool {
        self == Self::WorkloadEndpoint
    }

    /// Returns a document's full name as shown in Calico's messages. The full name of a document in a namespace is
    /// `NAMESPACE/NAME`, and that of any other document is `NAME`.
    pub fn full_name(self, namespace: &str, name: &str) -> String {
        if self.is_namespaced() { format!("{namespace}/{name}") } else { name.to_owned() }
    }
}

impl fmt::Display for DocumentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The reason why a document could not be written, deleted or shown. If Calico reports the same error, Margay's error
/// message is identical. The errors contain full names of documents; see [`DocumentKind::full_name`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// A document that was to be created exists already.
    #[error("resource already exists: {0}({1})")]
    Exists(DocumentKind, String),
    /// A document that was to be read, changed or deleted does not exist.
    #[error("resource does not exist: {0}({1}) with error: <nil>")]
    NotFound(DocumentKind, String),
    /// Another writer has changed the document since the caller read it.
    #[error("update conflict: {0}({1})")]
    Conflict(DocumentKind, String),
    /// A document that was to be written is invalid.
    #[error("{0}")]
    Invalid(String),
    /// An operator's command, for example `apply`, does not support documents of this kind.
    #[error("operation {0} is not supported on {1}({2}): the CNI plugin keeps it")]
    NotSupported(&'static str, DocumentKind, String),
}

impl DocumentError {
    /// Creates [`DocumentError::Invalid`] for a field with an invalid value.
    pub fn field(name: impl fmt::Display, value: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self::Invalid(format!("error with field {name} = '{value}' ({reason})"))
    }
}

/// A field of a document's spec.
#[derive(Clone, Copy)]
pub(super) struct SpecField {
    /// The name of the field in JSON.
    pub(super) name: &'static str,
    /// The name of the field in Calico's errors; empty for a field that no error mentions.
    pub(super) shown: &'static str,
    /// The possible values of the field, starting with the default; empty if the field can have any text.
    pub(super) known: &'static [&'static str],
}

impl SpecField {
    /// Returns the value of the field in a spec. A field that is `null` counts as absent.
    pub(super) fn get(self, spec: &Map<String, Value>) -> Option<&Value> {
        spec.get(self.name).filter(|value| !value.is_null())
    }

    /// Returns the text of the field in a spec, or the field's default if it is absent.
    pub(super) fn text(self, spec: &Map<String, Value>) -> Result<&str, InvalidPool> {
        let text = match self.get(spec) {
            None => "",
            Some(Value::String(text)) => text,
            Some(other) => return Err(self.wrong(other, "must be a text")),
        };
        match self.known {
            [default, ..] if text.is_empty() => Ok(default),
            [_, ..] if !self.known.contains(&text) => {
                Err(self.wrong(text, format_args!("must be one of {}", self.known.join(", "))))
            }
            _ => Ok(text),
        }
    }

    /// Returns the boolean value of the field in a spec, or false if the field is absent.
    pub(super) fn switch(self, spec: &Map<String, Value>) -> Result<bool, InvalidPool> {
        match self.get(spec) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(value, "must be true or false")),
        }
    }

    pub(super) fn with(self, value: impl Into<Value>) -> (String, Value) {
        (self.name.to_owned(), value.into())
    }

    /// Creates the error for an invalid value in a field of a pool's spec.
    pub(super) fn wrong(self, value: impl fmt::Display, reason: impl fmt::Display) -> InvalidPool {
        InvalidPool::new(self.shown, value, reason)
    }
}

/// The error for an invalid definition of a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("error with field {field} = '{value}' ({reason})")]
pub struct InvalidPool {
    field: &'static str,
    value: String,
    reason: String,
}

impl InvalidPool {
    pub(super) fn new(field: &'static str, value: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self { field, value: value.to_string(), reason: reason.to_string() }
    }

    /// Returns the name of the pool's invalid field.
    pub fn field(&self) -> &'static str {
        self.field
    }

    /// Returns the reason why the value of the pool's field is invalid.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// Declares the fields of a spec. `spec_fields!` declares a [`SpecField`] constant for each field, and one public list
/// of all field names. In the list of fields, write `_` instead of a constant's name for a field that no code refers
/// to.
///
/// ```text
/// spec_fields! {
///     /// The fields of a pool's spec, in calicoctl's order.
///     pub const POOL_FIELDS:
///     CIDR = "cidr" as "IPPool.CIDR";
///     IPIP_MODE = "ipipMode" as "IPPool.IPIPMode" of ["Never", "Always", "CrossSubnet"];
///     _ = "later";
/// }
/// ```
macro_rules! spec_fields {
    (
        $(#[$meta:meta])* pub const $list:ident:
        $($field:tt = $name:literal $(as $shown:literal)? $(of [$($known:literal),+])?;)+
    ) => {
        $(pub(super) const $field: $crate::model::spec::SpecField = $crate::model::spec::SpecField {
            name: $name,
            shown: concat!($($shown)?),
            known: &[$($($known),+)?],
        };)+

        $(#[$meta])*
        pub const $list: [&str; [$($name),+].len()] = [$($name),+];
    };
}
pub(super) use spec_fields;
