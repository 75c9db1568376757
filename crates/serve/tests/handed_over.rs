//! Runs all conformance cases on a shared store that is handed over between the calls.

mod support;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use datastore::Create;
use datastore::shared_store::{SharedStore, SharedStoreOptions, YieldAnnouncement};
use kv::{RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};

/// Time limit for taking the store lock.
const WAIT: Duration = Duration::from_secs(60);
/// The store is handed over before each of the first `EACH` calls.
const EACH: u64 = 500;

/// After the first `EACH` calls, the daemon hands the store over before two of every `ONE_OF` calls. Handing over
/// before each call would take too long: a hand-over reads the whole store again, and some conformance cases make ten
/// thousand calls.
const ONE_OF: u64 = 20;

/// A store that is handed over to another owner before each of its first `EACH` calls, and then before two of every
/// `ONE_OF` calls. Each hand-over waits for calls in progress.
#[derive(Clone, Debug)]
struct HandedOver {
    shared_store: SharedStore,
    calls: Arc<AtomicU64>,
}

impl HandedOver {
    async fn hand_over(&self) {
        let before = self.calls.fetch_add(1, Ordering::Relaxed);
        if before < EACH || before % ONE_OF < 2 {
            // A daemon opens the store again immediately after a hand-over. Processes other than the daemon reopen the
            // store only at their next call.
            match before % 2 {
                0 => self.shared_store.hand_over(YieldAnnouncement::No).await,
                _ => self.shared_store.release_store().await,
            }
        }
    }
}

#[async_trait]
impl Store for HandedOver {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.hand_over().await;
        self.shared_store.range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.hand_over().await;
        self.shared_store.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.hand_over().await;
        self.shared_store.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.hand_over().await;
        self.shared_store.compact(revision).await
    }
}

struct Site;

#[derive(Debug)]
struct Fresh {
    store: HandedOver,
    folder: support::Folder,
}

#[async_trait]
impl Harness for Site {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Measure, Ability::Progress]
    }

    async fn fresh(&self) -> std::result::Result<Box<dyn Fixture>, BoxError> {
        let folder = support::Folder::with_store("redb").await?;
        let shared_store = SharedStore::new(folder.location(), SharedStoreOptions::new(Create::Never.with_wait(WAIT)));
        Ok(Box::new(Fresh { store: HandedOver { shared_store, calls: Arc::default() }, folder }))
    }
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn reopen(&mut self) -> std::result::Result<(), BoxError> {
        self.store.shared_store.close().await?;
        Ok(())
    }

    async fn stored_bytes(&self) -> std::result::Result<u64, BoxError> {
        Ok(self.folder.bytes()?)
    }

    async fn finish(&mut self) -> std::result::Result<(), BoxError> {
        self.store.shared_store.close().await?;
        Ok(())
    }
}

fn main() -> ExitCode {
    conformance::main(Site, &support::IGNORED)
}
