//! Defines an entry of a block: the attributes that one or more assigned addresses share. The attributes of an entry
//! stay undecoded JSON until a caller reads them, because an ADD or DEL reads one entry of a block and writes dozens of
//! other entries back unchanged. With 40 concurrent ADDs, parsing and encoding all attributes of a block took a third
//! of an ADD's processor time.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use smol_str::SmolStr;
use time::OffsetDateTime;

use super::codec::{Field, document};
use super::handle::{renamed_node_handle, same_handle};
use super::short_attributes::{expand, is_shortened, shorten};
use crate::attachment::{INTERFACE, NETWORK, NODE, OWN_NODE, namespace_of, node_of, pod_of};
use crate::timestamps::StoredTime;

static NO_ATTRIBUTES: BTreeMap<String, String> = BTreeMap::new();

document! {
    /// An entry in a block's list of attributes, to which one or more addresses of the block refer. An entry of a block
    /// records either who holds the addresses or when their cooldown began.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub struct Attribute {
        handle_id: Field<SmolStr> = "handle_id",
        secondary: Field<LazyMap> = "secondary",
        alternate: Field<LazyMap> = "alternateOwnerAttrs",
        released_at: Field<StoredTime> = "releasedAt",
    }
}

impl Attribute {
    /// Creates a block's entry for a new holder of addresses. As in Calico, empty fields are omitted from the entry.
    pub fn new(handle: Option<&str>, attributes: BTreeMap<String, String>) -> Self {
        let handle_id = handle.map_or(Field::Absent, |handle| Field::Is(handle.into()));
        let mut new = Self { handle_id, ..Self::default() };
        new.set_attributes(attributes);
        new
    }

    /// Creates the entry for addresses that are released at time `now` and are in cooldown from then on.
    pub(super) fn released(now: OffsetDateTime) -> Self {
        Self { released_at: Field::Is(StoredTime::new(now)), ..Self::default() }
    }

    /// Returns the holder's handle exactly as stored. Calico's old migration from host-local may have left a carriage
    /// return and more text in the stored handle. To compare handles, call [`Self::has_handle`].
    pub fn handle_id(&self) -> Option<&str> {
        self.handle_id.get().map(SmolStr::as_str)
    }

    /// Returns the handle that holds the addresses of this entry, or `None` for addresses in cooldown.
    pub(super) fn holding_handle(&self) -> Option<&SmolStr> {
        self.handle_id.get().filter(|_| self.released_at().is_none())
    }

    /// Returns the holder's handle up to the first carriage return. Calico's old migration from host-local may have
    /// left a carriage return and more text in the stored handle.
    pub fn handle(&self) -> Option<&str> {
        self.handle_id().map(|id| id.split('\r').next().unwrap_or(id))
    }

    /// True if the given handle holds the addresses of this entry.
    pub fn has_handle(&self, handle: &str) -> bool {
        self.released_at().is_none() && self.handle_id().is_some_and(|id| same_handle(id, handle))
    }

    /// Returns the holder's attributes, such as `node`, `pod`, `namespace` and `timestamp`.
    pub fn attributes(&self) -> &BTreeMap<String, String> {
        self.secondary.get().map_or(&NO_ATTRIBUTES, LazyMap::get)
    }

    /// Returns the value of one attribute of the holder. For the attribute [`NETWORK`], returns [`Self::network`],
    /// because the network's name is not always stored.
    pub fn get(&self, name: &str) -> Option<&str> {
        if name == NETWORK { self.network() } else { self.stored(name) }
    }

    fn stored(&self, name: &str) -> Option<&str> {
        self.attributes().get(name).map(String::as_str)
    }

    /// Returns the network of the attachment that holds the addresses, or `None` if Margay did not assign them. The
    /// network's name is not stored if it equals the part of the handle before the last dot.
    pub fn network(&self) -> Option<&str> {
        self.stored(NETWORK).or_else(|| self.network_in_handle().filter(|_| self.stored(INTERFACE).is_some()))
    }

    fn network_in_handle(&self) -> Option<&str> {
        Some(self.handle()?.rsplit_once('.')?.0)
    }

