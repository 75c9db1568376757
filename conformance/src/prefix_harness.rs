//! Runs conformance cases on a store that other clients use at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use kv::{Store, StoreExt};

use crate::harness::Tenancy;
use crate::harness::{Ability, BoxError, Fixture, Harness};
use crate::prefixed::PrefixedStore;

/// A test environment in which each case uses its own prefix of one shared store and leaves no keys behind.
///
/// This environment only runs test cases that tolerate a shared store. Cases on a shared store do not compact, and do
/// not read or write keys outside their prefix.
#[derive(Debug)]
pub struct PrefixHarness<H> {
    store: H,
    prefix: String,
    cases: AtomicU64,
}

impl<H: Harness> PrefixHarness<H> {
    /// Creates a test environment that runs all cases on the one store that `store` provides. Each test case gets its
    /// own key prefix, which begins with the string `prefix`. The key prefix should end with a separator, and no other
    /// client may use keys with this prefix.
    pub fn new(store: H, prefix: impl Into<String>) -> Self {
        Self { store, prefix: prefix.into(), cases: AtomicU64::new(0) }
    }

    /// Deletes the keys of an abandoned test case; does nothing if no test case has begun.
    ///
    /// # Errors
    /// Any error that prevents deleting the keys.
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
    /// Declares no abilities, because test cases that tolerate a shared store need none.
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

/// The fixture of one test case, whose store consists of the keys with one prefix in the shared store.
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
