//! A map of texts that stays JSON until it is used.
//!
//! An ADD or DEL is about one entry of a block, and passes on dozens: reading all their attributes and writing them again was
//! a third of the processor time of an ADD beside 40 others.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// A map of texts.
#[derive(Clone)]
pub(super) enum LazyMap {
    /// As it was read, which is how it will be written; and as a map, once a caller has used it.
    Json(Box<RawValue>, OnceLock<BTreeMap<String, String>>),
    /// Made or changed here.
    Map(BTreeMap<String, String>),
}

impl LazyMap {
    pub(super) fn get(&self) -> &BTreeMap<String, String> {
        match self {
            Self::Json(json, map) => map.get_or_init(|| map_of(json)),
            Self::Map(map) => map,
        }
    }

    pub(super) fn get_mut(&mut self) -> &mut BTreeMap<String, String> {
        loop {
            match self {
                Self::Map(map) => return map,
                Self::Json(json, map) => *self = Self::Map(map.take().unwrap_or_else(|| map_of(json))),
            }
        }
    }
}

/// The map in a text that was checked when it was read.
fn map_of(json: &RawValue) -> BTreeMap<String, String> {
    serde_json::from_str(json.get()).unwrap_or_default()
}

impl From<BTreeMap<String, String>> for LazyMap {
    fn from(map: BTreeMap<String, String>) -> Self {
        Self::Map(map)
    }
}

impl Default for LazyMap {
    fn default() -> Self {
        Self::Map(BTreeMap::new())
    }
}

impl fmt::Debug for LazyMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl PartialEq for LazyMap {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for LazyMap {}

impl Serialize for LazyMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Json(json, _) => json.serialize(serializer),
            Self::Map(map) => map.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for LazyMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = Box::<RawValue>::deserialize(deserializer)?;
        serde_json::from_str::<Texts>(json.get()).map_err(Error::custom)?;
        Ok(Self::Json(json, OnceLock::new()))
    }
}

/// Checks that a value is a map of texts, which are not kept.
struct Texts;

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self)
    }
}

impl<'de> Visitor<'de> for Texts {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while let Some((Text, Text)) = map.next_entry()? {}
        Ok(self)
    }
}

struct Text;

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Self)
    }
}

impl Visitor<'_> for Text {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E>(self, _text: &str) -> Result<Self, E> {
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<LazyMap, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn it_is_written_as_it_was_read_until_it_is_changed() {
        let json = r#"{"pod":"a \u003cb\u003e", "namespace":"x","pod":"c"}"#;
        let mut map = read(json).unwrap();
        assert_eq!(serde_json::to_string(&map).unwrap(), json);
        // Of two by the same name the later one counts, as in Go.
        assert_eq!(map.get().get("pod").map(String::as_str), Some("c"));
        assert_eq!(serde_json::to_string(&map).unwrap(), json);
        map.get_mut().remove("namespace");
        assert_eq!(serde_json::to_string(&map).unwrap(), r#"{"pod":"c"}"#);
    }

    #[test]
    fn equal_maps_may_be_spelled_otherwise() {
        assert_eq!(read(r#"{"a":"1","b":"2"}"#).unwrap(), read(r#"{ "b":"\u0032", "a":"1" }"#).unwrap());
        assert_ne!(read(r#"{"a":"1"}"#).unwrap(), LazyMap::default());
        assert_eq!(read("{}").unwrap(), LazyMap::default());
    }

    #[test]
    fn what_is_no_map_of_texts_is_refused_when_it_is_read() {
        for json in [r#"{"a":1}"#, r#"{"a":null}"#, r#"{"a":["b"]}"#, r#""a""#, "[]", "7", r#"{"a":"\ud800"}"#] {
            assert!(read(json).is_err(), "{json}");
        }
    }
}
