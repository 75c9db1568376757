//! Tests assignments for several attachments in one commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use async_trait::async_trait;
use ipam_core::assign::{AssignRequest, AssignedAddress, Bridge, Gateway, PoolDefinition, RequestedAddresses};
use ipam_core::model::{IpamConfig, NewPool};
use ipam_core::{Error, Nodes};
use kv::{Kv, RangeRequest, RangeResponse, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};
use serde_json::Value;

use crate::hints::counted;
use crate::intents::{Notes, allocator};
use crate::world::{World, attachment, ip, soon};

fn request(container: &str, wanted: RequestedAddresses) -> AssignRequest {
    AssignRequest::new(attachment("a", container), wanted)
}

/// Makes one request per container, each for one IPv4 address.
fn requests(containers: &[&str]) -> Vec<AssignRequest> {
    containers.iter().map(|container| request(container, RequestedAddresses::any(1, 0))).collect()
}

async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    world.add_pool("v6", "fd00::/120").await;
    world
}

async fn revision(world: &World) -> i64 {
    world.store.range(RangeRequest::new(kv::Range::All).with_limit(1)).await.unwrap().revision.get()
}

/// Returns the stored documents without the blocks' sequence numbers, which depend on the number of commits.
fn documents(kvs: &[Kv]) -> Vec<(String, Value)> {
    let document = |kv: &Kv| {
        let text = std::str::from_utf8(kv.value.as_bytes()).unwrap();
        // The pinned node name in the store is plain text, not JSON.
        let mut value: Value = serde_json::from_str(text).unwrap_or_else(|_| text.into());
        if let Some(fields) = value.as_object_mut() {
            fields.remove("sequenceNumber");
            fields.remove("sequenceNumberForAllocation");
        }
        (kv.key.to_string(), value)
    };
    kvs.iter().map(document).collect()
}

/// Runs the requests one by one in one test world, and as one batch in a second world. Asserts that both test worlds
/// have equal answers and documents, and that the batch assignment took only one commit.
async fn the_same(requests: &[AssignRequest], prepare: impl AsyncFn(&World)) -> Vec<Vec<AssignedAddress>> {
    let worlds = [world().await, world().await];
    for one in &worlds {
        prepare(one).await;
    }
    the_same_in(worlds, requests).await
}

async fn the_same_in([alone, together]: [World; 2], requests: &[AssignRequest]) -> Vec<Vec<AssignedAddress>> {
    let mut answers = Vec::new();
    let before = revision(&alone).await;
    for request in requests {
        answers.push(alone.assign(request).await.unwrap());
    }
    assert_eq!(revision(&together).await, before);
    assert_eq!(together.ipam.assign_together(requests, soon()).await.unwrap(), answers);
    assert_eq!(revision(&together).await, before + 1);
    assert_eq!(documents(&alone.dump().await), documents(&together.dump().await));
    together.check().await;
    answers
}

#[tokio::test]
async fn together_gives_what_each_gets_alone() {
    // The requests ask for many more than the four addresses of a block, some in one family and some in both.
    let wanted = [
        RequestedAddresses::any(1, 0),
        RequestedAddresses::any(1, 1),
        RequestedAddresses::any(0, 1),
        RequestedAddresses::any(2, 3),
    ];
    let names: Vec<String> = (0..32).map(|number| format!("c{number:02}")).collect();
    let mut requests: Vec<_> =
        names.iter().zip(wanted.iter().cycle()).map(|(name, wanted)| request(name, wanted.clone())).collect();
    for request in &mut requests {
        request.attributes = [("pod", &request.attachment.container)].map(|(k, v)| (k.to_owned(), v.clone())).into();
    }
    let answers = the_same(&requests, async |_| ()).await;
    assert_eq!(answers.iter().map(Vec::len).sum::<usize>(), 8 * (1 + 2 + 1 + 5));
    // If the node has a block with free addresses, a batch assignment uses this block first.
    let answers = the_same(&requests[..5], async |world| {
        world.one("a", "before").await.unwrap();
    })
    .await;
    assert_eq!(answers[0][0].block, answers[1][0].block);
}

#[tokio::test]
async fn together_interfaces_of_container_share_handle() {
    let mut requests = requests(&["c1", "c1", "c2"]);
    requests[1].attachment.interface = "eth1".to_owned();
    let answers = the_same(&requests, async |_| ()).await;
    assert_ne!(answers[0], answers[1]);
}

#[tokio::test]
async fn together_prepares_bridged_network_once() {
    let mut requests = requests(&["c1", "c2", "c3", "c4", "c5"]);
    for request in &mut requests {
        request.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::Recorded });
    }
    let answers = the_same(&requests, async |_| ()).await;
    assert!(answers.iter().all(|answer| answer[0].gateway == Some(ip("10.0.0.1"))), "{answers:?}");
}

