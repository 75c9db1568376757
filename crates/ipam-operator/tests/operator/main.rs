//! Tests the operations of `Operator` on the in-memory store.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod compaction;
mod documents;
mod filling;
mod inspect;
mod pools;
mod prefixes;
mod reading;
mod secondary;
mod sticky;
mod vm;

use ipam_operator::Operator;
use testkit::world::{self, World};

pub(crate) trait Operated {
    fn operator(&self) -> Operator;
}

impl Operated for World {
    fn operator(&self) -> Operator {
        Operator::from(self.ipam.clone())
    }
}
