//! The store that the daemon holds, judged by all cases, with a hand-over before each call.

mod support;

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use kv::{RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};
use serve::held::{Announced, Held};

/// Hands the store over before each call. Calls that are under way at the same time are waited for.
#[derive(Clone, Debug)]
struct HandedOver(Held);

impl HandedOver {
    async fn hand_over(&self) {
        self.0.hand_over(Announced::No).await;
    }
}

#[async_trait]
impl Store for HandedOver {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.hand_over().await;
        self.0.range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.hand_over().await;
        self.0.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.hand_over().await;
        self.0.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.hand_over().await;
        self.0.compact(revision).await
    }
}

struct Site;

#[derive(Debug)]
struct Fresh {
    held: Held,
    folder: support::Folder,
}

#[async_trait]
impl Harness for Site {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Measure, Ability::Progress]
    }

    async fn fresh(&self) -> std::result::Result<Box<dyn Fixture>, BoxError> {
        let folder = support::Folder::with_store("redb").await?;
        Ok(Box::new(Fresh { held: Held::new(folder.location(), None, Arc::default()), folder }))
    }
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(HandedOver(self.held.clone()))
    }

    async fn reopen(&mut self) -> std::result::Result<(), BoxError> {
        self.held.close().await;
        Ok(())
    }

    async fn stored_bytes(&self) -> std::result::Result<u64, BoxError> {
        Ok(self.folder.bytes()?)
    }

    async fn finish(&mut self) -> std::result::Result<(), BoxError> {
        self.held.close().await;
        Ok(())
    }
}

fn main() -> ExitCode {
    conformance::main(Site, &support::IGNORED)
}
