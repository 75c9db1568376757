//! Sets up an etcd with pools, nodes and assigned addresses, by writing their documents directly.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use backend_etcd::{EtcdStore, Options};
use etcd_client::{Client, Txn, TxnOp};
use ipam_core::attachment::Attachment;
use ipam_core::hints::Hints;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, Labels, NewPool, Node, Pool};
use ipam_core::{Ipam, Nodes};
use ipnet::IpNet;
use kv::wrap::CountingStore;
use kv::{Key, Store, Value};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use time::OffsetDateTime;
use tokio::task::JoinSet;

use super::commits::CommitStore;
use crate::contender::{Contender, PER_CONTAINER};
use crate::fill::{self, NETWORK, soon};
use crate::{Outcome, Programs};
use testkit::server::Etcd;

/// The pool from which simulated hosts assign addresses: the largest private IPv4 network.
const POOL: &str = "10.0.0.0/8";
const POOL_V6: &str = "fd00:10::/64";
/// Maximum number of puts in a transaction (etcd's limit), and maximum size of a transaction in bytes (a third of
/// etcd's limit for requests).
const MOST_WRITES: usize = 128;
const MOST_BYTES: usize = 500_000;
/// Number of concurrent transactions while the store is filled before the measurement.
const FILLERS: usize = 8;

/// The keys and values of documents that will be written to etcd.
pub(super) type Documents = Vec<(Key, Value)>;

/// A simulated host: an allocator with its own connection to etcd, on which requests and bytes are counted.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) name: String,
    pub(super) ipam: Ipam,
    pub(super) store: CountingStore<CommitStore<EtcdStore>>,
    /// The store below `store`, with the attempts and the failed commits of this host.
    pub(super) commits: CommitStore<EtcdStore>,
}

/// The most recently used blocks of each node, in memory instead of in the plugin's hint file.
#[derive(Debug, Default)]
struct Remembered(Mutex<HashMap<String, Vec<IpNet>>>);

impl Hints for Remembered {
    fn recall(&self, attachment: &Attachment) -> Vec<IpNet> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&attachment.node).cloned().unwrap_or_default()
    }

    fn remember(&self, attachment: &Attachment, blocks: &[IpNet]) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(attachment.node.clone(), blocks.to_vec());
    }
}

/// The folder for files of the plugin that need not survive a reboot.
const RUN: &str = "/run/margay";

/// A tmpfs on [`RUN`], mounted only if `RUN` is on disk, because real hosts have `/run` in memory.
#[derive(Debug)]
struct Run {
    mounted: bool,
}

impl Run {
    fn in_memory() -> Outcome<Self> {
        std::fs::create_dir_all(RUN)?;
        let mounted = statfs(RUN)?.filesystem_type() != TMPFS_MAGIC;
        if mounted {
            mount(None::<&str>, RUN, Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
        }
        Ok(Self { mounted })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.mounted {
            // A call that has not ended may still have a file open under `/run`, so the unmount is lazy.
            let _ = umount2(RUN, MntFlags::MNT_DETACH);
        }
    }
}

/// An etcd server for one part of the benchmark.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) etcd: Etcd,
    folder: PathBuf,
    _run: Run,
}

impl Ground {
    /// Starts an etcd without pools. The simulated hosts keep their files in `folder`.
    pub(super) fn empty(folder: &Path) -> Outcome<Self> {
        Self::on(Etcd::start()?, folder)
    }

    fn on(etcd: Etcd, folder: &Path) -> Outcome<Self> {
        Ok(Self { etcd, folder: folder.to_owned(), _run: Run::in_memory()? })
    }

    /// Starts an etcd that has this quota in bytes, with an IPv4 pool.
    pub(super) async fn with_quota(folder: &Path, quota: u64) -> Outcome<Self> {
        let etcd = Etcd::start_with("http", &[format!("--quota-backend-bytes={quota}")])?;
        let ground = Self::on(etcd, folder)?;
        ground.pool(NewPool::new("v4", POOL.parse()?)).await?;
        Ok(ground)
    }

    /// Starts an etcd with an IPv4 pool and an IPv6 pool, whose blocks have the default sizes.
    pub(super) async fn start(folder: &Path) -> Outcome<Self> {
        let ground = Self::empty(folder)?;
        ground.pool(NewPool::new("v4", POOL.parse()?)).await?;
        ground.pool(NewPool::new("v6", POOL_V6.parse()?)).await?;
        Ok(ground)
    }

    pub(super) async fn pool(&self, pool: NewPool) -> Outcome<Pool> {
        Ok(self.host("setup")?.ipam.create_pool(&pool, None, soon()).await?)
    }

    /// Creates an allocator like the plugin's with its own connection to etcd, except that it keeps hints in memory and
    /// does not record pending commits.
    pub(super) fn host(&self, name: &str) -> Outcome<Host> {
        let commits = CommitStore::new(self.store()?);
        let store = CountingStore::new(commits.clone());
        Ok(Host { name: name.to_owned(), ipam: ipam_on(store.clone()), store, commits })
    }

    /// Opens Margay's store with its own connection to etcd.
    pub(super) fn store(&self) -> Outcome<EtcdStore> {
        Ok(EtcdStore::open(&Options::new([self.etcd.url()]))?)
    }

    pub(super) async fn client(&self) -> Outcome<Client> {
        Ok(Client::connect([self.etcd.url()], None).await?)
    }

