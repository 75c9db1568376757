//! JSON with its fields in the order in which calicoctl prints them.

use ipam_operator::documents::field_order;
use serde::ser::{Serialize, Serializer};
use serde_json::Value;

/// A value whose fields are written in that order, at every depth. Fields without a place in it follow in alphabetical
/// order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ordered<'a>(pub(crate) &'a Value);

impl Serialize for Ordered<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Object(fields) => {
                let place = |name: &str| field_order().position(|known| known == name).unwrap_or(usize::MAX);
                let mut sorted: Vec<_> = fields.iter().collect();
                sorted.sort_by_key(|(name, _)| (place(name), name.as_str()));
                serializer.collect_map(sorted.into_iter().map(|(name, value)| (name, Ordered(value))))
            }
            Value::Array(items) => serializer.collect_seq(items.iter().map(Ordered)),
            other => other.serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_stand_where_calicoctl_has_them() {
        let value = json!({"spec": {"allowedUses": ["a"], "cidr": "c", "zzz": 1, "aaa": 1}, "metadata": {"uid": "u",
            "name": "n"}, "kind": "K", "apiVersion": "v"});
        let text = serde_json::to_string(&Ordered(&value)).unwrap();
        assert_eq!(
            text,
            r#"{"kind":"K","apiVersion":"v","metadata":{"name":"n","uid":"u"},"spec":{"cidr":"c","allowedUses":["a"],"aaa":1,"zzz":1}}"#
        );
    }
}
