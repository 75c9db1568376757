//! Keys that are taken to be absent without asking.

use super::Transaction;
use crate::key::{Key, Revision};

impl Transaction {
    /// The same, which guesses nothing unless `may_guess`.
    pub(super) fn guessing(mut self, may_guess: bool) -> Self {
        self.may_guess = may_guess;
        self
    }

    /// For a key that is most likely absent, and would take a round trip of its own: an attempt that has read something, or
    /// begins from a [`Memory`](super::Memory), takes it to be absent without asking, and its commit fails if it is not. An
    /// attempt that has read nothing yet reads it as ever, and so does each one after an attempt that took something to be absent.
    pub fn presume_absent(&mut self, key: &Key) {
        if self.may_guess && self.at.is_set() && !self.knows(key) {
            self.guessed = true;
            self.presumed.insert(key.clone(), self.at);
            self.seen.insert(key.clone(), None);
        }
    }

    /// True if something that this attempt knows was not read by it at its revision: it proves nothing unless it is committed.
    pub(super) fn is_unproven(&self) -> bool {
        self.guessed || self.relied_on_probe || self.recalled.is_some()
    }

    /// The revision as of which a key is known.
    pub(super) fn looked_at(&self, key: &Key) -> Revision {
        self.presumed.get(key).copied().unwrap_or(self.at)
    }
}
