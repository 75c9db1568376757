//! Runs one worker of a torture run. The worker adds and deletes containers like the container runtime of a node, and
//! moves blocks between nodes like an operator.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{AssignRequest, AssignedAddress, BlockRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, NewPool, Owner, OwnerChange, OwnerUpdate, Pool};
use ipam_core::net::Family;
use ipam_core::{Error, Ipam};
use ipnet::{IpNet, Ipv4Net};
use kv::{Compare, Op, Range, Store, StoreExt, Txn};
use time::OffsetDateTime;

use crate::Failure;
use crate::checker::CALICO_WAS_HERE;
use crate::ledger::Witness;
use crate::scene::{Access, MAX_CALL, POOL_V4, POOL_V6, deadline};

/// Maximum number of containers that one worker has at a time. Together, all workers request more addresses than the
/// pools contain.
const MOST_CONTAINERS: usize = 12;
/// Maximum number of attempts to delete a container; a container runtime, too, repeats a failed DEL.
const DEL_ATTEMPTS: u32 = 200;
/// Maximum number of attempts to write a pool, which fail while the server is down.
const POOL_ATTEMPTS: u32 = 1_000;
/// The pause before a failed call is repeated.
const DEL_PAUSE: Duration = Duration::from_millis(10);

/// How a worker's calls may be interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deaths {
    /// The worker drops the futures of some calls before they are complete.
    Dropped,
    /// The worker never cancels its own calls, because the program `torture` kills the worker's whole process.
    FromOutside,
}

pub(crate) struct Worker<W> {
    pub(crate) access: Access,
    pub(crate) witness: Arc<W>,
    pub(crate) node: String,
    /// The prefix of the names of the worker's containers.
    pub(crate) name: String,
    pub(crate) rng: Rng,
    pub(crate) deaths: Deaths,
    containers: Vec<(String, Vec<IpAddr>)>,
    next: u64,
}

pub(crate) fn attachment(node: &str, container: &str) -> Attachment {
    Attachment {
        network: "net".into(),
        container: container.into(),
        interface: "eth0".into(),
        node: node.into(),
        boot: Some("boot0001".into()),
    }
}

impl<W: Witness> Worker<W> {
    pub(crate) fn new(access: Access, witness: Arc<W>, node: String, name: String, seed: u64, deaths: Deaths) -> Self {
        let rng = Rng::with_seed(seed);
        Self { access, witness, node, name, rng, deaths, containers: Vec::new(), next: 0 }
    }

    pub(crate) async fn step(&mut self) -> Result<(), Failure> {
        let session = self.access.begin().await?;
        if session.is_served {
            self.witness.counted("operation through the daemon");
        }
        let done = self.act(&session.ipam).await;
        session.end().await?;
        self.witness.counted("operation");
        done
    }

    pub(crate) async fn end(&mut self) -> Result<(), Failure> {
        while let Some((container, _)) = self.containers.pop() {
            let session = self.access.begin().await?;
            self.delete(&session.ipam, &container).await?;
            session.end().await?;
            self.witness.counted("operation");
        }
        Ok(())
    }

    async fn act(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        match self.rng.u32(..100) {
            0..47 if self.containers.len() < MOST_CONTAINERS => self.add(ipam).await,
            47..87 if !self.containers.is_empty() => {
                let (container, _) = self.containers.swap_remove(self.rng.usize(..self.containers.len()));
                self.delete(ipam, &container).await
            }
            87..89 if !self.containers.is_empty() => self.repeat(ipam).await,
            89 if !self.containers.is_empty() => self.hand_over(ipam).await,
            90..93 => self.claim(ipam).await,
            93 => self.ensure(ipam).await,
            94..97 => self.give_back(ipam).await,
            97 => self.give_pool_back(ipam).await,
            98 => self.give_all_back(ipam).await,
            99 if self.rng.u32(..4) == 0 => self.remove(ipam).await,
            99 if self.rng.u32(..3) == 0 => self.remake_pool(ipam).await,
            _ if self.containers.len() < MOST_CONTAINERS => self.add(ipam).await,
            _ => {
                let (container, _) = self.containers.swap_remove(self.rng.usize(..self.containers.len()));
                self.delete(ipam, &container).await
            }
        }
    }

