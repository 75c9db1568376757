//! The affinity of a block: the owner that may claim it, and how far that claim has come.

use kv::{Key, Value};

use super::codec::{Document, Field, Malformed, from_json, to_json};
use super::kept::{Kept, document};

/// How far a claim has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AffinityState {
    /// The block is the owner's. The empty state and the empty value of old versions count as this.
    Confirmed,
    /// The owner is about to claim the block; another may be quicker.
    Pending,
    /// The owner is about to release the block.
    PendingDeletion,
    /// A state that this version does not know. Treat it as not confirmed.
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
    /// A new affinity in this state.
    pub fn new(state: AffinityState) -> Self {
        let mut new = Self { state: Field::Absent, deleted: Field::Absent, extra: Kept::default() };
        new.set_state(state);
        new
    }

    /// The state.
    pub fn state(&self) -> AffinityState {
        match self.state.get().map(String::as_str) {
            None | Some("" | "confirmed") => AffinityState::Confirmed,
            Some("pending") => AffinityState::Pending,
            Some("pendingDeletion") => AffinityState::PendingDeletion,
            Some(_) => AffinityState::Unknown,
        }
    }

    /// Changes the state, and brings the document to the current form. [`AffinityState::Unknown`] changes no state.
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
        // The first versions stored no value at all.
        if value.is_empty() { from_json(key, b"{}") } else { from_json(key, value) }
    }

    fn encode(&self) -> Result<Value, Malformed> {
        to_json(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(value: &str) -> Affinity {
        Affinity::decode(&Key::default(), value.as_bytes()).unwrap()
    }

    #[test]
    fn old_forms_are_confirmed() {
        for value in ["", "{}", r#"{"state":""}"#, r#"{"state":null}"#, r#"{"state":"confirmed","deleted":false}"#] {
            assert_eq!(decode(value).state(), AffinityState::Confirmed, "{value}");
        }
        assert_eq!(decode(r#"{"state":"later"}"#).state(), AffinityState::Unknown);
        assert!(Affinity::decode(&Key::default(), b"[]").is_err());
    }

    #[test]
    fn a_change_writes_the_current_form_and_keeps_the_rest() {
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
