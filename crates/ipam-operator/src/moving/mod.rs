//! Moving what a store holds to another one: what belongs to it, and the mark on a store that is being filled.
//!
//! Documents move as they are, byte for byte. [`ranges`] says where they are; [`compare`] says what has to be written
//! and deleted so that a target has what its source has; [`Renaming`] makes the documents of one node those of another;
//! [`Tally`] counts what a person wants to know.
//!
//! While a store is being filled, [the mark](ipam_core::filling) is on it.

mod compare;
mod rename;
mod scope;
mod tally;

pub use ipam_core::filling::{Filling, Mark, MoveKind, State, mark_key};

pub use compare::{Change, Difference, compare};
pub use rename::{Renaming, nodes_of};
pub use scope::{Part, must_be_empty, part_of, ranges, ranges_between};
pub use tally::Tally;
