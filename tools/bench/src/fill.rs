//! Fills stores with addresses in use, and with a history of the maximum size.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::{Affinity, AffinityState, Attribute, Block, Document, Handle, NewPool, Owner, handle_id, keys};
use ipam_core::reservations::Reservations;
use ipam_core::{Ipam, Nodes};
use ipnet::IpNet;
use kv::{Deadline, Key, Op, Store, StoreExt, Txn, Value};
use kv_local::{Create, OpenOptions};
use kv_mvcc::{Blocking, MvccStore, Retention};
use time::OffsetDateTime;

use crate::Outcome;
use crate::contender::POOL;

/// The name of the node on which the measured plugin runs.
pub(crate) const NODE: &str = "node1";
pub(crate) const NETWORK: &str = "bench";

/// The boot id that all assigned addresses record.
const BOOT: &str = "0123abcd";

/// How many blocks a node has, and how many addresses are in use in each of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) blocks: u32,
    pub(crate) used: usize,
}

pub(crate) async fn open(engine: &str, path: &Path) -> Outcome<MvccStore> {
    open_as(engine, path, Create::Never).await
}

/// Opens a store, or creates a missing one.
pub(crate) async fn create(engine: &str, path: &Path) -> Outcome<MvccStore> {
    open_as(engine, path, Create::IfMissing).await
}

async fn open_as(engine: &str, path: &Path, create: Create) -> Outcome<MvccStore> {
    let options = OpenOptions::default().with_create(create).with_blocking(Blocking::InPlace);
    Ok(match engine {
        "sled" => backend_sled::open(path, &options).await?,
        _ => backend_redb::open(path, &options).await?,
    })
}

/// Claims blocks of the pool for a node, from block number `skip` on, with one commit per block.
pub(crate) async fn give(store: &MvccStore, node: &str, skip: u32, share: Share) -> Outcome<()> {
    for number in 0..share.blocks {
        let cidr = block_number(skip + number)?;
        let first = u64::from(skip + number) * 64;
        let documents = block_of(node, cidr, first..first + share.used as u64)?;
        let writes: Vec<Op> = documents.into_iter().map(|(key, value)| Op::put(key, value)).collect();
        store.txn(Txn::new().with_success(writes)).await?;
    }
    Ok(())
}

/// Returns block number `number` of 64 addresses, counted from the end of the pool `10.0.0.0/12`. The pool's last block
/// is not counted, because the plugin does not assign the broadcast address in it.
pub(crate) fn block_number(number: u32) -> Outcome<IpNet> {
    let first = u32::from(Ipv4Addr::new(10, 15, 255, 128)) - 64 * number;
    Ok(IpNet::new(Ipv4Addr::from(first).into(), 26)?)
}

/// Returns the documents of a block (affinity, handles and block) that belongs to `node` and in which each of the
/// containers `containers` has an address.
pub(crate) fn block_of(node: &str, cidr: IpNet, containers: std::ops::Range<u64>) -> Outcome<Vec<(Key, Value)>> {
    let owner = Owner::Host(node.to_owned());
    let mut block = Block::new(cidr, Some(&owner), OffsetDateTime::now_utc(), None)?;
    let affinity = keys::affinity(&owner, cidr).ok_or("no host")?;
    let mut documents = vec![(affinity, Affinity::new(AffinityState::Confirmed).encode()?)];
    for number in containers {
        let id = handle_id(NETWORK, &container(number));
        let holder = Attribute::new(Some(&id), attributes(node));
        block.assign_auto(1, &holder, &Reservations::default());
        let mut handle = Handle::new();
        handle.increment(cidr, 1);
        documents.push((keys::handle(&id), handle.encode()?));
    }
    documents.push((keys::block(cidr), block.encode()?));
    Ok(documents)
}

/// Assigns and releases addresses until the store's history has its maximum size. Once the history has its maximum
/// size, each commit removes as many rows of the history as it adds.
pub(crate) async fn fill_log(store: &MvccStore) -> Outcome<()> {
    let mut churn = Churn::begin(store).await?;
    let bound = Retention::default().bytes.unwrap_or(u64::MAX);
    // The history grows beyond its maximum size before it is trimmed for the first time. The loop goes on after the
    // first revision has been removed, until the history has shrunk to its maximum size.
    while store.status().compacted.get() < 500 || store.status().log_bytes > bound {
        churn.pair().await?;
    }
    Ok(())
}

pub(crate) struct Churn {
    ipam: Ipam,
    pairs: u64,
}

impl Churn {
    /// Creates a `Churn` for a store, and the network's pool if it does not exist.
    pub(crate) async fn begin(store: &MvccStore) -> Outcome<Self> {
        let ipam = Ipam::new(Arc::new(store.clone()), Nodes::FirstSeen);
        if ipam.inventory(soon()).await?.pools.is_empty() {
            ipam.create_pool(&NewPool::new(NETWORK, POOL.parse()?), None, soon()).await?;
        }
        Ok(Self { ipam, pairs: 0 })
    }

    /// Assigns an address to the container with this number, without releasing it.
    pub(crate) async fn add(&mut self, number: u64) -> Outcome<Attachment> {
        let mut request = one_address(NODE, 1 << 40 | number);
        request.v4_pools = vec![NETWORK.to_owned()];
        let attachment = request.attachment.clone();
        self.ipam.assign(&request, soon()).await?;
        Ok(attachment)
    }

    /// Assigns an address to a new container, and then releases the address.
    pub(crate) async fn pair(&mut self) -> Outcome<()> {
        self.pairs += 1;
        let attachment = self.add(1 << 41 | self.pairs).await?;
        self.ipam.release_attachment(&attachment, &[], soon()).await?;
        Ok(())
    }
}

/// Returns a request for one IPv4 address for the container with this number.
pub(crate) fn one_address(node: &str, number: u64) -> AssignRequest {
    let attachment = Attachment {
        network: NETWORK.to_owned(),
        container: container(number),
        interface: "eth0".to_owned(),
        node: node.to_owned(),
        boot: Some(BOOT.to_owned()),
    };
    let mut request = AssignRequest::new(attachment, RequestedAddresses::any(1, 0));
    request.attributes = attributes(node);
    request
}

/// Returns a deadline that suffices for any call.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

pub(crate) async fn in_use(store: &MvccStore) -> Outcome<usize> {
    let blocks = store.list(kv::Range::Prefix(keys::blocks_prefix(None))).await?;
    let mut held = 0;
    for kv in blocks.kvs {
        held += Block::decode(&kv.key, kv.value.as_bytes())?.allocated().count();
    }
    Ok(held)
}

/// Returns a container id in the format of container runtimes.
pub(crate) fn container(number: u64) -> String {
    format!("{:016x}{:048x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15), number)
}

fn attributes(node: &str) -> BTreeMap<String, String> {
    let pairs = [
        ("node", node),
        ("timestamp", "2026-01-01 10:00:00.123456789 +0000 UTC"),
        ("margay.io/net", NETWORK),
        ("margay.io/ifname", "eth0"),
        ("margay.io/boot", BOOT),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
}
