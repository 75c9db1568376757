//! Moving what a store holds to another one: what belongs to it, and the mark on a store that is being filled.
//!
//! Documents move as they are, byte for byte. [`ranges`] says where they are; [`compare`] says what has to be written
//! and deleted so that a target has what its source has; [`Renaming`] makes the documents of one node those of another;
//! [`Tally`] counts what a person wants to know.
//!
//! **The mark** is a key. While it is there, nothing is assigned and nothing is released: every verb of the allocator
//! reads it in the same request as everything else, and commits on the condition that it is absent. So the program that
//! fills a store has it to itself, whatever else is configured to use it already. Calico's own programs know nothing of
//! it.

mod compare;
mod mark;
mod rename;
mod scope;
mod tally;

pub use compare::{Change, Difference, compare};
pub use mark::{Filling, Mark, MoveKind, State};
pub use rename::{Renaming, nodes_of};
pub use scope::{Part, mark_key, must_be_empty, part_of, ranges, ranges_between};
pub use tally::Tally;

use kv::Transaction;

use crate::error::{Error, Result};

/// The outcome of a verb, unless the store is being filled. A refusal of the store stays one.
pub(crate) async fn unless_marked<T>(tx: &mut Transaction, done: Result<T>) -> Result<T> {
    if let Err(Error::Store(_)) = done {
        return done;
    }
    match tx.get(&mark_key()).await? {
        Some(value) => Err(Error::Filling(Filling::new(value.as_bytes()))),
        None => done,
    }
}
