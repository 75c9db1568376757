//! Provides one in-memory store for all test cases.

use std::sync::Arc;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use kv::Store;

/// A test environment that always returns the same store.
#[derive(Clone, Debug)]
pub(crate) struct One(pub(crate) Arc<dyn Store>);

impl One {
    /// Creates a test environment with one empty in-memory store.
    pub(crate) fn in_memory() -> Self {
        Self(Arc::new(kv_mvcc::memory()))
    }
}

#[async_trait]
impl Harness for One {
    fn abilities(&self) -> &[Ability] {
        &[]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(Box::new(self.clone()))
    }
}

#[async_trait]
impl Fixture for One {
    fn store(&self) -> Arc<dyn Store> {
        self.0.clone()
    }
}