    /// Returns the attributes of the holder, with the network that [`Self::network`] returns.
    pub fn attributes_with_network(&self) -> BTreeMap<String, String> {
        let mut attributes = self.attributes().clone();
        if let Some(network) = self.network() {
            attributes.insert(NETWORK.to_owned(), network.to_owned());
        }
        attributes
    }

    /// Returns the node of the holder, stored under Calico's or Margay's attribute name.
    pub fn node(&self) -> Option<&str> {
        node_of(self.attributes())
    }

    /// Returns the pod of the holder, stored under Calico's or Margay's attribute name.
    pub fn pod(&self) -> Option<&str> {
        pod_of(self.attributes())
    }

    /// Returns the namespace of the holder's pod, stored under Calico's or Margay's attribute name.
    pub fn namespace(&self) -> Option<&str> {
        namespace_of(self.attributes())
    }

    /// Returns the node of the alternate holder, stored under Calico's or Margay's attribute name.
    pub fn alternate_node(&self) -> Option<&str> {
        node_of(self.alternate_attributes())
    }

    pub(super) fn set(&mut self, name: &str, value: &str) {
        self.secondary.or_default().get_mut().insert(name.to_owned(), value.to_owned());
    }

    pub(super) fn unset(&mut self, name: &str) {
        if let Some(attributes) = self.secondary.get_mut() {
            attributes.get_mut().remove(name);
        }
    }

    /// Renames a node in the attributes of the holder and of the alternate holder, and in a handle that ends with the
    /// node's name. Returns true if the entry contained the node's old name.
    pub(super) fn rename_node(&mut self, from: &str, to: &str) -> bool {
        let mut renamed = false;
        for attributes in [self.secondary.get_mut(), self.alternate.get_mut()].into_iter().flatten() {
            for name in [NODE, OWN_NODE] {
                if attributes.get().get(name).is_some_and(|node| node == from) {
                    attributes.get_mut().insert(name.to_owned(), to.to_owned());
                    renamed = true;
                }
            }
        }
        if let Some(handle) = self.handle().and_then(|handle| renamed_node_handle(handle, from, to)) {
            self.handle_id = Field::Is(handle.into());
            renamed = true;
        }
        renamed
    }

    /// Replaces all attributes of the holder. An empty map is stored as an absent field.
    pub(super) fn set_attributes(&mut self, mut attributes: BTreeMap<String, String>) {
        let is_in_handle = attributes.get(NETWORK).map(String::as_str) == self.network_in_handle();
        if is_in_handle && is_shortened(&attributes) {
            attributes.remove(NETWORK);
        }
        self.secondary = if attributes.is_empty() { Field::Absent } else { Field::Is(attributes.into()) };
    }

    /// Replaces all attributes of the alternate holder. An empty map is stored as an absent field.
    pub(super) fn set_alternate_attributes(&mut self, attributes: BTreeMap<String, String>) {
        self.alternate = if attributes.is_empty() { Field::Absent } else { Field::Is(attributes.into()) };
    }

    /// Returns the attributes of the alternate holder. An address that is moving from one pod to another, as in a live
    /// migration, also has an alternate holder.
    pub fn alternate_attributes(&self) -> &BTreeMap<String, String> {
        self.alternate.get().map_or(&NO_ATTRIBUTES, LazyMap::get)
    }

    /// Returns the release time of addresses in cooldown, or `None` for held addresses.
    pub fn released_at(&self) -> Option<OffsetDateTime> {
        self.released_at.get().map(StoredTime::at)
    }

    /// Replaces the recorded release time of the addresses, for example if it is in the future.
    pub(super) fn set_released_at(&mut self, at: OffsetDateTime) {
        self.released_at = Field::Is(StoredTime::new(at));
    }

    /// True if an address with the entry `other` can share this entry. An entry can be shared if the handles and
    /// attributes are equal and the entry has no other fields.
    pub(super) fn can_serve(&self, other: &Self) -> bool {
        self.handle_id() == other.handle_id()
            && self.attributes() == other.attributes()
            && self.alternate_attributes() == other.alternate_attributes()
            && self.released_at() == other.released_at()
            && self.extra == other.extra
    }
}

