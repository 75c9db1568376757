//! Defines keys, values, revisions, key ranges, and leases.
//!
//! A lease is a time to live for keys, as in etcd. Each put attaches its key to a lease, or detaches it from any lease.
//! When a lease expires or is revoked, the store deletes the keys that are attached to it. The trait
//! [`Store`](crate::Store) has no methods to grant or revoke leases; a program that counts the time to live must grant
//! and revoke leases itself.

use std::borrow::Borrow;
use std::fmt;
use std::num::NonZeroI64;
use std::time::Duration;

use bytes::Bytes;

/// A key: raw bytes, ordered as unsigned bytes, so a key sorts before all longer keys that begin with it.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Key(Bytes);

impl Key {
    /// Creates a key from the given bytes. The method `new` does not check the key's length; the store checks it with
    /// each request.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self(bytes.into())
    }

    /// The bytes of the key.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the bytes of the key without copying them.
    pub fn bytes(&self) -> Bytes {
        self.0.clone()
    }

    /// The smallest key that sorts after this key: the key's bytes plus a zero byte. The next page of a listing starts
    /// at the successor of the last listed key.
    #[must_use]
    pub fn successor(&self) -> Self {
        let mut bytes = Vec::with_capacity(self.0.len() + 1);
        bytes.extend_from_slice(&self.0);
        bytes.push(0);
        Self(bytes.into())
    }

    /// The smallest key that sorts after all keys with this prefix; `None` if the prefix is empty or consists of 0xff
    /// bytes.
    pub fn prefix_end(&self) -> Option<Self> {
        let last = self.0.iter().rposition(|byte| *byte != 0xff)?;
        let mut bytes = self.0[..=last].to_vec();
        bytes[last] += 1;
        Some(Self(bytes.into()))
    }

    /// Returns true if the key has no bytes; no store accepts an empty key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Key {
    /// Writes the key as text; bytes that are not printable ASCII are escaped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self(Bytes::copy_from_slice(text.as_bytes()))
    }
}

impl From<String> for Key {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<&[u8]> for Key {
    fn from(bytes: &[u8]) -> Self {
        Self(Bytes::copy_from_slice(bytes))
    }
}

impl From<Vec<u8>> for Key {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

/// A value in the store: raw bytes, which may be empty; a key with an empty value is not absent.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Value(Bytes);

impl Value {
    /// Creates a value from the given bytes.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self(bytes.into())
    }

    /// The bytes of the value.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The length of the value in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if the value has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Value {
    /// Writes only the length and the first 40 bytes of the value, because values can be large.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.0[..self.0.len().min(40)];
        let rest = if shown.len() < self.0.len() { "..." } else { "" };
        write!(f, "\"{}{rest}\" ({} bytes)", shown.escape_ascii(), self.0.len())
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self(Bytes::copy_from_slice(text.as_bytes()))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<&[u8]> for Value {
    fn from(bytes: &[u8]) -> Self {
        Self(Bytes::copy_from_slice(bytes))
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

/// The revision of a store: a number that grows with every write. A new store has revision 1, and its first write makes
/// revision 2; the number 0 means "not set".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Revision(i64);

impl Revision {
    /// An unset revision, which means "latest" in a read and "absent" in a compare.
    pub const UNSET: Self = Self(0);

    /// Creates the revision with the given number. A revision below 1 means "latest" in a read, and is rejected in
    /// requests that need a real revision.
    pub const fn new(number: i64) -> Self {
        Self(number)
    }

    /// Returns the revision as a number.
    pub const fn get(self) -> i64 {
        self.0
    }

    /// The next higher revision.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// Returns true if the revision is real, that is, 1 or more.
    pub const fn is_set(self) -> bool {
        self.0 >= 1
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The set of keys that a request covers. A key range includes its start and excludes its end; a key range that ends
/// before it starts is empty, which is not an error.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Range {
    /// The range contains only this key.
    Key(Key),
    /// All keys that begin with these bytes; the range of the empty prefix equals [`Range::All`].
    Prefix(Key),
    /// All keys from the first key (inclusive) to the second key (exclusive).
    FromTo(Key, Key),
    /// All keys from this key (inclusive) to the end of the store.
    From(Key),
    /// The range contains every key of the store.
    All,
}

impl Range {
    /// Creates the range that contains one key.
    pub fn key(key: impl Into<Key>) -> Self {
        Self::Key(key.into())
    }

    /// Creates the range of all keys that begin with `prefix`.
    pub fn prefix(prefix: impl Into<Key>) -> Self {
        Self::Prefix(prefix.into())
    }

    /// The range's lower bound (inclusive) and upper bound (exclusive; `None` means no upper bound).
    pub fn bounds(&self) -> (Key, Option<Key>) {
        match self {
            Self::Key(key) => (key.clone(), Some(key.successor())),
            Self::Prefix(prefix) => (prefix.clone(), prefix.prefix_end()),
            Self::FromTo(from, to) => (from.clone(), Some(to.clone())),
            Self::From(from) => (from.clone(), None),
            Self::All => (Key::default(), None),
        }
    }

    /// The part of this range that starts at the key `from`, which must not sort before the start of the range.
    #[must_use]
    pub fn rest(&self, from: Key) -> Self {
        match self.bounds().1 {
            Some(end) => Self::FromTo(from, end),
            None => Self::From(from),
        }
    }

    /// Returns true if this range contains every key of the range `other`.
    pub fn covers(&self, other: &Self) -> bool {
        let ((from, to), (other_from, other_to)) = (self.bounds(), other.bounds());
        from <= other_from && to.is_none_or(|to| other_to.is_some_and(|other_to| other_to <= to))
    }

    /// Returns true if the range contains the key.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            Self::Key(only) => only.as_bytes() == key,
            Self::Prefix(prefix) => key.starts_with(prefix.as_bytes()),
            Self::FromTo(from, to) => from.as_bytes() <= key && key < to.as_bytes(),
            Self::From(from) => from.as_bytes() <= key,
            Self::All => true,
        }
    }

    /// Returns true if the range can contain no key.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::FromTo(from, to) if from >= to)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => write!(f, "{key}"),
            Self::Prefix(prefix) => write!(f, "{prefix}*"),
            Self::FromTo(from, to) => write!(f, "[{from}, {to})"),
            Self::From(from) => write!(f, "[{from}, )"),
            Self::All => f.write_str("*"),
        }
    }
}

/// The id of a lease: any number except 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LeaseId(NonZeroI64);

impl LeaseId {
    /// Creates a lease id from a number; returns `None` for 0, which means "no lease".
    pub const fn new(number: i64) -> Option<Self> {
        match NonZeroI64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// The lease id as a number.
    pub const fn get(self) -> i64 {
        self.0.get()
    }

    /// Returns an optional lease id as a number; `None` becomes 0.
    pub fn number(lease: Option<Self>) -> i64 {
        lease.map_or(0, Self::get)
    }
}

impl fmt::Display for LeaseId {
    /// Writes the lease id like etcd's command line tools: as 16 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A lease that a store granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The id of the granted lease.
    pub id: LeaseId,
    /// The time to live that the lease was granted, in whole seconds.
    pub ttl: Duration,
}

impl Lease {
    /// The longest time to live that a lease can have; the same limit as in etcd.
    pub const MAX_TTL: Duration = Duration::from_secs(9_000_000_000);
}

/// The result of a request to grant a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantOutcome {
    /// The requested lease was granted.
    New,
    /// A lease with the requested id already exists, and nothing was changed.
    Taken,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_end_drops_trailing_ff() {
        assert_eq!(Key::from("a").prefix_end(), Some(Key::from("b")));
        assert_eq!(Key::new(vec![b'w', 0xff]).prefix_end(), Some(Key::from("x")));
        assert_eq!(Key::new(vec![0xff, 0xff]).prefix_end(), None);
        assert_eq!(Key::default().prefix_end(), None);
    }

