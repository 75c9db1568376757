//! Who has an address: the answer of `ipam show --ip`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use serde::Serialize;

use crate::answer::Answer;
use crate::error::Result;
use crate::output::printable;

/// What is known about an address.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct AddressState {
    /// The address.
    pub(crate) ip: IpAddr,
    /// Whether somebody has it, or had it until so recently that it is not handed out again yet.
    pub(crate) in_use: bool,
    /// Who has it.
    #[serde(flatten)]
    pub(crate) holder: Option<Holder>,
}

/// Who has an address.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Holder {
    /// The handle.
    pub(crate) handle: Option<String>,
    /// Its attributes.
    pub(crate) attributes: BTreeMap<String, String>,
    /// Those of a second owner, which only virtual machines have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) alternate_attributes: BTreeMap<String, String>,
    /// When it was released, if it is cooling down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) released_at: Option<String>,
}

impl AddressState {
    /// The state as an answer, in calicoctl's words.
    pub(crate) fn answer(&self) -> Result<Answer> {
        Answer::new(self.text(), self)
    }

    fn text(&self) -> String {
        let Some(holder) = &self.holder else {
            return format!("{} is not assigned", self.ip);
        };
        let mut text = format!("IP {} is in use\n", self.ip);
        if let Some(released_at) = &holder.released_at {
            _ = writeln!(text, "Released at {released_at}: it is not handed out again until the cooldown is over");
        }
        _ = writeln!(text, "Handle ID: {}", holder.handle.as_deref().map_or("<none>".into(), printable));
        if holder.attributes.is_empty() {
            text.push_str("No Active Owner attributes defined\n");
        } else {
            text.push_str("Active Owner Attributes:\n");
            list(&mut text, &holder.attributes);
        }
        if !holder.alternate_attributes.is_empty() {
            text.push_str("Alternate Owner Attributes:\n");
            list(&mut text, &holder.alternate_attributes);
        }
        text
    }
}

fn list(text: &mut String, attributes: &BTreeMap<String, String>) {
    for (name, value) in attributes {
        _ = writeln!(text, "  {}: {}", printable(name), printable(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(holder: Option<Holder>) -> AddressState {
        AddressState { ip: "10.65.0.5".parse().unwrap(), in_use: holder.is_some(), holder }
    }

    #[test]
    fn texts_are_calicoctls() {
        assert_eq!(state(None).text(), "10.65.0.5 is not assigned");
        let attributes: BTreeMap<_, _> =
            [("pod", "web"), ("node", "node1")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let holder = Holder { handle: Some("net1.c1".into()), attributes, ..Holder::default() };
        assert_eq!(
            state(Some(holder)).text(),
            "IP 10.65.0.5 is in use\nHandle ID: net1.c1\nActive Owner Attributes:\n  node: node1\n  pod: web\n"
        );
        assert_eq!(
            state(Some(Holder::default())).text(),
            "IP 10.65.0.5 is in use\nHandle ID: <none>\nNo Active Owner attributes defined\n"
        );
    }

    #[test]
    fn json_has_the_holder_beside_the_address() {
        let free = serde_json::to_value(state(None)).unwrap();
        assert_eq!(free, serde_json::json!({"ip": "10.65.0.5", "in_use": false}));
        let held = state(Some(Holder { handle: Some("h".into()), ..Holder::default() }));
        let expected = serde_json::json!({"ip": "10.65.0.5", "in_use": true, "handle": "h", "attributes": {}});
        assert_eq!(serde_json::to_value(held).unwrap(), expected);
    }
}