/// Two test worlds with empty stores and without a registered node.
fn empty() -> [World; 2] {
    [(); 2].map(|()| World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen))
}

/// Creates a request for one address from each pool of a network that defines its pools.
fn defining(network: &str, container: &str, subnets: &[&str]) -> AssignRequest {
    let mut request = request(container, RequestedAddresses::any(1, subnets.len() - 1));
    request.attachment.network = network.to_owned();
    request.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::First });
    let define = |(number, subnet): (usize, &&str)| PoolDefinition {
        name: format!("{network}-{number}"),
        cidr: subnet.parse().unwrap(),
        ranges: Vec::new(),
        set: 0,
        free_of: None,
        gateway: None,
    };
    request.define = subnets.iter().enumerate().map(define).collect();
    request
}

#[tokio::test]
async fn together_makes_pools_of_network_in_empty_store() {
    let subnets = ["10.9.0.0/24", "fd09::/120"];
    let answers = the_same_in(empty(), &["c1", "c2"].map(|container| defining("one", container, &subnets))).await;
    for answer in &answers {
        let pools: Vec<_> = answer.iter().map(|assigned| assigned.pool.to_string()).collect();
        assert_eq!(pools, subnets);
    }
    assert_ne!(answers[0], answers[1]);
}

#[tokio::test]
async fn together_serves_several_networks_of_node() {
    let (one, two) = (["10.9.0.0/24"], ["10.8.0.0/24"]);
    let mut given = defining("one", "c3", &one);
    given.wanted = RequestedAddresses::these([ip("10.9.0.77")]);
    // Container `c1` has an interface in each network.
    let requests = [defining("one", "c1", &one), defining("two", "c1", &two), given, defining("two", "c2", &two)];
    let answers = the_same_in(empty(), &requests).await;
    let pools: Vec<_> = answers.iter().map(|answer| answer[0].pool.to_string()).collect();
    assert_eq!(pools, [one[0], two[0], one[0], two[0]]);
    assert_eq!(answers[2][0].ip, ip("10.9.0.77"));
}

#[tokio::test]
async fn together_reads_what_all_need_at_once() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap())).await;
    // Container `c3` already has its address when the batch assignment starts.
    world.one("a", "c3").await.unwrap();
    let (ipam, counting) = counted(&world, &Arc::default());
    ipam.assign(&requests(&["c0"])[0], soon()).await.unwrap();
    for containers in [["c1", "c2"], ["c3", "c4"]] {
        counting.take();
        let answers = ipam.assign_together(&requests(&containers), soon()).await.unwrap();
        assert_eq!(counting.take().round_trips(), 2, "{containers:?}");
        each_has_its_answer(&world, &containers, &answers).await;
    }
    world.check().await;
}

#[tokio::test]
async fn together_is_refused_for_several_when_intents_are_noted() {
    let world = world().await;
    let notes: Arc<Notes> = Arc::default();
    let ipam = allocator(&world.store, &notes);
    let before = world.dump().await;
    let error = ipam.assign_together(&requests(&["c1", "c2"]), soon()).await.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
    assert_eq!(world.dump().await, before);
    let answers = ipam.assign_together(&requests(&["c1"]), soon()).await.unwrap();
    each_has_its_answer(&world, &["c1"], &answers).await;
    assert_eq!(notes.count(), 0);
    assert_eq!(ipam.assign_together(&[], soon()).await.unwrap(), Vec::<Vec<AssignedAddress>>::new());
}

#[tokio::test]
async fn together_repeats_address_of_holder() {
    let before = async |world: &World| {
        world.one("a", "c2").await.unwrap();
    };
    let answers = the_same(&requests(&["c1", "c2", "c3"]), before).await;
    assert_ne!(answers[0], answers[1]);
    // If all containers of a batch already have their addresses, the batch assignment writes nothing to the store.
    let world = world().await;
    let requests = requests(&["c1", "c2"]);
    let first = world.ipam.assign_together(&requests, soon()).await.unwrap();
    let before = revision(&world).await;
    assert_eq!(world.ipam.assign_together(&requests, soon()).await.unwrap(), first);
    assert_eq!(revision(&world).await, before);
}

#[tokio::test]
async fn together_writes_block_once() {
    let world = world().await;
    let first = world.assign(&requests(&["c1"])[0]).await.unwrap()[0].block.to_string();
    let before = world.block(&first).await.unwrap();
    world.ipam.assign_together(&requests(&["c2", "c3", "c4"]), soon()).await.unwrap();
    let block = world.block(&first).await.unwrap();
    assert_eq!(block.sequence_number(), before.sequence_number() + 1);
    assert!(block.is_full());
}

