//! Tests leases on a store that fails, and on a store that another store replaces.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use conformance::patient;
use etcd_api::{Backing, MemberIdentity, StoreGeneration, StoreSizes};
use etcd_client::{Client, LeaseGrantOptions, PutOptions};
use kv::{Error, ErrorKind, GrantOutcome, Key, Lease, LeaseId, Operation, Outcome, Revision, Store};
use kv_mvcc::MemoryTable;
use support::{Memory, Server};
use tokio::time::{Instant, sleep};

type Done<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Time limit for every step of a test.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A store that refuses to revoke one lease, grants leases slowly, and can be replaced by another store.
#[derive(Debug)]
struct Spoiled {
    inner: Memory,
    generation: Arc<AtomicU64>,
    stuck: i64,
    grant_takes: Duration,
}

#[async_trait]
impl Backing for Spoiled {
    fn store(&self) -> Arc<dyn Store> {
        self.inner.store()
    }

    fn store_to_release(&self) -> Arc<dyn Store> {
        self.inner.store_to_release()
    }

    fn identity(&self) -> MemberIdentity {
        self.inner.identity()
    }

    fn place(&self) -> StoreGeneration {
        StoreGeneration { generation: self.generation.load(Ordering::SeqCst), ..self.inner.place() }
    }

    async fn sizes(&self) -> kv::Result<StoreSizes> {
        self.inner.sizes().await
    }

    async fn check_room(&self) -> kv::Result<()> {
        self.inner.check_room().await
    }

    async fn compact(&self, to: Revision) -> kv::Result<()> {
        self.inner.compact(to).await
    }

    fn oldest(&self) -> Revision {
        self.inner.oldest()
    }

    async fn grant(&self, lease: Lease) -> kv::Result<GrantOutcome> {
        sleep(self.grant_takes).await;
        let granted = self.inner.grant(lease).await;
        sleep(self.grant_takes).await;
        granted
    }

    async fn revoke(&self, id: LeaseId, of: StoreGeneration) -> kv::Result<Revision> {
        if id.get() == self.stuck {
            let error = Error::new(ErrorKind::TooLarge { bytes: 1 << 30 }, Operation::Txn, "spoiled");
            return Err(error.with_outcome(Outcome::NotApplied));
        }
        self.inner.revoke(id, of).await
    }

    async fn leases(&self) -> kv::Result<Vec<Lease>> {
        self.inner.leases().await
    }

    async fn leased(&self, id: LeaseId) -> kv::Result<Vec<Key>> {
        self.inner.leased(id).await
    }

    async fn defragment(&self) -> kv::Result<()> {
        self.inner.defragment().await
    }
}

async fn grant(client: &mut Client, id: i64, seconds: i64) -> Done {
    client.lease_grant(seconds, Some(LeaseGrantOptions::new().with_id(id))).await?;
    client.put(format!("k{id}"), "v", Some(PutOptions::new().with_lease(id))).await?;
    Ok(())
}

async fn is_there(client: &mut Client, id: i64) -> Done<bool> {
    Ok(client.get(format!("k{id}"), None).await?.count() > 0)
}

async fn until_gone(client: &mut Client, id: i64) -> Done {
    let begun = Instant::now();
    while is_there(client, id).await? {
        assert!(begun.elapsed() < patient(TEST_TIMEOUT), "k{id} is still there");
        sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_that_cannot_be_revoked_delays_no_other() -> Done {
    let spoil = |inner| -> Arc<dyn Backing> {
        Arc::new(Spoiled { inner, generation: Arc::default(), stuck: 1, grant_takes: Duration::ZERO })
    };
    let server = Server::start_behind(&MemoryTable::new(), spoil).await?;
    let mut client = Client::connect([server.url()], None).await?;
    grant(&mut client, 1, 2).await?;
    grant(&mut client, 2, 3).await?;
    grant(&mut client, 3, 3).await?;
    until_gone(&mut client, 2).await?;
    until_gone(&mut client, 3).await?;
    assert!(is_there(&mut client, 1).await?);
    server.stop().await
}

/// Replaces the store while a grant is in progress: once before the grant commits, and once after the commit. When the
/// store is replaced, the `LeaseClock` loads the leases of the new store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_grant_meeting_another_store_ends_in_time() -> Done {
    let generation = Arc::<AtomicU64>::default();
    let spoil = |inner| -> Arc<dyn Backing> {
        let generation = Arc::clone(&generation);
        Arc::new(Spoiled { inner, generation, stuck: 0, grant_takes: Duration::from_millis(400) })
    };
    let server = Server::start_behind(&MemoryTable::new(), spoil).await?;
    let mut client = Client::connect([server.url()], None).await?;
    let mut other = Client::connect([server.url()], None).await?;
    let granting = tokio::spawn(async move { grant(&mut other, 5, 2).await });
    for pause in [200, 400] {
        sleep(Duration::from_millis(pause)).await;
        generation.fetch_add(1, Ordering::SeqCst);
        // The request that lists all leases waits until the leases of the replacement store are loaded.
        client.leases().await?;
    }
    granting.await??;
    assert!(is_there(&mut client, 5).await?);
    let (mut keeper, mut renewals) = client.lease_keep_alive(5).await?;
    keeper.keep_alive().await?;
    assert_eq!(renewals.message().await?.map(|renewed| renewed.ttl()), Some(2));
    until_gone(&mut client, 5).await?;
    let left: Vec<i64> = client.leases().await?.leases().iter().map(etcd_client::LeaseStatus::id).collect();
    assert_eq!(left, Vec::<i64>::new());
    server.stop().await
}
