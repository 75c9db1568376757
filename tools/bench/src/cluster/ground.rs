//! Sets up an etcd with pools, nodes and addresses in use, written directly as documents of the model.

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
use kv::{Key, Value};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use time::OffsetDateTime;
use tokio::task::JoinSet;

use crate::contender::{Contender, PER_CONTAINER};
use crate::fill::{self, NETWORK, soon};
use crate::{Outcome, Programs};
use testkit::server::Etcd;

/// The pool from which hosts allocate: the largest private IPv4 network.
const POOL: &str = "10.0.0.0/8";
const POOL_V6: &str = "fd00:10::/64";
/// Maximum number of puts in one transaction (etcd's limit), and maximum size in bytes (a third of etcd's request
/// size).
const MOST_WRITES: usize = 128;
const MOST_BYTES: usize = 500_000;
/// The number of concurrent transactions while the store is filled.
const FILLERS: usize = 8;

/// Keys and values of the documents to write.
pub(super) type Documents = Vec<(Key, Value)>;

/// An allocator with its own connection to etcd. The connection's requests and bytes are counted.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) name: String,
    pub(super) ipam: Ipam,
    pub(super) store: CountingStore<EtcdStore>,
}

/// The most recently used blocks of each node, in memory instead of the plugin's hint file.
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

/// The folder for the plugin's files that need not survive a reboot.
const RUN: &str = "/run/margay";

/// A tmpfs mounted on [`RUN`] if [`RUN`] is on disk, because hosts normally have `/run` in memory.
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
            // The unmount is detached, because a call that has not ended may still have a file open under `/run`.
            let _ = umount2(RUN, MntFlags::MNT_DETACH);
        }
    }
}

/// An etcd server for one measurement.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) etcd: Etcd,
    folder: PathBuf,
    _run: Run,
}

impl Ground {
    /// Starts an etcd without pools. The files of hosts are in `folder`.
    pub(super) fn empty(folder: &Path) -> Outcome<Self> {
        Ok(Self { etcd: Etcd::start()?, folder: folder.to_owned(), _run: Run::in_memory()? })
    }

    /// Starts an etcd with one pool per family and blocks of the default sizes.
    pub(super) async fn start(folder: &Path) -> Outcome<Self> {
        let ground = Self::empty(folder)?;
        ground.pool(NewPool::new("v4", POOL.parse()?)).await?;
        ground.pool(NewPool::new("v6", POOL_V6.parse()?)).await?;
        Ok(ground)
    }

    pub(super) async fn pool(&self, pool: NewPool) -> Outcome<Pool> {
        Ok(self.host("setup")?.ipam.create_pool(&pool, None, soon()).await?)
    }

    /// Creates an allocator like the plugin's, except that hints are kept in memory and pending commits are not
    /// recorded. Each host has its own connection.
    pub(super) fn host(&self, name: &str) -> Outcome<Host> {
        let store = CountingStore::new(EtcdStore::open(&Options::new([self.etcd.url()]))?);
        let ipam = Ipam::new(Arc::new(store.clone()), Nodes::Registered).with_hints(Arc::new(Remembered::default()));
        Ok(Host { name: name.to_owned(), ipam, store })
    }

    pub(super) async fn client(&self) -> Outcome<Client> {
        Ok(Client::connect([self.etcd.url()], None).await?)
    }

    /// Writes documents in large concurrent transactions.
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

    /// Registers nodes with blocks of 64 addresses. Each node gets one block per entry of `used`, and the entry is the
    /// number of the block's addresses in use. The nodes take consecutive blocks of the IPv4 pool, starting at block
    /// number `skip`.
    pub(super) async fn settle(&self, names: impl IntoIterator<Item = String>, skip: u32, used: &[u64]) -> Outcome<()> {
        let mut documents = Documents::new();
        let mut next = skip;
        for name in names {
            documents.push(node(&name)?);
            for used in used {
                let first = u64::from(next) * 64;
                documents.extend(fill::block_of(&name, nth_block(next)?, first..first + used)?);
                next += 1;
            }
            // Documents stay in memory until they are written, so write them in parts.
            if documents.len() > 20_000 {
                self.write(std::mem::take(&mut documents)).await?;
            }
        }
        self.write(documents).await
    }

    /// Returns the plugin as a node of a Calico network. [`PER_CONTAINER`] in the node's name becomes each container's
    /// id.
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

    /// Returns the plugin with a new node for each container.
    pub(super) fn newcomer(&self, programs: &Programs, name: &'static str) -> Contender {
        self.contender(programs, name, &format!("new-{PER_CONTAINER}"), Families::V4)
    }

    /// Returns a minimal program that connects to this etcd and commits about as much as the plugin. The program is
    /// built and linked like the plugin.
    pub(super) fn floor(&self, programs: &Programs) -> Contender {
        let name = "the floor: connect, commit two keys";
        Contender::Etcd { name, program: programs.floor_etcd.clone(), url: self.etcd.url() }
    }
}

/// The families of the requested addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Families {
    V4,
    Both,
}

/// Returns the block of 64 addresses with this number in the default IPv4 pool.
pub(super) fn nth_block(number: u32) -> Outcome<IpNet> {
    let first = u32::from(Ipv4Addr::new(10, 0, 0, 0)) + 64 * number;
    Ok(IpNet::new(IpAddr::V4(Ipv4Addr::from(first)), 26)?)
}

/// Returns the key and the document of a node.
pub(super) fn node(name: &str) -> Outcome<(Key, Value)> {
    let node = Node::new(name, Labels::new(), "6f0c2f6e-3f44-4b8e-9e53-0a2f4a9d7c11", OffsetDateTime::now_utc());
    Ok((keys::resource(ResourceKind::Node, name), node.encode()?))
}
