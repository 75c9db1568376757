//! The changes by which a target gets equal to its source.

use std::cmp::Ordering;

use kv::{Key, Kv, Revision, Value};

use super::scope::{Part, part_of};

/// One key to be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which one.
    pub key: Key,
    /// Its future value; `None` if it shall go.
    pub value: Option<Value>,
    /// When it was last written; unset if it is not there.
    pub was: Revision,
}

/// A part of a source beside the same part of its target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// The changes, ascending.
    pub changes: Vec<Change>,
    /// How many keys are equal already.
    pub equal: u64,
    /// How many keys are the target's own and stay as they are.
    pub kept: u64,
}

/// Compares a part of a source with the same part of its target; both ascend, and so does what `then` is called with: all
/// that the target has once the changes are made.
pub fn compare(source: Vec<(Key, Value)>, target: Vec<Kv>, mut then: impl FnMut(&Key, &Value)) -> Difference {
    let mut found = Difference::default();
    let (mut source, mut target) = (source.into_iter().peekable(), target.into_iter().peekable());
    loop {
        let order = match (source.peek(), target.peek()) {
            (Some((key, _)), Some(kv)) => key.cmp(&kv.key),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return found,
        };
        let wanted = if order.is_le() { source.next() } else { None };
        let there = if order.is_ge() { target.next() } else { None };
        found.add(wanted, there, &mut then);
    }
}

impl Difference {
    fn add(&mut self, wanted: Option<(Key, Value)>, there: Option<Kv>, then: &mut impl FnMut(&Key, &Value)) {
        match (wanted, there) {
            (Some((key, value)), None) => {
                then(&key, &value);
                self.changes.push(Change { key, value: Some(value), was: Revision::UNSET });
            }
            (Some((key, value)), Some(there)) if value == there.value => {
                then(&key, &value);
                self.equal += 1;
            }
            (wanted, Some(there)) => match part_of(&there.key) {
                Some(Part::Books) => {
                    let value = wanted.map(|(_, value)| value);
                    value.iter().for_each(|value| then(&there.key, value));
                    self.changes.push(Change { key: there.key, value, was: there.mod_revision });
                }
                part => {
                    then(&there.key, &there.value);
                    self.kept += u64::from(part.is_some());
                }
            },
            (None, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam_core::filling::mark_key;
    use ipam_core::model::keys::{self, ResourceKind};

    fn kv(key: Key, value: &str, at: i64) -> Kv {
        let at = Revision::new(at);
        Kv { key, value: value.into(), create_revision: at, mod_revision: at, version: 1, lease: None }
    }

    #[test]
    fn what_differs_is_changed_and_what_is_the_targets_own_stays() {
        let node = |name| keys::resource(ResourceKind::Node, name);
        let source = vec![
            (keys::handle("equal"), "1".into()),
            (keys::handle("new"), "1".into()),
            (keys::handle("other"), "1".into()),
            (node("a"), "source's".into()),
            (node("b"), "source's".into()),
        ];
        let target = vec![
            kv(keys::handle("equal"), "1", 3),
            kv(keys::handle("gone"), "1", 4),
            kv(keys::handle("other"), "2", 5),
            kv(node("a"), "target's", 6),
            kv(node("c"), "target's", 7),
            kv(mark_key(), "{}", 8),
        ];
        let mut then = Vec::new();
        let found = compare(source, target, |key, value| then.push((key.clone(), value.clone())));
        let changes: Vec<_> = found
            .changes
            .iter()
            .map(|change| (change.key.to_string(), change.value.is_some(), change.was.get()))
            .collect();
        let expected = [
            (keys::handle("gone"), false, 4),
            (keys::handle("new"), true, 0),
            (keys::handle("other"), true, 5),
            (node("b"), true, 0),
        ];
        assert_eq!(changes, expected.map(|(key, put, was)| (key.to_string(), put, was)));
        assert_eq!((found.equal, found.kept), (1, 2));
        let expected = [
            (keys::handle("equal"), "1"),
            (keys::handle("new"), "1"),
            (keys::handle("other"), "1"),
            (node("a"), "target's"),
            (node("b"), "source's"),
            (node("c"), "target's"),
            (mark_key(), "{}"),
        ];
        assert_eq!(then, expected.map(|(key, value)| (key, value.into())));
    }
}
