//! A model of Calico's IPAM client, which reads and writes one key at a time, in the order in which Calico does.
//!
//! Each store call of this model corresponds to a store call of Calico, and each of its writes is a compare-and-swap of
//! one key. The model does not read documents that never change in these tests: settings, reservations, pools and the
//! node. After a conflict, the model retries immediately, as Calico does.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use kv::{ConditionalOutcome, Kv, Range, Revision, Store, StoreExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::documents::{
    Affinity, Attribute, BLOCKS, Block, HOSTS, Handle, Refusal, affinity_key, affinity_of, block_key, cidr_of,
    handle_key,
};

const RETRIES: usize = 100;
/// The claim time of a block that was claimed long ago, so that another host may take it over when it is empty.
pub(crate) const LONG_AGO: &str = "2020-01-01T00:00:00Z";
/// The claim time of a block that was claimed too recently to be taken over.
pub(crate) const JUST_NOW: &str = "2027-01-15T08:00:00Z";

type Done<T = ()> = Result<T, Refusal>;

/// The blocks of a pool in the order in which hosts try to claim them, and the number of addresses in each block.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) blocks: Vec<String>,
    pub(crate) size: usize,
}

/// A model of Calico's IPAM client on one host.
#[derive(Clone)]
pub(crate) struct Calico {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) host: String,
    pub(crate) pool: Pool,
    /// The claim time that is written to new blocks.
    pub(crate) claimed: &'static str,
    /// The pod name stored as an attribute of assigned addresses, if any.
    pub(crate) pod: Option<String>,
}

/// A document as read from the store, with its mod revision.
struct Read<T> {
    key: String,
    value: T,
    at: Revision,
}

impl Calico {
    async fn get<T>(&self, key: String, decode: impl Fn(&[u8]) -> T) -> Done<Read<T>> {
        let found = self.store.get(key.as_str()).await.map_err(broken)?.ok_or(Refusal::Missing)?;
        Ok(Read { key, value: decode(found.value.as_bytes()), at: found.mod_revision })
    }

    async fn list(&self, prefix: String) -> Done<Vec<Kv>> {
        Ok(self.store.list(Range::Prefix(prefix.into())).await.map_err(broken)?.kvs)
    }

    /// Writes a key if its mod revision is still `at`; otherwise fails with a conflict. Returns the store's revision
    /// after the write.
    async fn write<T: Serialize>(&self, key: &str, value: &T, at: Revision) -> Done<Revision> {
        let text = serde_json::to_vec(value).unwrap();
        match self.store.update_if(key, text, at).await.map_err(broken)? {
            ConditionalOutcome::Done(revision) => Ok(revision),
            ConditionalOutcome::Found(None) => Err(Refusal::Missing),
            ConditionalOutcome::Found(Some(_)) => Err(Refusal::Conflict),
        }
    }

    async fn remove(&self, key: &str, at: Revision) -> Done {
        match self.store.delete_if(key, at).await.map_err(broken)? {
            ConditionalOutcome::Done(_) => Ok(()),
            ConditionalOutcome::Found(None) => Err(Refusal::Missing),
            ConditionalOutcome::Found(Some(_)) => Err(Refusal::Conflict),
        }
    }

    async fn block(&self, cidr: &str) -> Done<Read<Block>> {
        self.get(block_key(cidr), json).await
    }

    async fn affinity(&self, host: &str, cidr: &str) -> Done<Read<Affinity>> {
        self.get(affinity_key(host, cidr), affinity_of).await
    }

    async fn set_affinity(&self, read: &mut Read<Affinity>, state: &str) -> Done {
        read.value.state = state.to_owned();
        read.at = self.write(&read.key, &read.value, read.at).await?;
        Ok(())
    }

    /// Writes a block and increases its sequence number.
    async fn update(&self, read: &mut Read<Block>) -> Done {
        read.value.sequence_number += 1;
        read.at = self.write(&read.key, &read.value, read.at).await?;
        Ok(())
    }

