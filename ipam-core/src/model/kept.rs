//! Fields that this version does not know: written back as they came, byte for byte. Another version, or another
//! program, put them there, and they may have numbers that no type of ours holds.

use std::borrow::Cow;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

/// The unknown fields of a document, in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept(Vec<(String, Box<RawValue>)>);

impl Kept {
    /// Keeps a field. Of two by the same name the later one counts, as in Go.
    pub(super) fn keep(&mut self, name: String, value: Box<RawValue>) {
        self.0.retain(|(other, _)| *other != name);
        self.0.push((name, value));
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

impl Serialize for Kept {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// A field's name: most are read where they are.
#[derive(Deserialize)]
pub(super) struct Name<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// A network as text, where a document must have one.
#[derive(Deserialize)]
pub(super) struct Net(#[serde(with = "super::codec::net_text")] pub(super) ipnet::IpNet);

impl From<Net> for ipnet::IpNet {
    fn from(net: Net) -> Self {
        net.0
    }
}

/// Reads a document that ends in `extra: Kept`: first the fields that it must have, each with what it is read as, then
/// those of type `Field`. serde's derived code for a flattened map would put all values through types of its own.
macro_rules! read_keeping {
    ($document:ident { $($need:ident: $as:ty = $need_name:literal),*; $($may:ident = $may_name:literal),+ $(,)? }) => {
        impl<'de> serde::Deserialize<'de> for $document {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Fields;

                impl<'de> serde::de::Visitor<'de> for Fields {
                    type Value = $document;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("an object")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<$document, A::Error> {
                        $(let mut $need = None;)*
                        $(let mut $may = $crate::model::codec::Field::Absent;)+
                        let mut extra = $crate::model::kept::Kept::default();
                        while let Some($crate::model::kept::Name(name)) = map.next_key()? {
                            match name.as_ref() {
                                $($need_name => $need = Some(map.next_value::<$as>()?.into()),)*
                                $($may_name => $may = map.next_value()?,)+
                                _ => extra.keep(name.into_owned(), map.next_value()?),
                            }
                        }
                        Ok($document {
                            $($need: $need.ok_or_else(|| serde::de::Error::missing_field($need_name))?,)*
                            $($may,)+
                            extra,
                        })
                    }
                }

                deserializer.deserialize_map(Fields)
            }
        }
    };
}
pub(super) use read_keeping;
