//! A bare etcd client that repeats Margay's commits, with the same number of keys, bytes and guards, but without reads
//! and decisions.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use backend_etcd::EtcdStore;
use etcd_client::{Client, Compare, CompareOp, PutOptions, Txn, TxnOp};
use kv::{Op, Range, RangeRequest, RangeResponse, Revision, Store, Target, TxnResponse, WatchRequest, WatchStream};

use crate::Outcome;

/// The key `SHARED` stands for all documents that commits guard but that never change, such as pools and settings.
const SHARED: &str = "raw/shared/document";

/// A store wrapper that records transactions.
#[derive(Clone, Debug)]
pub(super) struct Recorder {
    inner: EtcdStore,
    txns: Arc<Mutex<Vec<kv::Txn>>>,
}

impl Recorder {
    pub(super) fn new(inner: EtcdStore) -> Self {
        Self { inner, txns: Arc::default() }
    }

    /// Returns the shapes of the commits that were recorded since the last call of `take` or `take_all`.
    pub(super) fn take(&self) -> Vec<Shape> {
        self.take_all().iter().filter(|txn| !txn.is_read_only()).map(Shape::of).collect()
    }

    /// Returns the transactions that were recorded since the last call of `take` or `take_all`.
    pub(super) fn take_all(&self) -> Vec<kv::Txn> {
        std::mem::take(&mut *self.txns.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[async_trait]
impl Store for Recorder {
    async fn range(&self, request: RangeRequest) -> kv::Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: kv::Txn) -> kv::Result<TxnResponse> {
        self.txns.lock().unwrap_or_else(PoisonError::into_inner).push(txn.clone());
        self.inner.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}

/// The size of the value that a put writes, and whether this put creates its key.
#[derive(Clone, Copy, Debug)]
struct Put {
    bytes: usize,
    /// True if the put creates its key, with a guard that the key does not exist.
    is_new: bool,
}

/// The shape of a commit: the sizes of the values that it puts, and the numbers of its guards.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    puts: Vec<Put>,
    /// Number of guards on single keys that the commit does not write.
    keys: usize,
    /// Number of the commit's guards on ranges of keys.
    ranges: usize,
}

impl Shape {
    fn of(txn: &kv::Txn) -> Self {
        let guard = |key: &kv::Key| txn.compares.iter().find(|compare| compare.range == Range::Key(key.clone()));
        let is_absent = |compare: &kv::Compare| matches!(&compare.target, Target::ModRevision(at) if !at.is_set());
        let written = txn.success.iter().filter_map(|op| match op {
            Op::Put { key, value, .. } => Some((key, value.len())),
            _ => None,
        });
        let puts: Vec<Put> =
            written.clone().map(|(key, bytes)| Put { bytes, is_new: guard(key).is_none_or(is_absent) }).collect();
        let guarded_writes = written.filter(|(key, _)| guard(key).is_some()).count();
        let ranges = txn.compares.iter().filter(|compare| !matches!(compare.range, Range::Key(_))).count();
        Self { puts, keys: txn.compares.len().saturating_sub(guarded_writes + ranges), ranges }
    }

    /// Returns the total size, in bytes, of all values that the commit puts.
    pub(super) fn bytes(&self) -> usize {
        self.puts.iter().map(|put| put.bytes).sum()
    }

    /// Returns the commit's numbers of puts, guards and value bytes as text for the report.
    pub(super) fn reported(&self) -> String {
        let guards = self.puts.len() + self.keys + self.ranges;
        format!("{} puts, {guards} guards, {} bytes of values", self.puts.len(), self.bytes())
    }
}

/// A bare client of etcd with keys of its own.
#[derive(Clone)]
pub(super) struct Bare {
    client: Client,
    name: String,
    /// For each of the client's permanent keys, the revision of the key's last write.
    written: Vec<i64>,
    shared: i64,
    made: u64,
}

impl Bare {
    /// Creates a client. The document that [`Self::prepare`] writes must exist already.
    pub(super) async fn connect(client: Client, name: String) -> Outcome<Self> {
        let mut client = client;
        let found = client.get(SHARED, None).await?;
        let shared = found.kvs().first().map(etcd_client::KeyValue::mod_revision).ok_or("nothing is prepared")?;
        Ok(Self { client, name, written: Vec::new(), shared, made: 0 })
    }

    /// Writes the document on which all clients have a guard in their commits.
    pub(super) async fn prepare(client: &mut Client) -> Outcome<()> {
        client.put(SHARED, vec![b'x'; 400], Some(PutOptions::new())).await?;
        Ok(())
    }

    /// Makes one commit with the sizes and guards of `shape`. Fails if a guard of the commit does not hold.
    pub(super) async fn commit(&mut self, shape: &Shape) -> Outcome<()> {
        let (mut compares, mut puts, mut lasting) = (Vec::new(), Vec::new(), 0);
        for put in &shape.puts {
            self.made += 1;
            let (key, revision) = if put.is_new {
                (format!("raw/new/{}/{}", self.name, self.made), 0)
            } else {
                lasting += 1;
                let revision = self.written.get(lasting - 1).copied().unwrap_or(0);
                (format!("raw/lasting/{}/{lasting}", self.name), revision)
            };
            compares.push(Compare::mod_revision(key.clone(), CompareOp::Equal, revision));
            puts.push(TxnOp::put(key, vec![b'x'; put.bytes], None));
        }
        for _ in 0..shape.keys {
            compares.push(Compare::mod_revision(SHARED, CompareOp::Equal, self.shared));
        }
        for _ in 0..shape.ranges {
            let newer = self.shared + 1;
            compares.push(Compare::mod_revision("raw/shared/", CompareOp::Less, newer).with_prefix());
        }
        let answer = self.client.txn(Txn::new().when(compares).and_then(puts)).await?;
        if !answer.succeeded() {
            return Err("a guard of the bare client did not hold".into());
        }
        let revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
        self.written = vec![revision; self.written.len().max(lasting)];
        Ok(())
    }
}
