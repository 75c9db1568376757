//! An operator's verbs on the in-memory store.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod documents;
mod filling;
mod inspect;
mod pools;
mod prefixes;
mod reading;
mod secondary;
mod sticky;
mod vm;
#[path = "../../../../ipam-core/tests/allocator/world.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod world;

use ipam_operator::Operator;

use crate::world::World;

/// A world whose store an operator works on.
pub(crate) trait Operated {
    fn operator(&self) -> Operator;
}

impl Operated for World {
    fn operator(&self) -> Operator {
        Operator::from(self.ipam.clone())
    }
}