    #[test]
    fn bounds_agree_with_contains() {
        let keys: Vec<Vec<u8>> =
            [&b"a"[..], b"a\0", b"ab", b"b", b"\xff", b"\xff\xff", b"a\xff", b""].map(<[u8]>::to_vec).to_vec();
        let ranges = [
            Range::key("a"),
            Range::prefix("a"),
            Range::prefix(vec![0xff]),
            Range::prefix(""),
            Range::FromTo("a".into(), "b".into()),
            Range::FromTo("b".into(), "a".into()),
            Range::From("ab".into()),
            Range::All,
        ];
        for range in &ranges {
            let (from, to) = range.bounds();
            for key in &keys {
                let within = from.as_bytes() <= &key[..] && to.as_ref().is_none_or(|to| &key[..] < to.as_bytes());
                assert_eq!(range.contains(key), within, "{range} and {}", key.escape_ascii());
            }
        }
    }

    #[test]
    fn range_rest_ends_where_range_does() {
        assert_eq!(Range::prefix("a").rest("ab".into()), Range::FromTo("ab".into(), "b".into()));
        assert_eq!(Range::FromTo("a".into(), "c".into()).rest("b".into()), Range::FromTo("b".into(), "c".into()));
        assert_eq!(Range::From("a".into()).rest("b".into()), Range::From("b".into()));
        assert!(Range::key("a").rest(Key::from("a").successor()).is_empty());
    }

    #[test]
    fn keys_print_escaped() {
        assert_eq!(Key::new(vec![b'k', 0, 0xff]).to_string(), "k\\x00\\xff");
    }

    #[test]
    fn ranges_print_as_intervals() {
        let printed = |range: Range| range.to_string();
        assert_eq!(printed(Range::key("k")), "k");
        assert_eq!(printed(Range::prefix("k/")), "k/*");
        assert_eq!(printed(Range::FromTo("a".into(), "b".into())), "[a, b)");
        assert_eq!(printed(Range::From("a".into())), "[a, )");
        assert_eq!(printed(Range::All), "*");
    }

    #[test]
    fn values_print_first_bytes_when_long() {
        let shown = |bytes: usize| format!("{:?}", Value::new(vec![b'v'; bytes]));
        assert_eq!(shown(2), "\"vv\" (2 bytes)");
        assert_eq!(shown(40), format!("\"{}\" (40 bytes)", "v".repeat(40)));
        assert_eq!(shown(41), format!("\"{}...\" (41 bytes)", "v".repeat(40)));
        assert!(Value::default().is_empty() && !Value::from("v").is_empty());
    }
}