    /// Writes documents to etcd in large concurrent transactions.
    pub(super) async fn write(&self, documents: Documents) -> Outcome<()> {
        let client = self.client().await?;
        let mut under_way: JoinSet<Result<(), etcd_client::Error>> = JoinSet::new();
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let send = |under_way: &mut JoinSet<_>, batch: Vec<TxnOp>| {
            let mut client = client.clone();
            under_way.spawn(async move { client.txn(Txn::new().and_then(batch)).await.map(drop) });
        };
        for (key, value) in documents {
            bytes += value.len();
            batch.push(TxnOp::put(key.as_bytes(), value.as_bytes(), None));
            if batch.len() == MOST_WRITES || bytes > MOST_BYTES {
                send(&mut under_way, std::mem::take(&mut batch));
                bytes = 0;
            }
            while under_way.len() >= FILLERS {
                under_way.join_next().await.transpose()?.transpose()?;
            }
        }
        send(&mut under_way, batch);
        while let Some(done) = under_way.join_next().await {
            done??;
        }
        Ok(())
    }

    pub(super) async fn register(&self, names: impl IntoIterator<Item = String>) -> Outcome<()> {
        let nodes: Outcome<Documents> = names.into_iter().map(|name| node(&name)).collect();
        self.write(nodes?).await
    }

    /// Registers nodes that have blocks of 64 addresses. For each number `n` in `used`, each node gets one block with
    /// `n` assigned addresses. Consecutive nodes get consecutive blocks of the IPv4 pool, from block number `skip` on.
    pub(super) async fn settle(&self, names: impl IntoIterator<Item = String>, skip: u32, used: &[u64]) -> Outcome<()> {
        self.settle_in(USUAL_SIZE, names, skip, used).await
    }

    /// Registers nodes like [`Self::settle`], with blocks of the prefix length `size`.
    pub(super) async fn settle_in(
        &self,
        size: u8,
        names: impl IntoIterator<Item = String>,
        skip: u32,
        used: &[u64],
    ) -> Outcome<()> {
        let mut documents = Documents::new();
        let mut next = skip;
        for name in names {
            documents.push(node(&name)?);
            for used in used {
                let first = u64::from(next) << (32 - size);
                documents.extend(fill::block_of(&name, nth_block_in(size, next)?, first..first + used)?);
                next += 1;
            }
            // Documents stay in memory until they are written, so they are written in parts.
            if documents.len() > 20_000 {
                self.write(std::mem::take(&mut documents)).await?;
            }
        }
        self.write(documents).await
    }

    /// Returns the plugin on a node of a Calico network as a contender. In the node's name, [`PER_CONTAINER`] is
    /// replaced with each container's id.
    pub(super) fn contender(
        &self,
        programs: &Programs,
        name: &'static str,
        node: &str,
        families: Families,
    ) -> Contender {
        let v6 = if families == Families::Both { r#","assign_ipv6":"true""# } else { "" };
        let (url, lock) = (self.etcd.url(), self.folder.join("ipam.lock"));
        let netconf = format!(
            r#"{{"cniVersion":"1.0.0","name":"{NETWORK}","type":"calico","nodename":"{node}","datastore_type":"etcdv3","etcd_endpoints":"{url}","ipam_lock_file":"{}","ipam":{{"type":"calico-ipam"{v6}}}}}"#,
            lock.display()
        );
        Contender::Plugin { name, program: programs.plugin.clone(), netconf }
    }

    /// Returns the plugin as a contender that runs on a new node for each container.
    pub(super) fn newcomer(&self, programs: &Programs, name: &'static str) -> Contender {
        self.contender(programs, name, &format!("new-{PER_CONTAINER}"), Families::V4)
    }

    /// Returns a minimal program as a contender. The minimal program is built like the plugin, connects to the
    /// benchmark's etcd, and commits about as much as the plugin.
    pub(super) fn floor(&self, programs: &Programs) -> Contender {
        let name = "the floor: connect, commit two keys";
        Contender::Etcd { name, program: programs.floor_etcd.clone(), url: self.etcd.url() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Families {
    V4,
    Both,
}

/// The prefix length of the blocks of a pool that does not set one.
const USUAL_SIZE: u8 = 26;

/// Returns block number `number` of 64 addresses in the default IPv4 pool.
pub(super) fn nth_block(number: u32) -> Outcome<IpNet> {
    nth_block_in(USUAL_SIZE, number)
}

/// Returns block number `number` of the prefix length `size` in the default IPv4 pool.
fn nth_block_in(size: u8, number: u32) -> Outcome<IpNet> {
    let first = u32::from(Ipv4Addr::new(10, 0, 0, 0)) + (number << (32 - size));
    Ok(IpNet::new(IpAddr::V4(Ipv4Addr::from(first)), size)?)
}

/// Creates an allocator like the plugin's, which keeps hints in memory.
pub(super) fn ipam_on(store: impl Store) -> Ipam {
    Ipam::new(Arc::new(store), Nodes::Registered).with_hints(Arc::new(Remembered::default()))
}

/// Returns the key and the value of a node's document.
pub(super) fn node(name: &str) -> Outcome<(Key, Value)> {
    let node = Node::new(name, Labels::new(), "6f0c2f6e-3f44-4b8e-9e53-0a2f4a9d7c11", OffsetDateTime::now_utc());
    Ok((keys::resource(ResourceKind::Node, name), node.encode()?))
}
