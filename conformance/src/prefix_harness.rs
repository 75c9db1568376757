//! Cases on a store that others use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use kv::{Store, StoreExt};

use crate::harness::Tenancy;
use crate::harness::{Ability, BoxError, Fixture, Harness};
use crate::prefixed::PrefixedStore;

/// An environment in which each case gets a prefix of one store that others use, and leaves nothing in it.
///
/// Only cases that can share a store run; none of them compacts, and none sees or touches a key outside its prefix.
#[derive(Debug)]
pub struct PrefixHarness<H> {
    store: H,
    prefix: String,
    cases: AtomicU64,
}

impl<H: Harness> PrefixHarness<H> {
    /// Cases on the one store of which `store` hands out handles; each case under a prefix of its own that begins with
    /// `prefix`, which should end with a separator and be nobody else's.
    pub fn new(store: H, prefix: impl Into<String>) -> Self {
        Self { store, prefix: prefix.into(), cases: AtomicU64::new(0) }
    }

    /// Deletes the keys of a case that did not come to its end. Nothing happens unless a case has begun.
    ///
    /// # Errors
    /// The obstacle to deleting it.
    pub async fn clear_up(&self) -> Result<(), BoxError> {
        if self.cases.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let host = self.store.fresh().await?;
        PrefixFixture { host, prefix: self.prefix.clone() }.finish().await
    }
}

#[async_trait]
impl<H: Harness> Harness for PrefixHarness<H> {
    /// None: every environment can do all that a store which others use allows.
    fn abilities(&self) -> &[Ability] {
        &[]
    }

    fn tenancy(&self) -> Tenancy {
        Tenancy::Shared
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let number = self.cases.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("{}{number}/", self.prefix);
        Ok(Box::new(PrefixFixture { host: self.store.fresh().await?, prefix }))
    }
}

/// A prefix of a store.
#[derive(Debug)]
struct PrefixFixture {
    host: Box<dyn Fixture>,
    prefix: String,
}

impl PrefixFixture {
    fn within(&self, store: Arc<dyn Store>) -> PrefixedStore {
        PrefixedStore::new(store, self.prefix.as_str())
    }
}

#[async_trait]
impl Fixture for PrefixFixture {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.within(self.host.store()))
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(Arc::new(self.within(self.host.another().await?)))
    }

    async fn finish(&mut self) -> Result<(), BoxError> {
        let store = self.host.store();
        let deleted = store.delete(self.within(store.clone()).whole()).await;
        drop(store);
        self.host.finish().await?;
        Ok(deleted.map(drop)?)
    }
}
