//! Encodes and decodes stored documents as JSON. Decoded documents distinguish an absent field from a field that is
//! `null`.
//!
//! Most documents are declared with the macro `document!`. Unknown fields of a document are kept, because another
//! version or another program may need them. Unknown fields are written back byte for byte, because JSON numbers can
//! exceed every Rust number type.

use std::borrow::Cow;
use std::fmt;

use ipnet::IpNet;
use kv::{Key, Value};
use serde::de::{DeserializeOwned, Error};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, value::RawValue};

/// A JSON object: a map from field names to values.
pub type JsonObject = Map<String, serde_json::Value>;

/// A document that is stored as JSON under a key.
pub trait Document: Sized {
    /// Decodes a document from the value stored under its key.
    ///
    /// # Errors
    /// [`Malformed`] if the value is not a document of this kind, or does not match its key.
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed>;

    /// Encodes the document as compact JSON.
    ///
    /// # Errors
    /// [`Malformed`] if the document cannot be encoded. Encoding a document that this program decoded or created never
    /// fails.
    fn encode(&self) -> Result<Value, Malformed>;
}

/// The error for a stored value that is not a valid document of its key's kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed document{}: {reason}", if .key.is_empty() { String::new() } else { format!(" at {key}") })]
pub struct Malformed {
    key: String,
    reason: String,
}

impl Malformed {
    /// Creates the error for the malformed value under a key. The error's `reason` may quote names and numbers from the
    /// malformed value, but no other content of the value.
    pub fn new(key: &Key, reason: impl fmt::Display) -> Self {
        Self { key: key.to_string(), reason: reason.to_string() }
    }

    /// Returns the key of the damaged value; empty if the document has not been stored yet.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the reason why the value is malformed.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// Parses JSON. A parse error contains the key under which the JSON is stored.
pub(super) fn from_json<T: DeserializeOwned>(key: &Key, value: &[u8]) -> Result<T, Malformed> {
    serde_json::from_slice(value).map_err(|error| Malformed::new(key, error))
}

pub(super) fn to_json<T: Serialize>(document: &T) -> Result<Value, Malformed> {
    to_json_of(document, 128)
}

/// Encodes a document as compact JSON, in a buffer that initially has room for `bytes` bytes.
pub(super) fn to_json_of<T: Serialize>(document: &T, bytes: usize) -> Result<Value, Malformed> {
    let mut json = Vec::with_capacity(bytes);
    serde_json::to_writer(&mut json, document).map_err(|error| Malformed::new(&Key::default(), error))?;
    Ok(Value::new(json))
}

/// A field of a document: absent, `null` or set. Go treats an absent field and `null` alike, but a document that Margay
/// does not change must be written as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Field<T> {
    #[default]
    Absent,
    Null,
    Is(T),
}

impl<T> Field<T> {
    pub(super) fn get(&self) -> Option<&T> {
        match self {
            Self::Is(value) => Some(value),
            Self::Absent | Self::Null => None,
        }
    }

    pub(super) fn get_mut(&mut self) -> Option<&mut T> {
        match self {
            Self::Is(value) => Some(value),
            Self::Absent | Self::Null => None,
        }
    }

    /// Returns a mutable reference to the field's value. An absent or `null` field is set to its default value before
    /// the reference is returned.
    pub(super) fn or_default(&mut self) -> &mut T
    where
        T: Default,
    {
        loop {
            match self {
                Self::Is(value) => return value,
                Self::Absent | Self::Null => *self = Self::Is(T::default()),
            }
        }
    }
}

impl<T: Copy + Default> Field<T> {
    /// Returns the value of the field, or zero if the field is absent or `null`, as in Go.
    pub(super) fn or_zero(&self) -> T {
        self.get().copied().unwrap_or_default()
    }

    /// Creates a field that is absent if the value is zero, like Go's `omitempty`.
    pub(super) fn unless_zero(value: T) -> Self
    where
        T: PartialEq,
    {
        if value == T::default() { Self::Absent } else { Self::Is(value) }
    }
}

impl<T: Serialize> Serialize for Field<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Is(value) => value.serialize(serializer),
            // `Field::Absent` is never serialized, because the document's serializer skips absent fields.
            Self::Absent | Self::Null => serializer.serialize_unit(),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Field<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Null, Self::Is))
    }
}