    /// Awaits a call, or drops its future before it is complete and returns `None`. Checks that the call ends within
    /// its time limit.
    async fn or_die<T>(&mut self, call: impl Future<Output = T>) -> Option<T> {
        let begun = Instant::now();
        let done = self.or_drop(call).await;
        let duration = begun.elapsed();
        self.witness.took(duration);
        if duration > MAX_CALL {
            self.witness.failed(format!("a call on {} took {} ms", self.node, duration.as_millis()));
        }
        done
    }

    async fn or_drop<T>(&mut self, call: impl Future<Output = T>) -> Option<T> {
        if self.deaths == Deaths::FromOutside || self.rng.u32(..25) > 0 {
            return Some(call.await);
        }
        // A call is dropped after a random delay, whose upper limit is a random power of two: some calls are dropped
        // before the store's first response, others much later.
        let scale = self.rng.u32(4..15);
        let life = Duration::from_micros(self.rng.u64(..1 << scale));
        let done = tokio::time::timeout(life, call).await.ok();
        if done.is_none() {
            self.witness.counted("death");
        }
        done
    }

    fn wanted(&mut self) -> RequestedAddresses {
        match self.rng.u32(..10) {
            0 => RequestedAddresses::these([IpAddr::from(Ipv4Addr::new(10, 0, 0, self.rng.u8(..64)))]),
            1 => RequestedAddresses::any(self.rng.usize(1..4), 0),
            2 | 3 => RequestedAddresses::any(0, 1),
            4 | 5 => RequestedAddresses::any(1, 1),
            _ => RequestedAddresses::any(1, 0),
        }
    }

    async fn add(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        self.next += 1;
        let container = format!("{}x{}", self.name, self.next);
        let request = AssignRequest::new(attachment(&self.node, &container), self.wanted());
        self.witness.adding(&container, &self.node);
        let answer = self.or_die(ipam.assign(&request, deadline())).await;
        match answer {
            Some(Ok(assigned)) => {
                self.witness.added(&container, &addresses(&assigned), self.access.newest());
                self.witness.counted("ADD");
                self.containers.push((container, addresses(&assigned)));
                return Ok(());
            }
            Some(Err(error)) => self.judge("ADD", &error)?,
            None => {}
        }
        // A container runtime sends a DEL even after a failed ADD.
        self.delete(ipam, &container).await
    }

    /// Repeats the ADD of a container that already has addresses, and checks that it returns the same addresses.
    async fn repeat(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let (container, has) = self.containers[self.rng.usize(..self.containers.len())].clone();
        let count = |v4: bool| has.iter().filter(|ip| ip.is_ipv4() == v4).count();
        let request =
            AssignRequest::new(attachment(&self.node, &container), RequestedAddresses::any(count(true), count(false)));
        match ipam.assign(&request, deadline()).await {
            Ok(assigned) => {
                let mut again = addresses(&assigned);
                let mut before = has;
                again.sort_unstable();
                before.sort_unstable();
                if again != before {
                    return Err(Failure(format!(
                        "{container} has {before:?}, and was told {again:?} when it asked again"
                    )));
                }
                self.witness.counted("ADD repeated");
                Ok(())
            }
            Err(error) => self.judge("ADD repeated", &error),
        }
    }

    /// Deletes a container, and repeats a failed DEL until it succeeds.
    async fn delete(&mut self, ipam: &Ipam, container: &str) -> Result<(), Failure> {
        self.witness.deleting(container, self.access.newest());
        let attachment = attachment(&self.node, container);
        for _ in 0..DEL_ATTEMPTS {
            match self.or_die(ipam.release_attachment(&attachment, &[], deadline())).await {
                Some(Ok(_)) => {
                    self.witness.deleted(container, self.access.newest());
                    self.witness.counted("DEL");
                    return Ok(());
                }
                Some(Err(error)) => {
                    self.judge("DEL", &error)?;
                    // After the daemon was killed, connections fail until it is restarted.
                    tokio::time::sleep(DEL_PAUSE).await;
                }
                None => {}
            }
        }
        Err(Failure(format!("DEL of {container} failed {DEL_ATTEMPTS} times")))
    }

