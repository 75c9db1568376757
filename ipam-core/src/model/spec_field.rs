//! The fields of a document's spec: their names in JSON and in errors, and the values that they can have.

use std::fmt::Display;

use serde_json::{Map, Value};

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
    pub(super) fn wrong(self, value: impl Display, reason: impl Display) -> InvalidPool {
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
    pub(super) fn new(field: &'static str, value: impl Display, reason: impl Display) -> Self {
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
        $(pub(super) const $field: $crate::model::spec_field::SpecField = $crate::model::spec_field::SpecField {
            name: $name,
            shown: concat!($($shown)?),
            known: &[$($($known),+)?],
        };)+

        $(#[$meta])*
        pub const $list: [&str; [$($name),+].len()] = [$($name),+];
    };
}
pub(super) use spec_fields;
