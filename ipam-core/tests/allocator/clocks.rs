//! Tests clocks that jump by ten years at any moment: no address is lost, and none stays in cooldown or held for ever.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipam_core::Error;
use ipam_core::model::{IpamConfig, Owner};
use proptest::prelude::*;

use crate::world::World;

const TEN_YEARS: i64 = 3652 * 24 * 3600;
const COOLDOWN: u32 = 60;
/// Number of seconds after which all cooldowns are over and all empty blocks can be taken over, even after the clocks
/// have jumped. `TEST_TIMEOUT` is more than twice the cooldown, and more than twice the age at which an empty block can be
/// taken over.
const TEST_TIMEOUT: i64 = 121;
/// Number of addresses in the pool, which has four blocks.
const ADDRESSES: usize = 16;
const NODES: [&str; 3] = ["a", "b", "c"];

#[derive(Clone, Debug)]
enum Step {
    /// A node requests an address.
    Add(usize),
    /// A random holder releases its address.
    Del(usize),
    /// A node claims all free blocks of the pool.
    Claim(usize),
    /// The given number of seconds passes.
    Pass(i64),
    /// The test sets the clock ten years back, ten years ahead, or to the right time.
    Jump(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3_usize).prop_map(Step::Add),
        5 => (0..ADDRESSES).prop_map(Step::Del),
        1 => (0..3_usize).prop_map(Step::Claim),
        2 => (0..90_i64).prop_map(Step::Pass),
        4 => prop_oneof![Just(-TEN_YEARS), Just(0), Just(TEN_YEARS)].prop_map(Step::Jump),
    ]
}

/// A test world, and the holder that each address must have according to the allocator's answers so far.
struct Life {
    world: World,
    held: BTreeMap<String, (&'static str, IpAddr)>,
    next: usize,
    off: i64,
}

impl Life {
    async fn new(cooldown: u32) -> Self {
        let world = World::of_one_caller().await;
        world.add_pool("v4", "10.0.0.0/28").await;
        world.configure(IpamConfig::default().with_cooldown_seconds(cooldown)).await;
        Self { world, held: BTreeMap::new(), next: 0, off: 0 }
    }

    async fn add(&mut self, node: usize) -> bool {
        self.next += 1;
        let (node, container) = (NODES[node], format!("c{}", self.next));
        match self.world.one(node, &container).await {
            Ok(ip) => {
                assert!(self.held.values().all(|(_, held)| *held != ip), "{ip} was assigned twice");
                self.held.insert(container, (node, ip));
                true
            }
            Err(Error::Exhausted { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    async fn del(&mut self, which: usize) {
        let Some(container) = self.held.keys().nth(which % self.held.len().max(1)).cloned() else { return };
        let (node, ip) = self.held.remove(&container).unwrap();
        assert_eq!(self.world.release(node, &container).await, [ip]);
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Add(node) => drop(self.add(*node).await),
            Step::Del(which) => self.del(*which).await,
            Step::Claim(node) => {
                let pool = "10.0.0.0/28".parse().unwrap();
                self.world.ipam.claim_affinity(&Owner::host(NODES[*node]), pool, crate::world::soon()).await.unwrap();
            }
            Step::Pass(seconds) => self.world.pass(*seconds),
            Step::Jump(off) => {
                self.world.pass(off - self.off);
                self.off = *off;
            }
        }
        self.world.check().await;
        for (container, (node, ip)) in &self.held {
            assert_eq!(self.world.one(node, container).await.unwrap(), *ip, "{container} asks again");
        }
    }
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// In this test, a host whose clock was ten years ahead has claimed all blocks of the pool and never returns.
#[tokio::test]
async fn clock_far_ahead_leaves_empty_block_to_others() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    world.configure(IpamConfig::default().with_strict_affinity(true)).await;
    world.pass(TEN_YEARS);
    world.one("a", "c1").await.unwrap();
    world.release("a", "c1").await;
    world.pass(-TEN_YEARS);
    world.one("b", "c2").await.unwrap();
    world.check().await;
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 500, ..ProptestConfig::with_cases(96) })]

    #[test]
    fn clock_jumps_lose_and_keep_nothing(
        cooldown in prop_oneof![Just(0), Just(COOLDOWN)],
        strict in any::<bool>(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        block_on(async {
            let mut life = Life::new(cooldown).await;
            let config = IpamConfig::default().with_cooldown_seconds(cooldown);
            life.world.configure(config.with_strict_affinity(strict)).await;
            for step in &steps {
                life.step(step).await;
            }
            // Even if the test has set the clock wrong, one node can get all addresses `TEST_TIMEOUT` seconds after
            // their release.
            while !life.held.is_empty() {
                life.del(0).await;
            }
            let node = steps.len() % NODES.len();
            let mut free = 0;
            for _ in 0..3 {
                while life.add(node).await {
                    free += 1;
                }
                life.world.pass(TEST_TIMEOUT);
            }
            assert_eq!(free, ADDRESSES, "some of them are stuck");
            life.world.check().await;
        });
    }
}
