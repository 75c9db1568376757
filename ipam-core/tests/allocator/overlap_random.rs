//! Runs random sequences of calls that create blocks. The random calls recreate pools with every possible block size,
//! and a foreign writer writes blocks without checking other keys. No call of Margay creates an overlapping block or
//! assigns an address that lies in two blocks.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fastrand::Rng;
use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Affinity, AffinityState, Block, Document, NewPool, Owner, Pool};
use ipam_core::net::nth;
use ipnet::IpNet;
use kv::{Key, Range, StoreExt};
use time::OffsetDateTime;

use crate::world::{World, attachment, soon};

const SEEDS: u64 = 24;
const STEPS: usize = 80;
const NODES: [&str; 3] = ["a", "b", "c"];

/// The blocks in the store, and the assigned addresses of each block.
#[derive(Default)]
struct State {
    blocks: BTreeSet<IpNet>,
    assigned: BTreeSet<(IpAddr, IpNet)>,
}

impl State {
    async fn of(world: &World) -> Self {
        let mut state = Self::default();
        for kv in world.store.list(Range::Prefix(keys::blocks_prefix(None))).await.unwrap().kvs {
            let block = Block::decode(&kv.key, kv.value.as_bytes()).unwrap();
            state.blocks.insert(block.cidr());
            state.assigned.extend(block.allocated().map(|(ip, _)| (ip, block.cidr())));
        }
        state
    }

    fn overlapping(&self, block: IpNet) -> Option<IpNet> {
        let mut others = self.blocks.iter().copied();
        others.find(|other| *other != block && (other.contains(&block) || block.contains(other)))
    }
}

struct Run {
    world: World,
    rng: Rng,
    pool: IpNet,
    /// True if another program creates blocks in addition to the allocator.
    with_others: bool,
    containers: Vec<(&'static str, String)>,
}

impl Run {
    async fn new(seed: u64) -> Self {
        let world = World::of_one_caller().await;
        let pool = if seed.is_multiple_of(2) { "100.64.16.0/20" } else { "fd00:1::/116" };
        let with_others = seed % 4 >= 2;
        Self { world, rng: Rng::with_seed(seed), pool: pool.parse().unwrap(), with_others, containers: Vec::new() }
    }

    fn node(&mut self) -> &'static str {
        NODES[self.rng.usize(..NODES.len())]
    }

    /// Returns a random block size for the pool.
    fn size(&mut self) -> u8 {
        self.pool.prefix_len() + self.rng.u8(..=12)
    }

    /// Returns a random network inside the pool, in half of the cases inside the pool's first 256 addresses.
    fn net(&mut self) -> IpNet {
        let most = if self.rng.bool() { 256 } else { 4096 };
        let first = nth(self.pool, self.rng.u128(..most)).unwrap();
        IpNet::new(first, self.size()).unwrap().trunc()
    }

    fn new_pool(&mut self) -> NewPool {
        NewPool::new("p", self.pool).with_block_size(self.size())
    }

    async fn foreign_affinity(&mut self, cidr: IpNet) {
        let states = [AffinityState::Confirmed, AffinityState::Pending, AffinityState::PendingDeletion];
        let (node, state) = (self.node(), states[self.rng.usize(..states.len())]);
        self.world.put(keys::affinity(&Owner::host(node), cidr).unwrap(), &Affinity::new(state)).await;
    }

    async fn foreign_block(&mut self, cidr: IpNet) {
        let node = Owner::host(self.node());
        if self.world.store.get(keys::block(cidr)).await.unwrap().is_none() {
            let block = Block::new(cidr, Some(&node), OffsetDateTime::UNIX_EPOCH, None).unwrap();
            self.world.put(keys::block(cidr), &block).await;
        }
    }

    /// Deletes an empty block but not its affinities, as another program may do.
    async fn foreign_deletion(&mut self) {
        let state = State::of(&self.world).await;
        let is_empty = |block: &&IpNet| !state.assigned.iter().any(|(_, of)| of == *block);
        if let Some(block) = state.blocks.iter().find(is_empty) {
            self.world.store.delete(Range::Key(keys::block(*block))).await.unwrap();
        }
    }

    async fn write_pool(&mut self) {
        let pool = Pool::new(&self.new_pool(), "uid", OffsetDateTime::UNIX_EPOCH).unwrap();
        self.world.put(keys::resource(ResourceKind::IpPool, "p"), &pool).await;
    }

    /// Runs one random step, and returns true if the step was a call of Margay's allocator.
    async fn step(&mut self, number: usize) -> bool {
        let container = format!("c{number}");
        let (node, cidr) = (self.node(), self.net());
        match self.rng.u32(..14) {
            0..4 => {
                let wanted = if self.pool.addr().is_ipv4() {
                    RequestedAddresses::any(1, 0)
                } else {
                    RequestedAddresses::any(0, 1)
                };
                drop(self.world.assign(&AssignRequest::new(attachment(node, &container), wanted)).await);
                self.containers.push((node, container));
            }
            4 => {
                let wanted = RequestedAddresses::these(vec![cidr.network()]);
                drop(self.world.assign(&AssignRequest::new(attachment(node, &container), wanted)).await);
                self.containers.push((node, container));
            }
            5 if !self.containers.is_empty() => {
                let (node, container) = self.containers.swap_remove(self.rng.usize(..self.containers.len()));
                self.world.release(node, &container).await;
            }
            6 => drop(self.world.ipam.claim_affinity(&Owner::host(node), cidr, soon()).await),
            7 => {
                let owner = Owner::host(node);
                drop(self.world.ipam.release_all_affinities(&owner, ReleaseIf::Any, soon()).await);
            }
            8 => {
                let key: Key = keys::resource(ResourceKind::IpPool, "p");
                self.world.store.delete(Range::Key(key)).await.unwrap();
                let new = self.new_pool();
                drop(self.world.ipam.create_pool(&new, None, soon()).await);
            }
            9 => {
                self.write_pool().await;
                return false;
            }
            10 | 11 => {
                self.foreign_affinity(cidr).await;
                return false;
            }
            12 if self.with_others => {
                self.foreign_block(cidr).await;
                return false;
            }
            _ => {
                self.foreign_deletion().await;
                return false;
            }
        }
        true
    }
}

#[tokio::test]
async fn overlap_never_comes_from_random_sequences() {
    let (mut made, mut assigned, mut refused) = (0, 0, 0);
    for seed in 0..SEEDS {
        let mut run = Run::new(seed).await;
        run.write_pool().await;
        let mut before = State::of(&run.world).await;
        for number in 0..STEPS {
            let is_ours = run.step(number).await;
            let after = State::of(&run.world).await;
            if is_ours {
                for block in after.blocks.difference(&before.blocks) {
                    made += 1;
                    assert_eq!(after.overlapping(*block), None, "seed {seed}, step {number}: block {block} was made");
                }
                for (ip, block) in after.assigned.difference(&before.assigned) {
                    assigned += 1;
                    let other = after.overlapping(*block);
                    assert_eq!(other, None, "seed {seed}, step {number}: {ip} of {block} was assigned");
                }
                refused += usize::from(after.blocks.iter().any(|block| after.overlapping(*block).is_some()));
            }
            before = after;
        }
    }
    // The test proves something only if many of its random steps create blocks, many assign addresses, and many are
    // refused.
    assert!(made > 100 && assigned > 200 && refused > 50, "{made} {assigned} {refused}");
}
