//! Defines the owner of a block, and the affinity: the document that records an owner's claim to a block and the state
//! of the claim.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use kv::{Key, Value};

use super::codec::{Document, Field, Malformed, UnknownFields, document, from_json, to_json};

/// The owner of a block, as stored in the block: `host:node1`, `virtual:load-balancer`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A node, identified by its name.
    Host(String),
    /// An owner that is not a node, for example a load balancer.
    Virtual(String),
    /// A text that names neither a node nor a virtual owner. An owner of unknown form matches no other owner, so
    /// addresses of its blocks can only be borrowed.
    Other(String),
}

/// The virtual owner of the blocks from which Calico assigns addresses to services.
const LOAD_BALANCER: &str = "load-balancer";

/// The prefix of the name of the virtual owner of a node's secondary networks. The node's name follows the prefix.
/// Calico's node names consist of letters, digits, `.`, `_` and `-`, so no node and no virtual owner of Calico's has a
/// name with this prefix. Calico reads an owner's name up to the next `/` in a key, and up to the end in a block.
const SECONDARY: &str = "secondary@";

impl Owner {
    /// Creates an owner that is a node.
    pub fn host(name: impl Into<String>) -> Self {
        Self::Host(name.into())
    }

    /// Creates the virtual owner of the blocks from which Calico assigns addresses to services of type LoadBalancer.
    pub fn load_balancer() -> Self {
        Self::Virtual(LOAD_BALANCER.to_owned())
    }

    /// Creates the virtual owner of the blocks for a node's secondary networks, in a store that Calico also reads.
    /// Calico's routing uses the blocks of nodes, and ignores the blocks of virtual owners.
    pub fn secondary(node: &str) -> Self {
        Self::Virtual(format!("{SECONDARY}{node}"))
    }

    /// Returns the node to which the owner's blocks belong: the owner itself if it is a node, or the node whose
    /// secondary networks the virtual owner serves. Returns `None` for other virtual owners.
    pub fn node(&self) -> Option<&str> {
        match self {
            Self::Host(name) => Some(name),
            Self::Virtual(name) => name.strip_prefix(SECONDARY).filter(|node| !node.is_empty()),
            Self::Other(_) => None,
        }
    }

    /// Returns the corresponding owner of node `to`, if this owner belongs to node `from`.
    pub fn renamed(&self, from: &str, to: &str) -> Option<Self> {
        let place = Self::all_of(from).iter().position(|owner| owner == self)?;
        Self::all_of(to).into_iter().nth(place)
    }

    /// Returns the owners of a node's blocks: the node itself, and the virtual owner of the node's secondary networks.
    pub fn all_of(node: &str) -> [Self; 2] {
        [Self::host(node), Self::secondary(node)]
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(name) => write!(f, "host:{name}"),
            Self::Virtual(name) => write!(f, "virtual:{name}"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl From<&str> for Owner {
    fn from(text: &str) -> Self {
        match text.split_once(':') {
            Some(("host", name)) => Self::Host(name.to_owned()),
            Some(("virtual", name)) => Self::Virtual(name.to_owned()),
            _ => Self::Other(text.to_owned()),
        }
    }
}

impl FromStr for Owner {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.into())
    }
}

/// The state of an owner's claim to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AffinityState {
    /// The owner has the block. An empty state and the empty value of old versions also count as confirmed.
    Confirmed,
    /// The owner is about to claim the block. Another owner may claim the block first.
    Pending,
    /// The owner is about to release the block.
    PendingDeletion,
    /// The state is unknown. An affinity in an unknown state must be treated as not confirmed.
    Unknown,
}

document! {
    /// The document under an affinity's key.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Affinity {
        state: Field<String> = "state",
        deleted: Field<bool> = "deleted",
    }
}

impl Affinity {
    /// Creates an affinity with this state.
    pub fn new(state: AffinityState) -> Self {
        let mut new = Self { state: Field::Absent, deleted: Field::Absent, extra: UnknownFields::default() };
        new.set_state(state);
        new
    }

    /// Returns the state of the owner's claim.
    pub fn state(&self) -> AffinityState {
        match self.state.get().map(String::as_str) {
            None | Some("" | "confirmed") => AffinityState::Confirmed,
            Some("pending") => AffinityState::Pending,
            Some("pendingDeletion") => AffinityState::PendingDeletion,
            Some(_) => AffinityState::Unknown,
        }
    }

    /// Sets the state of the claim, and updates the document to the current form. Setting [`AffinityState::Unknown`]
    /// changes nothing.
    pub fn set_state(&mut self, state: AffinityState) {
        let text = match state {
            AffinityState::Confirmed => "confirmed",
            AffinityState::Pending => "pending",
            AffinityState::PendingDeletion => "pendingDeletion",
            AffinityState::Unknown => return,
        };
        self.state = Field::Is(text.to_owned());
        self.deleted = Field::Is(self.deleted.or_zero());
    }
}

impl Document for Affinity {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        // The first versions stored affinities with an empty value.
        if value.is_empty() { from_json(key, b"{}") } else { from_json(key, value) }
    }

    fn encode(&self) -> Result<Value, Malformed> {
        to_json(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_of_secondary_networks_of_node() {
        let owner = Owner::secondary("node-1.b_c");
        assert_eq!(owner.to_string(), "virtual:secondary@node-1.b_c");
        assert_eq!(Owner::from("virtual:secondary@node-1.b_c"), owner);
        assert_eq!((owner.node(), Owner::host("a").node()), (Some("node-1.b_c"), Some("a")));
        let others = [Owner::load_balancer(), Owner::Virtual("secondary@".into()), Owner::Other("secondary@a".into())];
        assert!(others.iter().all(|owner| owner.node().is_none()));
        assert_eq!(Owner::all_of("a"), [Owner::host("a"), Owner::secondary("a")]);
        assert_eq!(Owner::secondary("a").renamed("a", "b"), Some(Owner::secondary("b")));
        assert_eq!(Owner::host("a").renamed("a", "b"), Some(Owner::host("b")));
        assert_eq!(Owner::host("c").renamed("a", "b"), None);
    }

    fn decode(value: &str) -> Affinity {
        Affinity::decode(&Key::default(), value.as_bytes()).unwrap()
    }

    #[test]
    fn affinity_in_old_form_is_confirmed() {
        for value in ["", "{}", r#"{"state":""}"#, r#"{"state":null}"#, r#"{"state":"confirmed","deleted":false}"#] {
            assert_eq!(decode(value).state(), AffinityState::Confirmed, "{value}");
        }
        assert_eq!(decode(r#"{"state":"later"}"#).state(), AffinityState::Unknown);
        assert!(Affinity::decode(&Key::default(), b"[]").is_err());
    }

    #[test]
    fn affinity_change_writes_current_form_and_keeps_rest() {
        let mut affinity = decode(r#"{"x":[1]}"#);
        affinity.set_state(AffinityState::Pending);
        let text = String::from_utf8(affinity.encode().unwrap().as_bytes().to_vec()).unwrap();
        assert_eq!(text, r#"{"state":"pending","deleted":false,"x":[1]}"#);
        assert_eq!(
            Affinity::new(AffinityState::Confirmed).encode().unwrap().as_bytes(),
            br#"{"state":"confirmed","deleted":false}"#
        );
    }
}