    /// Assigns addresses from the host's own blocks, then from newly claimed blocks, and then from the blocks of other
    /// hosts.
    pub(crate) async fn auto_assign(&self, handle: &str, count: usize) -> Done<Vec<IpAddr>> {
        let mut assigned = Vec::new();
        let affine = self.list(format!("{HOSTS}{}/ipv4/block/", self.host)).await?;
        for kv in affine {
            if assigned.len() == count {
                return Ok(assigned);
            }
            let Ok(block) = self.own_block(&cidr_of(&kv.key.to_string())).await else { continue };
            if block.value.unallocated.is_empty() {
                continue;
            }
            assigned.extend(self.assign_from(block, handle, count - assigned.len()).await.unwrap_or_default());
        }
        for _ in 0..RETRIES {
            if assigned.len() == count {
                return Ok(assigned);
            }
            let cidr = match self.find_block().await {
                Ok(cidr) => cidr,
                Err(Refusal::Full) => break,
                Err(_) => continue,
            };
            let Ok(block) = self.claim(&cidr).await else { continue };
            assigned.extend(self.assign_from(block, handle, count - assigned.len()).await.unwrap_or_default());
        }
        for cidr in &self.pool.blocks {
            if assigned.len() == count {
                return Ok(assigned);
            }
            let Ok(block) = self.block(cidr).await else { continue };
            if !block.value.unallocated.is_empty() {
                assigned.extend(self.assign_from(block, handle, count - assigned.len()).await.unwrap_or_default());
            }
        }
        if assigned.is_empty() { Err(Refusal::Full) } else { Ok(assigned) }
    }

    /// Returns the block to which one of the host's affinities refers; creates a missing block, and confirms an
    /// unconfirmed affinity.
    async fn own_block(&self, cidr: &str) -> Done<Read<Block>> {
        let mut affinity = self.affinity(&self.host, cidr).await?;
        match self.block(cidr).await {
            Err(Refusal::Missing) => self.make(&mut affinity, cidr).await,
            Err(other) => Err(other),
            Ok(block) if !block.value.is_of(&self.host) => {
                let _gone = self.remove(&affinity.key, affinity.at).await;
                Err(Refusal::Claimed)
            }
            Ok(mut block) => {
                if !affinity.value.is_confirmed() {
                    self.set_affinity(&mut affinity, "pending").await?;
                    self.update(&mut block).await?;
                    self.confirm(&mut affinity).await?;
                }
                Ok(block)
            }
        }
    }

    /// Finds the CIDR of a block that this host can claim. If every block of the pool is claimed, takes an empty block
    /// with an old claim time from another host.
    async fn find_block(&self) -> Done<String> {
        let listed = self.list(BLOCKS.to_owned()).await?;
        let stored: Vec<Block> = listed.iter().map(|kv| json(kv.value.as_bytes())).collect();
        let mut empty = Vec::new();
        for cidr in &self.pool.blocks {
            match stored.iter().find(|block| block.cidr == *cidr) {
                None => return Ok(cidr.clone()),
                Some(block) if block.is_of(&self.host) && !block.unallocated.is_empty() => return Ok(cidr.clone()),
                Some(block) if block.is_empty() => empty.push(block),
                Some(_) => {}
            }
        }
        for block in empty.into_iter().filter(|block| block.affinity_claim_time.as_deref() == Some(LONG_AGO)) {
            let Some(owner) = block.affinity.as_deref().and_then(|owner| owner.strip_prefix("host:")) else { continue };
            let same = |now: &Block| now.is_empty() && now.sequence_number == block.sequence_number;
            if self.release_affinity_if(owner, &block.cidr, same).await.is_ok() {
                return Ok(block.cidr.clone());
            }
        }
        Err(Refusal::Full)
    }

    /// Assigns addresses of the block `block`, which was just read. The number of addresses is first added to the
    /// handle's count; then the block is written.
    async fn assign_from(&self, mut block: Read<Block>, handle: &str, count: usize) -> Done<Vec<IpAddr>> {
        let mut recorded = BTreeMap::from([("node".to_owned(), self.host.clone())]);
        if let Some(pod) = &self.pod {
            recorded.extend([("pod".to_owned(), pod.clone()), ("namespace".to_owned(), "default".to_owned())]);
        }
        let holder = Attribute { handle_id: Some(handle.to_owned()), secondary: Some(recorded), released_at: None };
        for _ in 0..RETRIES {
            let assigned = block.value.assign(count, &holder);
            if assigned.is_empty() {
                return Ok(assigned);
            }
            let cidr = block.value.cidr.clone();
            // Calico's client adds the number of requested addresses to the handle's count, even if the block has fewer
            // free addresses.
            self.increment(handle, &cidr, count).await?;
            match self.update(&mut block).await {
                Ok(()) => return Ok(assigned),
                Err(refusal) => {
                    self.decrement(handle, &cidr, count).await;
                    if refusal != Refusal::Conflict {
                        return Err(refusal);
                    }
                    block = self.block(&cidr).await?;
                }
            }
        }
        Err(Refusal::Conflict)
    }

