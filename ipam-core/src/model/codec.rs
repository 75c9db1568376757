//! From bytes to documents and back, and how a field that is absent differs from one that is `null`.

use std::fmt;

use kv::{Key, Value};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A kind of stored document.
pub trait Document: Sized {
    /// Reads a document.
    ///
    /// # Errors
    /// [`Malformed`] if the value is not such a document or does not fit its key.
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed>;

    /// Writes the document as compact JSON.
    ///
    /// # Errors
    /// [`Malformed`] if it cannot be written, which does not happen to a document that was decoded or made here.
    fn encode(&self) -> Result<Value, Malformed>;
}

/// A stored value that is not what its key promises.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed document{}: {reason}", if .key.is_empty() { String::new() } else { format!(" at {key}") })]
pub struct Malformed {
    key: String,
    reason: String,
}

impl Malformed {
    /// The fault of the value of a key. Nothing of the value itself belongs into the reason but names and numbers.
    pub fn new(key: &Key, reason: impl fmt::Display) -> Self {
        Self { key: key.to_string(), reason: reason.to_string() }
    }

    /// The key whose value is wrong; empty if the document has not been stored yet.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The fault.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// Reads JSON; the error names the key.
pub(super) fn from_json<T: DeserializeOwned>(key: &Key, value: &[u8]) -> Result<T, Malformed> {
    serde_json::from_slice(value).map_err(|error| Malformed::new(key, error))
}

/// Writes compact JSON.
pub(super) fn to_json<T: Serialize>(document: &T) -> Result<Value, Malformed> {
    to_json_of(document, 128)
}

/// The same, for a document of about so many bytes.
pub(super) fn to_json_of<T: Serialize>(document: &T, bytes: usize) -> Result<Value, Malformed> {
    let mut json = Vec::with_capacity(bytes);
    serde_json::to_writer(&mut json, document).map_err(|error| Malformed::new(&Key::default(), error))?;
    Ok(Value::new(json))
}

/// A field of a document: absent, `null`, or there. Go reads the first two alike, but a document that we only pass on
/// must come out as it went in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Field<T> {
    /// The document does not have the field.
    #[default]
    Absent,
    /// The field is `null`.
    Null,
    /// The field has a value.
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

    /// The value, put there first if there is none.
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
    /// The value, or the type's zero as in Go.
    pub(super) fn or_zero(&self) -> T {
        self.get().copied().unwrap_or_default()
    }

    /// Written as Go's `omitempty` does it: left out if it is the zero.
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
            // An absent field is skipped by its struct.
            Self::Absent | Self::Null => serializer.serialize_unit(),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Field<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Null, Self::Is))
    }
}
