//! The kinds of document that people write and read, the errors about them, and the fields of their specs: the names in JSON and in
//! errors, and the values that they can have. `margay-ipam-operator` has the documents.

use std::fmt;

use serde_json::{Map, Value};

use super::keys::ResourceKind;

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

/// A field of a spec.
#[derive(Clone, Copy)]
pub(super) struct SpecField {
    /// The name in JSON.
    pub(super) name: &'static str,
    /// The name in Calico's errors; empty for a field that they are not about.
    pub(super) shown: &'static str,
    /// The possible texts, the default first; any text if the list is empty.
    pub(super) known: &'static [&'static str],
}

impl SpecField {
    /// The value; `null` counts as absent.
    pub(super) fn get(self, spec: &Map<String, Value>) -> Option<&Value> {
        spec.get(self.name).filter(|value| !value.is_null())
    }

    /// A text; where there is none, the default.
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

    /// True or false; where there is neither, false.
    pub(super) fn switch(self, spec: &Map<String, Value>) -> Result<bool, InvalidPool> {
        match self.get(spec) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(value, "must be true or false")),
        }
    }

    /// The field with a value, as an entry of a spec.
    pub(super) fn with(self, value: impl Into<Value>) -> (String, Value) {
        (self.name.to_owned(), value.into())
    }

    /// The error for a value that a pool's field cannot have.
    pub(super) fn wrong(self, value: impl fmt::Display, reason: impl fmt::Display) -> InvalidPool {
        InvalidPool::new(self.shown, value, reason)
    }
}

/// A pool that must not be made.
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

    /// The field that is wrong.
    pub fn field(&self) -> &'static str {
        self.field
    }

    /// Its fault.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// Declares the fields of a spec: a [`SpecField`] for each (`_` where no code needs it), and the list of their names.
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