    async fn increment(&self, handle: &str, cidr: &str, by: usize) -> Done {
        for _ in 0..RETRIES {
            let mut read = match self.get(handle_key(handle), json::<Handle>).await {
                Err(Refusal::Missing) => {
                    Read { key: handle_key(handle), value: Handle::default(), at: Revision::UNSET }
                }
                read => read?,
            };
            *read.value.block.entry(cidr.to_owned()).or_default() += i64::try_from(by).unwrap();
            match self.write(&read.key, &read.value, read.at).await {
                Err(Refusal::Conflict | Refusal::Missing) => {}
                done => return done.map(drop),
            }
        }
        Err(Refusal::Conflict)
    }

    /// Subtracts a number from a handle's count of addresses in a block. As in Calico, a failure is ignored, and a
    /// count that would become negative is left unchanged.
    async fn decrement(&self, handle: &str, cidr: &str, by: usize) {
        for _ in 0..RETRIES {
            let Ok(mut read) = self.get(handle_key(handle), json::<Handle>).await else { return };
            let Some(count) = read.value.block.get_mut(cidr) else { return };
            *count -= i64::try_from(by).unwrap();
            match *count {
                ..0 => return,
                0 => drop(read.value.block.remove(cidr)),
                _ => {}
            }
            let done = if read.value.block.is_empty() {
                self.remove(&read.key, read.at).await
            } else {
                self.write(&read.key, &read.value, read.at).await.map(drop)
            };
            if done != Err(Refusal::Conflict) {
                return;
            }
        }
    }

    /// Releases all addresses that a handle holds.
    pub(crate) async fn release_by_handle(&self, handle: &str) -> Done<Vec<IpAddr>> {
        let named = self.get(handle_key(handle), json::<Handle>).await?;
        let mut released = Vec::new();
        for cidr in named.value.block.keys() {
            let gone = self.release_from(cidr, |_, holder| holder == handle).await?;
            if !gone.is_empty() {
                self.decrement(handle, cidr, gone.len()).await;
            }
            released.extend(gone.into_iter().map(|(ip, _)| ip));
        }
        Ok(released)
    }

    /// Releases one address, whichever handle the address belongs to.
    pub(crate) async fn release_ip(&self, ip: IpAddr, cidr: &str) -> Done<Vec<IpAddr>> {
        let gone = self.release_from(cidr, |held, _| held == ip).await?;
        for (_, handle) in &gone {
            self.decrement(handle, cidr, 1).await;
        }
        Ok(gone.into_iter().map(|(ip, _)| ip).collect())
    }

    /// Releases one address if its handle and sequence number are still the given ones. Returns true if the address was
    /// released.
    pub(crate) async fn release_leaked(&self, ip: IpAddr, cidr: &str, handle: &str, number: u64) -> Done<bool> {
        let is_it = |block: &Block| block.sequence_number_of(ip) == Some(number);
        let gone = self.release_from_if(cidr, is_it, |held, holder| held == ip && holder == handle).await?;
        for (_, handle) in &gone {
            self.decrement(handle, cidr, 1).await;
        }
        Ok(!gone.is_empty())
    }

    /// Releases the addresses of a block for which `test` returns true. Deletes the block if it has no owner and is
    /// empty after the release.
    async fn release_from(&self, cidr: &str, test: impl Fn(IpAddr, &str) -> bool) -> Done<Vec<(IpAddr, String)>> {
        self.release_from_if(cidr, |_| true, test).await
    }

    async fn release_from_if(
        &self,
        cidr: &str,
        expected: impl Fn(&Block) -> bool,
        test: impl Fn(IpAddr, &str) -> bool,
    ) -> Done<Vec<(IpAddr, String)>> {
        for _ in 0..RETRIES {
            let mut block = match self.block(cidr).await {
                Err(Refusal::Missing) => return Ok(Vec::new()),
                block => block?,
            };
            if !expected(&block.value) {
                return Ok(Vec::new());
            }
            let gone = block.value.release(&test);
            if gone.is_empty() {
                return Ok(gone);
            }
            let done = if block.value.is_empty() && block.value.affinity.is_none() {
                self.remove(&block.key, block.at).await
            } else {
                self.update(&mut block).await
            };
            match done {
                Ok(()) => return Ok(gone),
                Err(Refusal::Conflict | Refusal::Missing) => {}
                Err(other) => return Err(other),
            }
        }
        Err(Refusal::Conflict)
    }