/// The unknown fields of a document, in the order in which they were read.
#[derive(Clone, Debug, Default)]
pub(super) struct UnknownFields(Vec<(String, Box<RawValue>)>);

impl UnknownFields {
    /// Adds an unknown field, to be written back later. If two JSON fields have the same name, the later field counts,
    /// as in Go.
    pub(super) fn keep(&mut self, name: String, value: Box<RawValue>) {
        self.0.retain(|(other, _)| *other != name);
        self.0.push((name, value));
    }

    /// Writes the unknown fields to a document's JSON, after the known fields.
    pub(super) fn write<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        self.0.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))
    }
}

impl PartialEq for UnknownFields {
    fn eq(&self, other: &Self) -> bool {
        let texts = |kept: &Self| kept.0.iter().map(|(name, value)| (name.clone(), value.get().to_owned())).collect();
        let (own, others): (Vec<_>, Vec<_>) = (texts(self), texts(other));
        own == others
    }
}

impl Eq for UnknownFields {}

/// A JSON field's name, borrowed from the input where possible.
#[derive(Deserialize)]
pub(super) struct Name<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// A required CIDR in a document, stored as text like `10.0.0.0/26`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Net(pub(super) IpNet);

impl Serialize for Net {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Net {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(|_| D::Error::custom(format_args!("{text:?} is not a network")))
    }
}

pub(super) trait FieldType: PartialEq + Sized {
    /// Returns the value for a field of this type that is absent in the JSON, or `None` if the field is required.
    fn when_absent() -> Option<Self> {
        None
    }
}

impl<T: PartialEq> FieldType for Field<T> {
    fn when_absent() -> Option<Self> {
        Some(Self::Absent)
    }
}

impl FieldType for Net {}

impl<T: PartialEq> FieldType for Vec<T> {}

/// Declares a stored document: its struct, its deserializer and its serializer. The serializer writes the declared
/// fields in order, followed by the unknown fields in `extra`. A document's field whose type is [`Field`] may be absent
/// in the JSON; all other fields are required.
///
/// ```text
/// document! {
///     /// The document under a handle's key.
///     #[derive(Clone, Debug, PartialEq, Eq)]
///     pub struct Handle {
///         block: Field<BTreeMap<String, i64>> = "block",
///         deleted: Field<bool> = "deleted",
///     }
/// }
/// ```
///
/// `document!` does not use `#[serde(flatten)]`, because flattening would convert unknown values to serde's own types.
macro_rules! document {
    ($(#[$meta:meta])* pub struct $document:ident { $($field:ident: $type:ty = $name:literal,)+ }) => {
        $(#[$meta])*
        pub struct $document {
            $($field: $type,)+
            extra: $crate::model::codec::UnknownFields,
        }

        const _: () = {
            use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
            use serde::ser::{Serialize, SerializeMap, Serializer};
            use $crate::model::codec::{FieldType, UnknownFields, Name};

            impl Serialize for $document {
                fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    let mut map = serializer.serialize_map(None)?;
                    $(if Some(&self.$field) != FieldType::when_absent().as_ref() {
                        map.serialize_entry($name, &self.$field)?;
                    })+
                    self.extra.write(&mut map)?;
                    map.end()
                }
            }

            struct Fields;

            impl<'de> Visitor<'de> for Fields {
                type Value = $document;

                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("an object")
                }

                fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<$document, A::Error> {
                    $(let mut $field = FieldType::when_absent();)+
                    let mut extra = UnknownFields::default();
                    while let Some(Name(name)) = map.next_key()? {
                        match name.as_ref() {
                            $($name => $field = Some(map.next_value()?),)+
                            _ => extra.keep(name.into_owned(), map.next_value()?),
                        }
                    }
                    Ok($document {
                        $($field: $field.ok_or_else(|| Error::missing_field($name))?,)+
                        extra,
                    })
                }
            }

            impl<'de> Deserialize<'de> for $document {
                fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    deserializer.deserialize_map(Fields)
                }
            }
        };
    };
}
pub(super) use document;