    /// Returns a random part of the IPv4 pool or, in one call of five, the whole IPv6 pool.
    fn part(&mut self) -> Result<IpNet, Failure> {
        if self.rng.u32(..5) == 0 {
            return POOL_V6.parse().map_err(|_| Failure("the pool is no network".into()));
        }
        let net = Ipv4Net::new(Ipv4Addr::new(10, 0, 0, self.rng.u8(..64)), self.rng.u8(26..=29));
        Ok(IpNet::V4(net.map_err(|error| Failure(error.to_string()))?.trunc()))
    }

    async fn claim(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let (cidr, node) = (self.part()?, Owner::host(&self.node));
        match self.or_die(ipam.claim_affinity(&node, cidr, deadline())).await {
            Some(Ok(_)) => self.witness.counted("affinity claim"),
            Some(Err(error)) => self.judge("affinity claim", &error)?,
            None => {}
        }
        Ok(())
    }

    fn which(&mut self) -> ReleaseIf {
        // Releasing the affinity of a block whose addresses are in use leaves the block without an owner until it is
        // empty. Most calls release only affinities to empty blocks, so that the blocks of small pools do not stay
        // without owners for long.
        if self.rng.u32(..4) > 0 { ReleaseIf::Empty } else { ReleaseIf::Any }
    }

    async fn give_back(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let (cidr, which, node) = (self.part()?, self.which(), Owner::host(&self.node));
        match self.or_die(ipam.release_affinity(&node, cidr, which, deadline())).await {
            Some(Ok(_)) => self.witness.counted("affinity release"),
            Some(Err(error)) => self.judge("affinity release", &error)?,
            None => {}
        }
        Ok(())
    }

    async fn give_all_back(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let (which, node) = (self.which(), Owner::host(&self.node));
        match self.or_die(ipam.release_all_affinities(&node, which, deadline())).await {
            Some(Ok(_)) => self.witness.counted("affinity release of a node"),
            Some(Err(error)) => self.judge("affinity release of a node", &error)?,
            None => {}
        }
        Ok(())
    }

    /// Records the next owner of an address, as happens at the start of a live migration.
    async fn hand_over(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let (container, has) = self.containers[self.rng.usize(..self.containers.len())].clone();
        let Some(ip) = has.first() else { return Ok(()) };
        let handle = attachment(&self.node, &container).handle();
        let name = format!("p{}", self.rng.u8(..3));
        let change = OwnerChange::to([("pod".to_owned(), name)].into());
        let update = OwnerUpdate { active: None, alternate: Some(change) };
        match self.or_die(ipam.set_owner_attributes(*ip, &handle, &update, deadline())).await {
            Some(Ok(())) => self.witness.counted("owner changed"),
            Some(Err(error)) => self.judge("owner change", &error)?,
            None => {}
        }
        Ok(())
    }

    async fn ensure(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let families = [&[Family::V4][..], &[Family::V6], &[Family::V4, Family::V6]];
        let request = BlockRequest::new(Owner::host(&self.node), families[self.rng.usize(..families.len())]);
        match self.or_die(ipam.ensure_blocks(&request, deadline())).await {
            Some(Ok(_)) => self.witness.counted("block ensured"),
            // No block can be claimed if the nodes own all blocks of the pools.
            Some(Err(Error::NoNewBlocks)) => self.witness.counted("refusal: no block left"),
            Some(Err(error)) => self.judge("block ensured", &error)?,
            None => {}
        }
        Ok(())
    }

    /// Releases all affinities to the blocks in a part of a pool.
    async fn give_pool_back(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let (cidr, which) = (self.part()?, self.which());
        match self.or_die(ipam.release_pool_affinities(cidr, which, deadline())).await {
            Some(Ok(_)) => self.witness.counted("affinity release of a pool"),
            Some(Err(error)) => self.judge("affinity release of a pool", &error)?,
            None => {}
        }
        Ok(())
    }

