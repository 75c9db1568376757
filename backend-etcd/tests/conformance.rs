//! The store on a real etcd, judged by all cases: each gets an etcd of its own.

mod support;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

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

/// What is about stores that one process holds by itself, and what takes killed servers.
const IGNORED: &[&str] = &[
    "R11_deletion_compacted_and_killed",
    "H17_killed_while_compacting",
    "D01_acknowledged_writes",
    "D02_acknowledged_txns",
    "D03_prefix_of_many_writers",
    "D04_nothing_seen_is_lost",
    "D05_killed_while_opening",
    "D06_killed_while_created",
    "M01_second_one_waits",
    "M03_dead_holder_frees_it",
    "M04_reader_beside_a_writer",
    "M06_child_does_not_hold_it",
    "M07_two_paths",
];

fn main() -> Result<ExitCode, BoxError> {
    let known: &[KnownFailure] = match support::version()? {
        [..=3, ..=3, _] | [3, 4, ..=35] | [3, 5, ..=17] => &[LOST_DELETION],
        _ => &[],
    };
    Ok(conformance::main_knowing(OnEtcd, IGNORED, known))
}

struct OnEtcd;

#[derive(Debug)]
struct Held {
    store: EtcdStore,
    // After the store, so that nothing talks to it any more when it goes.
    etcd: Option<Etcd>,
}

/// A store on an etcd that another process runs.
#[derive(Debug)]
struct Joined(EtcdStore);

impl Fixture for Joined {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }
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
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::Measure, Ability::Processes]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let etcd = spawn_blocking(Etcd::start).await??;
        Ok(Box::new(Held { store: open(&etcd)?, etcd: Some(etcd) }))
    }

    /// Nobody waits: a server has room for many.
    async fn join(&self, address: &str, _: Duration) -> kv::Result<Box<dyn Fixture>> {
        Ok(Box::new(Joined(EtcdStore::open(&Options::new([address]))?)))
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

    fn address(&self) -> Result<String, BoxError> {
        Ok(self.etcd()?.url())
    }

    /// The database; beside it etcd keeps a log of a bounded number of segments.
    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Ok(support::bytes_of(&self.etcd()?.data().join("member/snap/db"))?)
    }
}