/// A map of strings that is parsed only when a caller uses it.
#[derive(Clone)]
enum LazyMap {
    /// The JSON text as it was read, which is written back unchanged, and the map that is parsed from this text on
    /// first use.
    Json(Box<RawValue>, OnceLock<BTreeMap<String, String>>),
    /// A map that was created or changed by this program.
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

/// Parses the JSON text of a map. The JSON text was already validated when the document was decoded.
fn map_of(json: &RawValue) -> BTreeMap<String, String> {
    let mut map = serde_json::from_str(json.get()).unwrap_or_default();
    expand(&mut map);
    map
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
            Self::Map(map) => shorten(map).serialize(serializer),
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

/// Checks that a JSON value is a map of strings, without keeping the value.
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
    fn attribute_is_written_as_read_until_changed() {
        let json = r#"{"pod":"a \u003cb\u003e", "namespace":"x","pod":"c"}"#;
        let mut map = read(json).unwrap();
        assert_eq!(serde_json::to_string(&map).unwrap(), json);
        // If two JSON fields have the same name, the later field counts, as in Go.
        assert_eq!(map.get().get("pod").map(String::as_str), Some("c"));
        assert_eq!(serde_json::to_string(&map).unwrap(), json);
        map.get_mut().remove("namespace");
        assert_eq!(serde_json::to_string(&map).unwrap(), r#"{"pod":"c"}"#);
    }

    #[test]
    fn attribute_maps_are_equal_when_spelled_otherwise() {
        assert_eq!(read(r#"{"a":"1","b":"2"}"#).unwrap(), read(r#"{ "b":"\u0032", "a":"1" }"#).unwrap());
        assert_ne!(read(r#"{"a":"1"}"#).unwrap(), LazyMap::default());
        assert_eq!(read("{}").unwrap(), LazyMap::default());
    }

    #[test]
    fn attribute_of_each_version_is_read_and_kept() {
        let written_out = r#"{"handle_id":"my.net.c1","secondary":{"margay.io/boot":"191b29e2","margay.io/ifname":"eth0","margay.io/net":"my.net","margay.io/netns":"4:4026532265","node":"a"}}"#;
        let short = r#"{"handle_id":"my.net.c1","secondary":{"margay":"GRsp4g.1a9","node":"a"}}"#;
        let of_calico = r#"{"handle_id":"my.net.c1","secondary":{"node":"a"}}"#;
        let read = |json: &str| serde_json::from_str::<Attribute>(json).unwrap();
        for (json, marked) in [(written_out, true), (short, true), (of_calico, false)] {
            let entry = read(json);
            let of_margay = [NETWORK, INTERFACE, "margay.io/boot", "margay.io/netns"].map(|name| entry.get(name));
            let expected = [Some("my.net"), Some("eth0"), Some("191b29e2"), Some("4:4026532265")];
            assert_eq!(of_margay, if marked { expected } else { [None; 4] }, "{json}");
            assert_eq!(entry.attributes_with_network().len(), if marked { 5 } else { 1 });
            assert_eq!(serde_json::to_string(&entry).unwrap(), json, "an unchanged entry is written as read");
        }
        // A changed or new entry is written in the short form, which omits the network's name because the handle
        // contains it.
        let mut changed = read(written_out);
        let attributes = changed.attributes().clone();
        changed.set_attributes(attributes);
        assert_eq!(serde_json::to_string(&changed).unwrap(), short);
        assert_eq!(read(short).attributes_with_network(), read(written_out).attributes_with_network());
        // The container's id contains a dot, so the network cannot be derived from the handle and is stored.
        let entry = Attribute::new(
            Some("a.b.c"),
            [(NETWORK, "a"), (INTERFACE, "eth0"), ("node", "n")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        );
        let json = serde_json::to_string(&entry).unwrap();
        assert_eq!(json, r#"{"handle_id":"a.b.c","secondary":{"margay":"","margay.io/net":"a","node":"n"}}"#);
        assert_eq!((read(&json).network(), entry.network()), (Some("a"), Some("a")));
    }

    #[test]
    fn attribute_is_refused_when_not_map_of_texts() {
        for json in [r#"{"a":1}"#, r#"{"a":null}"#, r#"{"a":["b"]}"#, r#""a""#, "[]", "7", r#"{"a":"\ud800"}"#] {
            assert!(read(json).is_err(), "{json}");
        }
    }
}