    async fn remove(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let owner = Owner::host(&self.node);
        match self.or_die(ipam.remove_owner(&owner, deadline())).await {
            Some(Ok(_)) => self.witness.counted("node removed"),
            Some(Err(error)) => self.judge("node removed", &error)?,
            None => {}
        }
        Ok(())
    }

    /// Deletes the IPv4 pool and creates it again with another block size, as Calico would do. As Calico does, the
    /// worker deletes empty blocks one key at a time, and leaves their affinities.
    async fn remake_pool(&mut self, ipam: &Ipam) -> Result<(), Failure> {
        let size = self.rng.u8(28..=30);
        // Deletes the pool only if this process is never killed: if it were killed between deleting and recreating the
        // pool, every later ADD would fail.
        if self.deaths == Deaths::Dropped
            && let Err(error) = ipam.store().delete(Range::Key(keys::resource(ResourceKind::IpPool, "v4"))).await
        {
            self.judge("pool deleted", &error.into())?;
        }
        let mut done = remake_pool(ipam.store(), size).await;
        for _ in 0..POOL_ATTEMPTS {
            let Err(error) = done else { break };
            self.judge("pool made again", &error.into())?;
            tokio::time::sleep(DEL_PAUSE).await;
            done = remake_pool(ipam.store(), size).await;
        }
        done.map_err(|error| Failure(format!("the pool could not be made again: {error}")))?;
        self.witness.counted("pool made again");
        Ok(())
    }

    /// Counts an error that is expected in a torture run; fails on any other error.
    fn judge(&self, verb: &str, error: &Error) -> Result<(), Failure> {
        match error {
            Error::Exhausted { .. } | Error::BlockLimit | Error::AlreadyAssigned(_) => {
                self.witness.counted("refusal: nothing free, or the address in use");
            }
            Error::Overlap(_) => self.witness.counted("refusal: a block of another size is there"),
            Error::Pool(_) | Error::OutsidePools(_) | Error::SmallerThanBlock(_) => {
                self.witness.counted("refusal: no such pool, or other blocks");
            }
            Error::Store(error) => match error.kind() {
                kv::ErrorKind::Conflict { .. } => self.witness.counted("failure: conflicts at every attempt"),
                kind if kind.is_transient() || error.outcome() == kv::Outcome::Unknown => {
                    self.witness.counted("failure: the store");
                }
                _ => return Err(Failure(format!("{verb} on {}: {error}", self.node))),
            },
            error => return Err(Failure(format!("{verb} on {}: {error}", self.node))),
        }
        Ok(())
    }
}

/// Deletes empty IPv4 blocks, but not their affinities, and writes the pool with another block size.
async fn remake_pool(store: &Arc<dyn Store>, block_size: u8) -> kv::Result<()> {
    for kv in store.list(Range::Prefix(keys::blocks_of_addresses_prefix(Family::V4))).await?.kvs {
        let is_empty = Block::decode(&kv.key, kv.value.as_bytes()).is_ok_and(|block| block.is_empty());
        if is_empty {
            let unchanged = Compare::unchanged(kv.key.clone(), kv.mod_revision);
            let writes = [Op::delete(kv.key), Op::put(CALICO_WAS_HERE, "")];
            store.txn(Txn::new().with_compares([unchanged]).with_success(writes)).await?;
        }
    }
    let Ok(cidr) = POOL_V4.parse() else { return Ok(()) };
    let pool = Pool::new(&NewPool::new("v4", cidr).with_block_size(block_size), "uid", OffsetDateTime::UNIX_EPOCH);
    if let Some(pool) = pool.ok().and_then(|pool| pool.encode().ok()) {
        store.put(keys::resource(ResourceKind::IpPool, "v4"), pool).await?;
    }
    Ok(())
}

fn addresses(assigned: &[AssignedAddress]) -> Vec<IpAddr> {
    assigned.iter().map(|one| one.ip).collect()
}
