//! Defines quotas, which limit how many addresses a namespace, network or node may have, and quota counters, which
//! count these addresses.
//!
//! All quotas are stored in one document, `{"namespaces":{"shop":10,"*":50},"networks":{},"nodes":{}}`. The limit under
//! the name `*` applies to each namespace, network or node without a limit of its own.
//!
//! A quota counter is an upper bound of the number of addresses that its subject holds. Each quota counter records the
//! revision of the quotas document with which it is valid, so each change of the quotas invalidates all quota counters.
//! After a change of the quotas, the next assignment to each subject counts the subject's addresses again, because
//! addresses of a subject without a quota are not counted.

use std::fmt;

use kv::{Key, Revision, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::Attribute;
use super::codec::{Document, Malformed, from_json, to_json};

/// The kind of thing that has a quota: a namespace, a network or a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QuotaKind {
    /// A Kubernetes namespace of pods.
    Namespace,
    /// A CNI network, identified by the name in its configuration.
    Network,
    /// A node that holds addresses.
    Node,
}

impl QuotaKind {
    /// All kinds of subjects that can have a quota.
    pub const ALL: [Self; 3] = [Self::Namespace, Self::Network, Self::Node];

    /// Returns the name of the quota kind in messages, labels and options.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Namespace => "namespace",
            Self::Network => "network",
            Self::Node => "node",
        }
    }

    fn plural(self) -> &'static str {
        match self {
            Self::Namespace => "namespaces",
            Self::Network => "networks",
            Self::Node => "nodes",
        }
    }

    /// Returns the namespace, network or node (depending on this kind) that the block entry of an address records.
    pub fn name_in(self, entry: &Attribute) -> Option<&str> {
        match self {
            Self::Namespace => entry.namespace(),
            Self::Network => entry.network(),
            Self::Node => entry.node(),
        }
    }
}

/// A namespace, a network or a node that can have a quota.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuotaSubject {
    /// The kind of the quota subject.
    pub kind: QuotaKind,
    /// The name of the quota subject.
    pub name: String,
}

impl QuotaSubject {
    /// Creates a quota subject of the given kind and name.
    pub fn new(kind: QuotaKind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into() }
    }
}

impl fmt::Display for QuotaSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.name)
    }
}

/// The quotas of all namespaces, networks and nodes. The document keeps quotas of kinds that this version does not
/// know, because a newer version may have written them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas(Map<String, Json>);

impl Document for Quotas {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        let quotas = Self(from_json(key, value)?);
        for limits in QuotaKind::ALL.into_iter().filter_map(|kind| quotas.0.get(kind.plural())) {
            if !limits.as_object().is_some_and(|limits| limits.values().all(Json::is_u64)) {
                return Err(Malformed::new(key, "a limit is not a number of addresses"));
            }
        }
        Ok(quotas)
    }

    fn encode(&self) -> Result<Value, Malformed> {
        to_json(&self.0)
    }
}

impl Quotas {
    /// The subject name whose limit applies to all subjects without a limit of their own.
    pub const ANY_OTHER: &str = "*";

    /// Returns the number of addresses that a subject may have, or `None` if the subject has no limit.
    pub fn limit(&self, kind: QuotaKind, name: &str) -> Option<u64> {
        let limits = self.0.get(kind.plural())?;
        limits.get(name).or_else(|| limits.get(Self::ANY_OTHER))?.as_u64()
    }

    /// Returns all stored quotas, including the limits under the name `*`.
    pub fn all(&self) -> impl Iterator<Item = (QuotaSubject, u64)> {
        QuotaKind::ALL.into_iter().flat_map(|kind| {
            let limits = self.0.get(kind.plural()).and_then(Json::as_object).into_iter().flatten();
            limits.filter_map(move |(name, limit)| Some((QuotaSubject::new(kind, name), limit.as_u64()?)))
        })
    }

    /// True if no quota is set for any subject.
    pub fn is_empty(&self) -> bool {
        self.0.values().all(|limits| limits.as_object().is_some_and(Map::is_empty))
    }

    /// Sets or removes the limit of a quota subject, and returns the previous limit.
    pub fn set(&mut self, subject: &QuotaSubject, limit: Option<u64>) -> Option<u64> {
        let limits = self.0.entry(subject.kind.plural()).or_insert_with(|| Json::Object(Map::new())).as_object_mut()?;
        match limit {
            Some(limit) => limits.insert(subject.name.clone(), limit.into()),
            None => limits.remove(&subject.name),
        }?
        .as_u64()
    }
}

/// A quota counter: the number of addresses of a namespace, network or node that has a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaCount {
    /// An upper bound of the number of the subject's addresses.
    pub used: u64,
    /// The revision of the quotas document under which the quota counter was written; 0 if the subject's addresses must
    /// be counted again.
    pub quotas: i64,
}

impl QuotaCount {
    /// Returns the stored count, or `None` if the quota counter is damaged or was not written under the quotas of
    /// revision `quotas`.
    pub fn good(stored: Option<&Value>, quotas: Revision) -> Option<u64> {
        let count: Json = serde_json::from_slice(stored?.as_bytes()).ok()?;
        if count.get("quotas")?.as_i64()? == quotas.get() { count.get("used")?.as_u64() } else { None }
    }

    /// Encodes the quota counter as the JSON value of its key.
    pub fn encode(self) -> String {
        format!(r#"{{"used":{},"quotas":{}}}"#, self.used, self.quotas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quotas(json: &str) -> Result<Quotas, Malformed> {
        Quotas::decode(&"/q".into(), json.as_bytes())
    }

    #[test]
    fn quota_own_limit_comes_before_general_one() {
        let quotas = quotas(r#"{"namespaces":{"shop":10,"*":50},"nodes":{"a":3}}"#).unwrap();
        assert_eq!(quotas.limit(QuotaKind::Namespace, "shop"), Some(10));
        assert_eq!(quotas.limit(QuotaKind::Namespace, "other"), Some(50));
        assert_eq!(quotas.limit(QuotaKind::Node, "a"), Some(3));
        assert_eq!(quotas.limit(QuotaKind::Node, "b"), None);
        assert_eq!(quotas.limit(QuotaKind::Network, "shop"), None);
        let all: Vec<String> = quotas.all().map(|(subject, limit)| format!("{subject} {limit}")).collect();
        assert_eq!(all, ["namespace * 50", "namespace shop 10", "node a 3"]);
    }

    #[test]
    fn quota_keeps_unknown_kinds_and_refuses_wrong_limits() {
        let mut kept = quotas(r#"{"planets":{"x":1}}"#).unwrap();
        let shop = QuotaSubject::new(QuotaKind::Namespace, "shop");
        assert_eq!((kept.set(&shop, Some(2)), kept.set(&shop, None)), (None, Some(2)));
        assert_eq!(kept.encode().unwrap().as_bytes(), br#"{"namespaces":{},"planets":{"x":1}}"#);
        for wrong in [r#"{"nodes":{"a":-1}}"#, r#"{"nodes":{"a":"1"}}"#, "[]", ""] {
            assert!(quotas(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn quota_counter_is_good_with_its_quotas_only() {
        let stored = Value::from(QuotaCount { used: 3, quotas: 7 }.encode());
        assert_eq!(QuotaCount::good(Some(&stored), Revision::new(7)), Some(3));
        assert_eq!(QuotaCount::good(Some(&stored), Revision::new(8)), None);
        assert_eq!(QuotaCount::good(None, Revision::new(7)), None);
        assert_eq!(QuotaCount::good(Some(&"?".into()), Revision::new(7)), None);
    }
}
