//! Defines the owner of a block, and affinities: documents that record an owner's claim to a block, and the state of
//! the claim.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use kv::{Key, Value};

use super::codec::{Document, Field, Malformed, UnknownFields, document, from_json, to_json};

/// The owner of a block, stored in the block as text like `host:node1` or `virtual:load-balancer`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A node, identified by its name.
    Host(String),
    /// An owner that is not a node, for example a load balancer.
    Virtual(String),
    /// A stored owner text that names neither a node nor a virtual owner. Addresses of a block with an owner of unknown
    /// form can only be borrowed, because no requester equals this owner.
    Other(String),
}

/// The virtual owner of the blocks from which Calico assigns addresses to services.
const LOAD_BALANCER: &str = "load-balancer";

/// Name prefix of the virtual owner that owns the blocks for a node's secondary networks. The name of a node's virtual
/// owner is `secondary@` followed by the node's name. No owner name of Calico begins with this prefix, because Calico's
/// node names contain only letters, digits, `.`, `_` and `-`. Calico can parse an owner's name with `@`: in a key the
/// name ends at the next `/`, and in a block at the end of the text.
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

    /// Returns the name of the owner's node: the owner itself, or the node whose secondary networks the virtual owner
    /// serves. Returns `None` for a virtual owner that belongs to no node.
    pub fn node(&self) -> Option<&str> {
        match self {
            Self::Host(name) => Some(name),
            Self::Virtual(name) => name.strip_prefix(SECONDARY).filter(|node| !node.is_empty()),
            Self::Other(_) => None,
        }
    }

    /// Returns the owner that replaces this owner when node `from` is renamed to `to`, or `None` if this owner belongs
    /// to another node.
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
    /// The owner's claim to the block is complete. An affinity with an empty state, or with the empty value of old
    /// Calico versions, also counts as confirmed.
    Confirmed,
    /// The owner is about to claim the block of this affinity. Until the claim is confirmed, another owner may claim
    /// the block.
    Pending,
    /// The owner is about to release the block of this affinity.
    PendingDeletion,
    /// The stored state of the claim is unknown to this version of Margay. An affinity in an unknown state must be
    /// treated as not confirmed.
    Unknown,
}

document! {
    /// The stored document of an owner's affinity to a block.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Affinity {
        state: Field<String> = "state",
        deleted: Field<bool> = "deleted",
    }
}

impl Affinity {
    /// Creates an affinity with the given state.
    pub fn new(state: AffinityState) -> Self {
        let mut new = Self { state: Field::Absent, deleted: Field::Absent, extra: UnknownFields::default() };
        new.set_state(state);
        new
    }

    /// Returns the state of the owner's claim to the block.
    pub fn state(&self) -> AffinityState {
        match self.state.get().map(String::as_str) {
            None | Some("" | "confirmed") => AffinityState::Confirmed,
            Some("pending") => AffinityState::Pending,
            Some("pendingDeletion") => AffinityState::PendingDeletion,
            Some(_) => AffinityState::Unknown,
        }
    }

    /// Sets the state of the claim, and converts the document to the current form. Setting [`AffinityState::Unknown`]
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
        // The first versions of Calico stored affinities with an empty value.
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
