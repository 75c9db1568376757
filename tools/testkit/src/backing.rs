//! Provides a store in memory for tests of Margay's server of etcd's API.

use std::sync::Arc;

use async_trait::async_trait;
use etcd_api::{Backing, MemberIdentity, StoreGeneration, StoreSizes};
use kv::{GrantOutcome, Key, Lease, LeaseId, Revision};
use kv_mvcc::MvccStore;

#[derive(Debug)]
pub struct Memory {
    pub store: Arc<MvccStore>,
    pub url: String,
}

#[async_trait]
impl Backing for Memory {
    fn store(&self) -> Arc<dyn kv::Store> {
        self.store.clone()
    }

    fn store_to_release(&self) -> Arc<dyn kv::Store> {
        self.store.clone()
    }

    fn identity(&self) -> MemberIdentity {
        MemberIdentity { name: "memory".to_owned(), urls: vec![self.url.clone()] }
    }

    fn place(&self) -> StoreGeneration {
        let (cluster, member) = self.store.id().as_u64_pair();
        StoreGeneration { cluster, member, generation: 0 }
    }

    async fn sizes(&self) -> kv::Result<StoreSizes> {
        let bytes = self.store.status().log_bytes;
        Ok(StoreSizes { total: bytes, used: bytes })
    }

    async fn check_room(&self) -> kv::Result<()> {
        Ok(())
    }

    async fn compact(&self, to: Revision) -> kv::Result<()> {
        self.store.compact_for_clients(to).await
    }

    fn oldest(&self) -> Revision {
        self.store.status().oldest_for_clients
    }

    async fn grant(&self, lease: Lease) -> kv::Result<GrantOutcome> {
        self.store.grant(lease).await
    }

    async fn revoke(&self, id: LeaseId, _: StoreGeneration) -> kv::Result<Revision> {
        self.store.revoke(id).await
    }

    async fn leases(&self) -> kv::Result<Vec<Lease>> {
        self.store.leases().await
    }

    async fn leased(&self, id: LeaseId) -> kv::Result<Vec<Key>> {
        self.store.leased(id).await
    }

    async fn defragment(&self) -> kv::Result<()> {
        Ok(())
    }
}