    /// Makes this host the owner of a block.
    pub(crate) async fn claim_affinity(&self, cidr: &str) -> Done {
        self.claim(cidr).await.map(drop)
    }

    async fn claim(&self, cidr: &str) -> Done<Read<Block>> {
        let key = affinity_key(&self.host, cidr);
        let pending = Affinity { state: "pending".to_owned(), deleted: false };
        let mut affinity = match self.write(&key, &pending, Revision::UNSET).await {
            Ok(at) => Read { key, value: pending, at },
            Err(Refusal::Conflict) => {
                let mut there = self.affinity(&self.host, cidr).await?;
                if !there.value.is_confirmed() {
                    self.set_affinity(&mut there, "pending").await?;
                }
                there
            }
            Err(other) => return Err(other),
        };
        match self.block(cidr).await {
            Err(Refusal::Missing) => self.make(&mut affinity, cidr).await,
            Err(other) => Err(other),
            Ok(block) => self.take_or_leave(&mut affinity, block).await,
        }
    }

    /// Creates the block to which an affinity refers, unless the block exists.
    async fn make(&self, affinity: &mut Read<Affinity>, cidr: &str) -> Done<Read<Block>> {
        self.set_affinity(affinity, "pending").await?;
        // The first sequence number depends on the affinity's revision, so a recreated block never repeats the sequence
        // numbers of the deleted one.
        let number = u64::try_from(affinity.at.get()).unwrap() << 32;
        let value = Block::new(cidr, &self.host, self.pool.size, self.claimed, number);
        let key = block_key(cidr);
        match self.write(&key, &value, Revision::UNSET).await {
            Ok(at) => {
                self.confirm(affinity).await?;
                Ok(Read { key, value, at })
            }
            Err(Refusal::Conflict) => {
                let block = self.block(cidr).await?;
                self.take_or_leave(affinity, block).await
            }
            Err(other) => Err(other),
        }
    }

    /// Confirms the affinity if this host owns the existing block; otherwise deletes the affinity.
    async fn take_or_leave(&self, affinity: &mut Read<Affinity>, block: Read<Block>) -> Done<Read<Block>> {
        if block.value.is_of(&self.host) {
            self.confirm(affinity).await?;
            return Ok(block);
        }
        let _gone = self.remove(&affinity.key, affinity.at).await;
        Err(Refusal::Claimed)
    }

    async fn confirm(&self, affinity: &mut Read<Affinity>) -> Done {
        let Err(refusal) = self.set_affinity(affinity, "confirmed").await else { return Ok(()) };
        let now: Affinity = self.get(affinity.key.clone(), affinity_of).await?.value;
        if now.is_confirmed() { Ok(()) } else { Err(refusal) }
    }

    /// Releases this host's affinity to a block.
    pub(crate) async fn release_affinity(&self, cidr: &str) -> Done {
        self.release_affinity_if(&self.host, cidr, |_| true).await
    }

    /// Releases this host's affinity to a block if the block is empty.
    pub(crate) async fn release_empty(&self, cidr: &str) -> Done {
        self.release_affinity_if(&self.host, cidr, Block::is_empty).await
    }

    async fn release_affinity_if(&self, host: &str, cidr: &str, test: impl Fn(&Block) -> bool) -> Done {
        for _ in 0..RETRIES {
            let mut affinity = self.affinity(host, cidr).await?;
            let mut block = self.block(cidr).await?;
            if !block.value.is_of(host) {
                let _gone = self.remove(&affinity.key, affinity.at).await;
                return Err(Refusal::Claimed);
            }
            if !test(&block.value) {
                return Err(Refusal::NotEmpty);
            }
            match self.set_affinity(&mut affinity, "pendingDeletion").await {
                Ok(()) => {}
                Err(Refusal::Conflict | Refusal::Missing) => continue,
                Err(other) => return Err(other),
            }
            let done = if block.value.is_empty() {
                self.remove(&block.key, block.at).await
            } else {
                block.value.affinity = None;
                block.value.affinity_claim_time = None;
                self.update(&mut block).await
            };
            match done {
                Ok(()) | Err(Refusal::Missing) => {
                    let _gone = self.remove(&affinity.key, affinity.at).await;
                    return Ok(());
                }
                Err(Refusal::Conflict) => {}
                Err(other) => return Err(other),
            }
        }
        Err(Refusal::Conflict)
    }
}

fn json<T: DeserializeOwned>(value: &[u8]) -> T {
    serde_json::from_slice(value).unwrap()
}

fn broken(error: kv::Error) -> Refusal {
    Refusal::Store(error.to_string())
}
