//! Documents declared with `document!`. Fields that this version does not know are written back as they came, byte for
//! byte: another version, or another program, put them there, and they may have numbers that no type of ours holds.

use std::borrow::Cow;

use ipnet::IpNet;
use serde::de::Error;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use super::codec::Field;

/// The unknown fields of a document, in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept(Vec<(String, Box<RawValue>)>);

impl Kept {
    /// Keeps a field. Of two by the same name the later one counts, as in Go.
    pub(super) fn keep(&mut self, name: String, value: Box<RawValue>) {
        self.0.retain(|(other, _)| *other != name);
        self.0.push((name, value));
    }

    /// Writes the fields after those that are known.
    pub(super) fn write<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        self.0.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))
    }
}

impl PartialEq for Kept {
    fn eq(&self, other: &Self) -> bool {
        let texts = |kept: &Self| kept.0.iter().map(|(name, value)| (name.clone(), value.get().to_owned())).collect();
        let (own, others): (Vec<_>, Vec<_>) = (texts(self), texts(other));
        own == others
    }
}

impl Eq for Kept {}

/// A field's name: most are read where they are.
#[derive(Deserialize)]
pub(super) struct Name<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// A network as text, where a document must have one: `10.0.0.0/26`.
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

/// A type of the fields of a document.
pub(super) trait FieldType: PartialEq + Sized {
    /// The value that stands for an absent field; `None` if every document must have the field.
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

/// Defines a document: its struct, its reader, and its writer, which writes the fields in this order and then the unknown
/// ones (`extra`, which each document gets). A field of type [`Field`] may be absent; any other is required.
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
/// serde's derived code for a flattened map would put all unknown values through types of its own.
macro_rules! document {
    ($(#[$meta:meta])* pub struct $document:ident { $($field:ident: $type:ty = $name:literal,)+ }) => {
        $(#[$meta])*
        pub struct $document {
            $($field: $type,)+
            extra: $crate::model::kept::Kept,
        }

        const _: () = {
            use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
            use serde::ser::{Serialize, SerializeMap, Serializer};
            use $crate::model::kept::{FieldType, Kept, Name};

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
                    let mut extra = Kept::default();
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