#[tokio::test]
async fn together_gives_nothing_when_one_cannot() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    world.one("a", "before").await.unwrap();
    let before = world.dump().await;
    let all = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
    let error = world.ipam.assign_together(&requests(&all), soon()).await.unwrap_err();
    assert!(matches!(error, Error::Exhausted { .. }), "{error}");
    let mut limited = requests(&all[..5]);
    limited.iter_mut().for_each(|request| request.max_blocks = 1);
    let error = world.ipam.assign_together(&limited, soon()).await.unwrap_err();
    assert!(matches!(error, Error::BlockLimit), "{error}");
    let mut unknown = requests(&all[..3]);
    unknown[2].v4_pools = vec!["no-such-pool".to_owned()];
    world.ipam.assign_together(&unknown, soon()).await.unwrap_err();
    assert_eq!(world.dump().await, before);
    assert_eq!(world.ipam.assign_together(&requests(&all[..7]), soon()).await.unwrap().len(), 7);
    world.check().await;
}

#[tokio::test]
async fn together_is_for_one_node_and_each_attachment_once() {
    let world = world().await;
    let before = world.dump().await;
    let mut others = requests(&["c1", "c2"]);
    others[1].attachment.node = "b".to_owned();
    for wrong in [others, requests(&["c1", "c2", "c1"])] {
        let error = world.ipam.assign_together(&wrong, soon()).await.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    }
    assert_eq!(world.dump().await, before);
}

/// A store wrapper that assigns an address to another container just before the first commit of a batch assignment.
#[derive(Debug)]
struct Meddled {
    world: World,
    node: &'static str,
    container: &'static str,
    commits: AtomicU32,
}

#[async_trait]
impl Store for Meddled {
    async fn range(&self, request: RangeRequest) -> kv::Result<RangeResponse> {
        self.world.store.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<TxnResponse> {
        if !txn.is_read_only() && self.commits.fetch_add(1, SeqCst) == 0 {
            self.world.one(self.node, self.container).await.unwrap();
        }
        self.world.store.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<WatchStream> {
        self.world.store.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.world.store.compact(revision).await
    }
}

/// Runs a batch assignment for three requests while `container` on `node` gets an address by a separate call. Returns
/// the test world and the answers.
async fn meddled(node: &'static str, container: &'static str) -> (World, Vec<Vec<AssignedAddress>>) {
    let world = world().await;
    world.one("a", "before").await.unwrap();
    let meddled = Meddled { world: world.clone(), node, container, commits: AtomicU32::new(0) };
    let ipam = world.through(Arc::new(meddled));
    let answers = ipam.assign_together(&requests(&["c1", "c2", "c3"]), soon()).await.unwrap();
    world.check().await;
    (world, answers)
}

/// Asserts that each container holds the address in its answer and no other address.
async fn each_has_its_answer(world: &World, containers: &[&str], answers: &[Vec<AssignedAddress>]) {
    assert_eq!(containers.len(), answers.len());
    for (container, answer) in containers.iter().zip(answers) {
        let held = crate::world::held(&world.ipam, &attachment("a", container)).await;
        assert_eq!(held, [answer[0].ip], "{container}");
    }
}

#[tokio::test]
async fn together_serves_none_again_when_served_meanwhile() {
    // While the batch assignment runs, one of its containers gets an address by a separate call, as when a plugin stops
    // waiting for the daemon.
    let (world, answers) = meddled("a", "c2").await;
    each_has_its_answer(&world, &["c1", "c2", "c3"], &answers).await;
}

#[tokio::test]
async fn together_costs_one_attempt_when_another_writes() {
    let (world, answers) = meddled("a", "other").await;
    let other = crate::world::held(&world.ipam, &attachment("a", "other")).await;
    assert!(answers.iter().all(|answer| answer[0].ip != other[0]), "{answers:?}");
}

#[tokio::test]
async fn together_fits_many_blocks_in_commit_or_does_nothing() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap()).with_block_size(32)).await;
    world.configure(IpamConfig::default().with_max_blocks_per_host(200)).await;
    let names: Vec<String> = (0..92).map(|number| format!("c{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // Each request of a batch assignment changes a block, an affinity and a handle.
    assert_eq!(world.ipam.assign_together(&requests(&names[..32]), soon()).await.unwrap().len(), 32);
    let before = world.dump().await;
    world.ipam.assign_together(&requests(&names[32..]), soon()).await.unwrap_err();
    assert_eq!(world.dump().await, before);
    world.check().await;
}
