//! Repeats the requests of real ADDs, from a bare client of etcd up to Margay's store with decoded documents, so that
//! each part of an ADD can be measured alone.

use std::sync::Arc;
use std::time::Instant;

use backend_etcd::EtcdStore;
use etcd_client::{Client, Compare, CompareOp, GetOptions, TxnOp};
use ipam_core::Ipam;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Attribute, Block, Document, Handle, IpamConfig, Node, Pool};
use ipam_core::reservations::Reservations;
use kv::{Content, Key, Kv, Op, OpResult, Range, Revision, Store, StoreExt, Target, Txn, Value};

use super::ground::{Ground, ipam_on};
use super::raw::Recorder;
use crate::Outcome;
use crate::fill::{one_address, soon};
use crate::report::Times;

/// The steps of a replayed ADD. Each step does everything that the step before it does, unless it says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// One transaction that puts the block and the handle.
    Puts,
    /// The transaction has the guards of an ADD.
    Guards,
    /// The block is read before the transaction.
    BlockRead,
    /// Everything is read that an ADD reads, in one request.
    WholeRead,
    /// As [`Self::WholeRead`], but the member of etcd that is asked answers the read by itself, so the answer may be
    /// stale. No step builds on this one.
    StaleRead,
    /// The requests go through Margay's store.
    Store,
    /// The documents that were read are decoded, and the written ones are encoded.
    Documents,
}

/// The two requests of an ADD.
#[derive(Debug)]
struct Call {
    container: u64,
    read: Txn,
    commit: Txn,
}

/// A client that repeats the ADDs of one node.
#[derive(Clone)]
pub(super) struct Replayer {
    client: Client,
    store: EtcdStore,
    node: String,
    calls: Arc<Vec<Call>>,
    block: Key,
    /// The block before the first ADD.
    resident: Value,
    /// The revision of the block's last write.
    written: Revision,
}

impl Replayer {
    /// Makes ADDs on a node for the given containers, one after another, and records their requests. Deletes the
    /// containers again. Fails if an ADD is not one read and one commit.
    pub(super) async fn record(ground: &Ground, node: String, containers: &[u64]) -> Outcome<Self> {
        let recorder = Recorder::new(ground.store()?);
        let ipam = ipam_on(recorder.clone());
        let (Some(first), store) = (containers.first(), ground.store()?) else { return Err("no containers".into()) };
        // The allocator's hints, like the plugin's, name the block once an ADD has used it.
        ipam.assign(&one_address(&node, *first), soon()).await?;
        release(&ipam, &node, *first).await?;
        recorder.take_all();
        let mut calls = Vec::new();
        for container in containers {
            ipam.assign(&one_address(&node, *container), soon()).await?;
            let Ok([read, commit]) = <[Txn; 2]>::try_from(recorder.take_all()) else {
                return Err("an ADD was not one read and one commit".into());
            };
            if !read.is_read_only() || commit.is_read_only() {
                return Err("an ADD was not one read and one commit".into());
            }
            calls.push(Call { container: *container, read, commit });
        }
        for container in containers {
            release(&ipam, &node, *container).await?;
        }
        let block = calls.first().and_then(|call| puts(&call.commit).find(|(key, _)| keys::parse_block(key).is_some()));
        let block = block.map(|(key, _)| key.clone()).ok_or("an ADD wrote no block")?;
        let resident = store.get(block.clone()).await?.ok_or("the block is gone")?;
        let client = ground.client().await?;
        let (written, resident, calls) = (resident.mod_revision, resident.value, Arc::new(calls));
        Ok(Self { client, store, node, calls, block, resident, written })
    }

    /// Repeats all ADDs up to `step`, and returns how long each took.
    pub(super) async fn replay(&mut self, step: Step) -> Outcome<Times> {
        let mut times = Times::default();
        for call in Arc::clone(&self.calls).iter() {
            let begun = Instant::now();
            self.repeat(call, step).await?;
            times.push(begun.elapsed());
        }
        Ok(times)
    }

    /// Sets the block to its state before the first ADD, and deletes the handles.
    pub(super) async fn reset(&mut self) -> Outcome<()> {
        let mut writes = vec![Op::put(self.block.clone(), self.resident.clone())];
        for call in self.calls.iter() {
            writes.extend(
                puts(&call.commit).filter(|(key, _)| **key != self.block).map(|(key, _)| Op::delete(key.clone())),
            );
        }
        self.written = self.store.txn(Txn::new().with_success(writes)).await?.revision;
        Ok(())
    }

    async fn repeat(&mut self, call: &Call, step: Step) -> Outcome<()> {
        if step >= Step::Store {
            let read = self.store.txn(call.read.clone()).await?;
            let mut commit = self.commit(call, step);
            if step == Step::Documents {
                self.rewrite(call, &read.results, &mut commit)?;
            }
            let answer = self.store.txn(commit).await?;
            self.written = answer.revision;
            return if answer.succeeded { Ok(()) } else { Err("a guard of a repeated ADD did not hold".into()) };
        }
        match step {
            Step::BlockRead => drop(self.client.get(self.block.as_bytes(), None).await?),
            Step::WholeRead => drop(self.client.txn(wire_txn(&call.read, Freshness::Latest)?).await?),
            Step::StaleRead => drop(self.client.txn(wire_txn(&call.read, Freshness::MaybeStale)?).await?),
            _ => {}
        }
        let answer = self.client.txn(wire_txn(&self.commit(call, step), Freshness::Latest)?).await?;
        self.written = Revision::new(answer.header().map_or(0, etcd_client::ResponseHeader::revision));
        if answer.succeeded() { Ok(()) } else { Err("a guard of a bare client did not hold".into()) }
    }

