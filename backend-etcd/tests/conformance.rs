//! The store on a real etcd, judged by all cases: each gets an etcd of its own.

mod support;

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use backend_etcd::{EtcdStore, Options};
use conformance::{Ability, BoxError, Fixture, Happens, Harness, KnownFailure};
use kv::Store;
use support::Etcd;
use tokio::task::spawn_blocking;

/// Cases that some versions of etcd fail.
const LOST_DELETION: KnownFailure = KnownFailure {
    case: "W11_start_at_mark_delete",
    rule: "C4",
    reason: "etcd before 3.4.36 and 3.5.18 loses a deletion at the compaction revision",
    // Until the compaction has worked its way through the file, the deletion is there.
    happens: Happens::Sometimes,
};

fn main() -> Result<ExitCode, BoxError> {
    let known: &[KnownFailure] = match support::version()? {
        [..=3, ..=3, _] | [3, 4, ..=35] | [3, 5, ..=17] => &[LOST_DELETION],
        _ => &[],
    };
    Ok(conformance::main_knowing(OnEtcd, &[], known))
}

struct OnEtcd;

#[derive(Debug)]
struct Held {
    store: EtcdStore,
    // After the store, so that nothing talks to it any more when it goes.
    etcd: Option<Etcd>,
}

fn open(etcd: &Etcd) -> Result<EtcdStore, BoxError> {
    Ok(EtcdStore::open(&Options::new([etcd.url()]))?)
}

impl Held {
    fn etcd(&self) -> Result<&Etcd, BoxError> {
        self.etcd.as_ref().ok_or_else(|| "etcd did not come back".into())
    }
}

#[async_trait]
impl Harness for OnEtcd {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::Measure]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let etcd = spawn_blocking(Etcd::start).await??;
        Ok(Box::new(Held { store: open(&etcd)?, etcd: Some(etcd) }))
    }
}

#[async_trait]
impl Fixture for Held {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(Arc::new(open(self.etcd()?)?))
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close();
        let mut etcd = self.etcd.take().ok_or("etcd did not come back")?;
        let etcd = spawn_blocking(move || {
            etcd.shut_down()?;
            etcd.run().map(|()| etcd)
        });
        let etcd = etcd.await??;
        self.store = open(&etcd)?;
        self.etcd = Some(etcd);
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        self.store.close();
        Ok(())
    }

    /// The database; beside it etcd keeps a log of a bounded number of segments.
    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Ok(support::bytes_of(&self.etcd()?.data().join("member/snap/db"))?)
    }
}