    /// Returns the commit of an ADD with the current revision of the block in its guard, or without guards.
    fn commit(&self, call: &Call, step: Step) -> Txn {
        let mut commit = call.commit.clone();
        if step == Step::Puts {
            commit.compares.clear();
        }
        for guard in &mut commit.compares {
            if guard.range == Range::Key(self.block.clone()) {
                guard.target = Target::ModRevision(self.written);
            }
        }
        commit
    }

    /// Decodes what an ADD has read, assigns an address in the block, and replaces the values of `commit` by the
    /// encoded block and handle.
    fn rewrite(&self, call: &Call, read: &[OpResult], commit: &mut Txn) -> Outcome<()> {
        let found = read.iter().flat_map(|result| match result {
            OpResult::Range(found) => &found.kvs[..],
            _ => &[],
        });
        let mut block = None;
        for kv in found.filter(|kv| !kv.value.as_bytes().is_empty()) {
            if kv.key == self.block {
                block = Some(Block::decode(&kv.key, kv.value.as_bytes())?);
            } else {
                decode(kv)?;
            }
        }
        let mut block = block.ok_or("the block was not read")?;
        let request = one_address(&self.node, call.container);
        let id = request.attachment.handle();
        block.assign_auto(1, &Attribute::new(Some(&id), request.attributes), &Reservations::default());
        block.bump();
        let mut handle = Handle::new();
        handle.increment(block.cidr(), 1);
        for op in &mut commit.success {
            if let Op::Put { key, value, .. } = op {
                *value = if *key == self.block { block.encode()? } else { handle.encode()? };
            }
        }
        Ok(())
    }
}

async fn release(ipam: &Ipam, node: &str, container: u64) -> Outcome<()> {
    ipam.release_attachment(&one_address(node, container).attachment, &[], soon()).await?;
    Ok(())
}

fn puts(txn: &Txn) -> impl Iterator<Item = (&Key, &Value)> {
    txn.success.iter().filter_map(|op| match op {
        Op::Put { key, value, .. } => Some((key, value)),
        _ => None,
    })
}

/// Decodes a document that an ADD reads besides its block.
fn decode(kv: &Kv) -> Outcome<()> {
    let is_of = |kind| Range::Prefix(keys::resources_prefix(kind)).contains(kv.key.as_bytes());
    let value = kv.value.as_bytes();
    if is_of(ResourceKind::IpPool) {
        Pool::decode(&kv.key, value)?;
    } else if is_of(ResourceKind::Node) {
        Node::decode(&kv.key, value)?;
    } else if kv.key == keys::config() {
        IpamConfig::decode(&kv.key, value)?;
    }
    Ok(())
}

/// Whether a read must return the latest revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freshness {
    Latest,
    MaybeStale,
}

/// Converts a transaction of an ADD into the form of etcd's client.
fn wire_txn(txn: &Txn, freshness: Freshness) -> Result<etcd_client::Txn, String> {
    let compares: Vec<Compare> = txn.compares.iter().map(wire_compare).collect::<Result<_, _>>()?;
    let ops: Vec<TxnOp> = txn.success.iter().map(|op| wire_op(op, freshness)).collect::<Result<_, _>>()?;
    Ok(etcd_client::Txn::new().when(compares).and_then(ops))
}

fn wire_compare(compare: &kv::Compare) -> Result<Compare, String> {
    let (key, end) = span(&compare.range);
    let op = match compare.op {
        kv::CompareOp::Equal => CompareOp::Equal,
        kv::CompareOp::NotEqual => CompareOp::NotEqual,
        kv::CompareOp::Less => CompareOp::Less,
        kv::CompareOp::Greater => CompareOp::Greater,
    };
    let made = match &compare.target {
        Target::ModRevision(at) => Compare::mod_revision(key, op, at.get()),
        Target::CreateRevision(at) => Compare::create_revision(key, op, at.get()),
        other => return Err(format!("an ADD has a guard of an unknown kind: {other:?}")),
    };
    Ok(if end.is_empty() { made } else { made.with_range(end) })
}

fn wire_op(op: &Op, freshness: Freshness) -> Result<TxnOp, String> {
    match op {
        Op::Put { key, value, .. } => Ok(TxnOp::put(key.as_bytes(), value.as_bytes(), None)),
        Op::Range(read) => {
            let (key, end) = span(&read.range);
            let options = GetOptions::new().with_range(end);
            let options = if read.content == Content::KeysOnly { options.with_keys_only() } else { options };
            let options = if freshness == Freshness::MaybeStale { options.with_serializable() } else { options };
            Ok(TxnOp::get(key, Some(options)))
        }
        Op::Delete { .. } => Err("an ADD deletes a key".to_owned()),
    }
}

/// Returns the first key and the `range_end` of a range in etcd's protocol.
fn span(range: &Range) -> (Vec<u8>, Vec<u8>) {
    match range {
        Range::Key(key) => (key.as_bytes().to_vec(), Vec::new()),
        _ => {
            let (from, to) = range.bounds();
            (from.as_bytes().to_vec(), to.map_or(vec![0], |to| to.as_bytes().to_vec()))
        }
    }
}
