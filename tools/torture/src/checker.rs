//! Follows a watch on the store and checks every revision. The checker decodes and replays the documents without any
//! code of `ipam_core::model`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use futures::StreamExt;
use ipnet::IpNet;
use kv::{ErrorKind, Event, EventKind, Kv, Range, Revision, Store, StoreExt, WatchRequest};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::Failure;
use crate::ledger::{Change, Ledger};

/// Replays the revisions of a store and checks each of them.
pub(crate) struct Checker {
    pub(crate) replay: Replay,
    ledger: Arc<Ledger>,
    checked: watch::Sender<i64>,
}

impl Checker {
    pub(crate) async fn begin(store: &Arc<dyn Store>, ledger: Arc<Ledger>) -> Result<Self, Failure> {
        let start = store.list(Range::All).await?;
        let replay = Replay::begin(&start.kvs, start.revision.get()).map_err(Failure)?;
        let checked = watch::Sender::new(replay.revision);
        Ok(Self { replay, ledger, checked })
    }

    pub(crate) fn progress(&self) -> watch::Receiver<i64> {
        self.checked.subscribe()
    }

    /// Spawns a task that checks the store's revisions while the workers run.
    pub(crate) fn in_the_background(mut self, store: &Arc<dyn Store>) -> Following {
        let (store, first) = (Arc::clone(store), self.replay.revision);
        let (set_goal, goal) = watch::channel(None);
        let task = tokio::spawn({
            let store = Arc::clone(&store);
            async move {
                let done = self.follow(&store, goal).await;
                (self, done)
            }
        });
        Following { store, first, set_goal, task }
    }

    /// Checks each new revision of the store, until the revision that was set in `goal` has been checked.
    ///
    /// # Errors
    /// The first violation that the checker found, or a store error that is not transient.
    pub(crate) async fn follow(
        &mut self,
        store: &Arc<dyn Store>,
        mut goal: watch::Receiver<Option<i64>>,
    ) -> Result<(), Failure> {
        loop {
            let start = Revision::new(self.replay.revision).next();
            let mut changes = match store.watch(WatchRequest::new(Range::All, start)).await {
                Ok(changes) => changes,
                Err(error) if error.kind().is_transient() => {
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            loop {
                let reached = goal.borrow_and_update().is_some_and(|goal| self.replay.revision >= goal);
                if reached {
                    return Ok(());
                }
                let batch = tokio::select! {
                    batch = changes.next() => batch,
                    // The sender of `goal` is dropped only after the run has found a violation.
                    changed = goal.changed() => match changed {
                        Ok(()) => continue,
                        Err(_) => return Ok(()),
                    },
                };
                match batch {
                    Some(Ok(batch)) => self.check(&batch)?,
                    Some(Err(error)) if matches!(error.kind(), ErrorKind::Disconnected { .. }) => break,
                    Some(Err(error)) => return Err(error.into()),
                    None => break,
                }
            }
        }
    }

    fn check(&mut self, batch: &kv::Batch) -> Result<(), Failure> {
        let revision = batch.revision.get();
        let changes = self.replay.advance(revision, &batch.events).inspect_err(|what| {
            self.ledger.violated(what.clone(), batch);
        });
        let changes = changes.map_err(|what| Failure(self.ledger.violation().unwrap_or(what)))?;
        self.ledger.follow(revision, changes, |container| self.replay.held_by(container));
        self.checked.send_replace(revision);
        self.ledger.violation().map_or(Ok(()), |what| Err(Failure(what + &changed(&batch.events))))
    }

    /// Checks that the replayed state equals the store's state, that every container was released, and that no
    /// documents remain in the store.
    pub(crate) async fn end(&self, store: &Arc<dyn Store>) -> Result<(), Failure> {
        let now = store.list(Range::All).await?;
        let stored = Replay::begin(&now.kvs, now.revision.get()).map_err(Failure)?;
        if stored.left() != self.replay.left() || stored.revision != self.replay.revision {
            return Err(Failure(format!(
                "replayed to revision {} there is {:?}; stored at {} is {:?}",
                self.replay.revision,
                self.replay.left(),
                stored.revision,
                stored.left()
            )));
        }
        self.ledger.close();
        let left = stored.left();
        if !left.is_empty() {
            return Err(Failure(format!("after the DEL of everything there is left: {left:?}")));
        }
        self.ledger.violation().map_or(Ok(()), |what| Err(Failure(what)))
    }
}

pub(crate) struct Following {
    store: Arc<dyn Store>,
    first: i64,
    set_goal: watch::Sender<Option<i64>>,
    task: JoinHandle<(Checker, Result<(), Failure>)>,
}

impl Following {
    /// Waits until the checker has checked all revisions, runs the final checks, and returns the number of checked
    /// revisions.
    ///
    /// The parameter `worked` is the result of the run's workload. The value in `worked`, for example a server, is
    /// dropped only after the checker has finished.
    ///
    /// # Errors
    /// The violation that the checker found, or else the failure of the run's workload.
    pub(crate) async fn end<T>(self, worked: Result<T, Failure>) -> Result<i64, Failure> {
        let goal = match &worked {
            Ok(_) => self.store.list(Range::All).await?.revision.get(),
            // The workload has failed and the run fails anyway, so the remaining revisions need not be checked.
            Err(_) => 0,
        };
        self.set_goal.send_replace(Some(goal));
        let (checker, followed) = self.task.await.map_err(|error| Failure(error.to_string()))?;
        followed?;
        checker.ledger.violation().map_or(Ok(()), |what| Err(Failure(what)))?;
        let _kept = worked?;
        checker.end(&self.store).await?;
        Ok(checker.replay.revision - self.first)
    }
}

const BLOCKS: &str = "/calico/ipam/v2/assignment/";
const HANDLES: &str = "/calico/ipam/v2/handle/";
const AFFINITIES: &str = "/calico/ipam/v2/host/";
/// A key that the model of Calico writes in each of its transactions, so that the checker recognizes them.
pub(crate) const CALICO_WAS_HERE: &str = "/torture/calico";

/// The fields of a block's JSON document that the checker needs.
#[derive(Clone, Debug, Deserialize)]
struct Block {
    cidr: String,
    affinity: Option<String>,
    allocations: Vec<Option<usize>>,
    unallocated: Vec<usize>,
    attributes: Option<Vec<Attribute>>,
    #[serde(rename = "sequenceNumber")]
    sequence_number: u64,
    deleted: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct Attribute {
    handle_id: String,
    secondary: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Handle {
    block: BTreeMap<String, i64>,
}

#[derive(Clone, Debug, Deserialize)]
struct Affinity {
    state: String,
}

type Counts = BTreeMap<String, BTreeMap<String, i64>>;

/// The state of a store at one revision, decoded from the documents.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    pub(crate) revision: i64,
    blocks: BTreeMap<String, Block>,
    /// The number of addresses that the handle documents count, by handle and block.
    counted: Counts,
    /// The number of addresses that the block documents record, by handle and block.
    held: Counts,
    /// The owner and the block of each affinity document.
    affine: BTreeSet<(String, String)>,
    /// The affinities that the model of Calico left behind when it deleted their blocks.
    abandoned: BTreeSet<(String, String)>,
}

/// The documents that one revision changed; they are compared with each other after all changes of this revision.
#[derive(Default)]
struct Touched {
    handles: BTreeSet<String>,
    blocks: BTreeSet<String>,
    affinities: BTreeSet<(String, String)>,
    changes: Vec<Change>,
    /// The blocks that one revision created.
    made: BTreeSet<String>,
    by_calico: bool,
}

impl Replay {
    /// Decodes the state of the store from all its rows at one revision.
    ///
    /// # Errors
    /// The first contradiction between the documents.
    pub(crate) fn begin(kvs: &[Kv], revision: i64) -> Result<Self, String> {
        let mut replay = Self { revision, ..Self::default() };
        let mut touched = Touched::default();
        for kv in kvs {
            replay.apply(&kv.key.to_string(), Some(kv.value.as_bytes()), &mut touched)?;
        }
        replay.compare(&touched)?;
        Ok(replay)
    }

    /// Applies the changes of the next revision to the replayed state. Returns the containers that got or lost an
    /// address in this revision.
    ///
    /// # Errors
    /// A contradiction in the new state, with the keys that the revision changed.
    fn advance(&mut self, revision: i64, events: &[Event]) -> Result<Vec<Change>, String> {
        let mut touched = Touched::default();
        let done = self.advance_all(revision, events, &mut touched);
        done.map_err(|what| format!("revision {revision}: {what}{}", changed(events)))?;
        Ok(touched.changes)
    }

    fn advance_all(&mut self, revision: i64, events: &[Event], touched: &mut Touched) -> Result<(), String> {
        if revision != self.revision + 1 {
            return Err(format!("it came after revision {}", self.revision));
        }
        self.revision = revision;
        touched.by_calico = events.iter().any(|event| event.kv.key.to_string() == CALICO_WAS_HERE);
        for event in events {
            let value = (event.kind == EventKind::Put).then(|| event.kv.value.as_bytes());
            self.apply(&event.kv.key.to_string(), value, touched)?;
        }
        self.compare(touched)
    }

    /// Returns the addresses that a container holds in the replayed state.
    fn held_by(&self, container: &str) -> Vec<IpAddr> {
        let handle = handle_of(container);
        let Some(blocks) = self.held.get(&handle) else { return Vec::new() };
        blocks.keys().filter_map(|cidr| self.blocks.get(cidr)).flat_map(|block| block.addresses_of(&handle)).collect()
    }

    /// Lists the blocks, handles and affinities that still exist in the replayed state.
    pub(crate) fn left(&self) -> Vec<String> {
        let blocks = self.blocks.keys().map(|cidr| format!("block {cidr}"));
        let handles = self.counted.keys().map(|id| format!("handle {id}"));
        let affinities = self.affine.iter().map(|(owner, cidr)| format!("affinity of {owner} to {cidr}"));
        blocks.chain(handles).chain(affinities).collect()
    }

    /// Applies the change of one key to the replayed state. For a deleted key, `value` is `None`.
    fn apply(&mut self, key: &str, value: Option<&[u8]>, touched: &mut Touched) -> Result<(), String> {
        if let Some(rest) = key.strip_prefix(BLOCKS) {
            let cidr = rest.rsplit('/').next().unwrap_or_default().replace('-', "/");
            let new = value.map(|value| parse::<Block>(key, value)).transpose()?;
            self.change_block(cidr, new, touched)
        } else if let Some(id) = key.strip_prefix(HANDLES) {
            touched.handles.insert(id.to_owned());
            match value.map(|value| parse::<Handle>(key, value)).transpose()? {
                Some(handle) => drop(self.counted.insert(id.to_owned(), handle.block)),
                None => drop(self.counted.remove(id)),
            }
            Ok(())
        } else if let Some(rest) = key.strip_prefix(AFFINITIES) {
            let (owner, cidr) = rest
                .split_once('/')
                .zip(rest.rsplit('/').next())
                .map(|((owner, _), cidr)| (owner, cidr))
                .ok_or("an odd key")?;
            let pair = (format!("host:{owner}"), cidr.replace('-', "/"));
            touched.affinities.insert(pair.clone());
            match value.map(|value| parse::<Affinity>(key, value)).transpose()? {
                Some(affinity) if affinity.state == "confirmed" => drop(self.affine.insert(pair)),
                Some(affinity) => return Err(format!("{key} is {}", affinity.state)),
                None => {
                    self.affine.remove(&pair);
                    self.abandoned.remove(&pair);
                }
            }
            Ok(())
        } else {
            Ok(())
        }
    }

    fn change_block(&mut self, cidr: String, new: Option<Block>, touched: &mut Touched) -> Result<(), String> {
        if let Some(new) = &new {
            new.check(&cidr)?;
        }
        let old = match new.clone() {
            Some(new) => self.blocks.insert(cidr.clone(), new),
            None => self.blocks.remove(&cidr),
        };
        if let (Some(old), Some(new)) = (&old, &new)
            && new.sequence_number != old.sequence_number + 1
        {
            return Err(format!("{cidr} went from sequence number {} to {}", old.sequence_number, new.sequence_number));
        }
        match (&old, &new) {
            (None, Some(_)) => drop(touched.made.insert(cidr.clone())),
            (Some(Block { affinity: Some(owner), .. }), None) if touched.by_calico => {
                self.abandoned.insert((owner.clone(), cidr.clone()));
            }
            _ => {}
        }
        let before = old.as_ref().map(Block::holders).unwrap_or_default();
        let after = new.as_ref().map(Block::holders).unwrap_or_default();
        for (ip, handle) in &before {
            if after.get(ip) != Some(handle) {
                touched.changes.push(Change::Taken(*ip, container_of(handle)));
            }
        }
        for (ip, handle) in &after {
            if before.get(ip) != Some(handle) {
                touched.changes.push(Change::Given(*ip, container_of(handle)));
            }
        }
        for handle in before.values().chain(after.values()) {
            touched.handles.insert(handle.clone());
            let count = i64::try_from(after.values().filter(|other| *other == handle).count()).unwrap_or(i64::MAX);
            let blocks = self.held.entry(handle.clone()).or_default();
            if count > 0 {
                blocks.insert(cidr.clone(), count);
            } else {
                blocks.remove(&cidr);
            }
            if blocks.is_empty() {
                self.held.remove(handle);
            }
        }
        for block in old.iter().chain(&new) {
            if let Some(owner) = &block.affinity {
                touched.affinities.insert((owner.clone(), cidr.clone()));
            }
        }
        touched.blocks.insert(cidr);
        Ok(())
    }

    /// Checks that the documents that a revision changed agree with each other.
    fn compare(&self, touched: &Touched) -> Result<(), String> {
        for handle in &touched.handles {
            let (held, counted) = (self.held.get(handle), self.counted.get(handle));
            if held != counted {
                return Err(format!("blocks hold {held:?} of handle {handle}, which counts {counted:?}"));
            }
        }
        for pair in &touched.affinities {
            let (owner, cidr) = pair;
            let owned = self.blocks.get(cidr).and_then(|block| block.affinity.as_ref()) == Some(owner);
            if owned != self.affine.contains(pair) && !self.abandoned.contains(pair) {
                let what = if owned { "has no affinity to" } else { "has an affinity to, and not," };
                return Err(format!("{owner} {what} the block {cidr}"));
            }
        }
        for cidr in &touched.made {
            let made: IpNet = cidr.parse().map_err(|error| format!("{cidr}: {error}"))?;
            let others = self.blocks.keys().filter(|other| *other != cidr).filter_map(|other| other.parse().ok());
            if let Some(other) = others.into_iter().find(|other: &IpNet| other.contains(&made) || made.contains(other))
            {
                return Err(format!("block {cidr} was made over block {other}"));
            }
        }
        for cidr in &touched.blocks {
            if let Some(block) = self.blocks.get(cidr)
                && block.affinity.is_none()
                && block.holders().is_empty()
            {
                return Err(format!("{cidr} is empty and has no owner"));
            }
        }
        Ok(())
    }
}

impl Block {
    /// Checks that the lists in the document of the block `cidr` agree with each other.
    fn check(&self, cidr: &str) -> Result<(), String> {
        let attributes = self.attributes.as_deref().unwrap_or_default();
        let allocated: BTreeSet<usize> =
            (0..self.allocations.len()).filter(|i| self.allocations[*i].is_some()).collect();
        let free: BTreeSet<usize> = self.unallocated.iter().copied().collect();
        let used: BTreeSet<usize> = self.allocations.iter().flatten().copied().collect();
        let all_name_node = attributes.iter().all(|entry| entry.secondary.contains_key("node"));
        let holds = [
            (self.cidr == cidr, "it says that it is another block"),
            (!self.deleted, "it says that it is deleted"),
            (Some(self.allocations.len()) == size_of(cidr), "it has not the addresses of its network"),
            (free.len() == self.unallocated.len(), "an ordinal is free twice"),
            (free.is_disjoint(&allocated), "an ordinal is free and allocated"),
            (free.len() + allocated.len() == self.allocations.len(), "an ordinal is neither free nor allocated"),
            (used == (0..attributes.len()).collect(), "attributes and allocations do not match"),
            (all_name_node, "an attribute names no node"),
        ];
        match holds.into_iter().find(|(holds, _)| !holds) {
            Some((_, what)) => Err(format!("{cidr}: {what}: {self:?}")),
            None => Ok(()),
        }
    }

    /// Returns each allocated address of the block with the handle that holds it.
    fn holders(&self) -> BTreeMap<IpAddr, String> {
        let entry = |index: usize| self.attributes.as_ref().and_then(|all| all.get(index));
        let slots = self.allocations.iter().enumerate();
        slots
            .filter_map(|(ordinal, index)| Some((self.address(ordinal)?, entry((*index)?)?.handle_id.clone())))
            .collect()
    }

    fn addresses_of(&self, handle: &str) -> Vec<IpAddr> {
        self.holders().into_iter().filter(|(_, holder)| holder == handle).map(|(ip, _)| ip).collect()
    }

    fn address(&self, ordinal: usize) -> Option<IpAddr> {
        let first = self.cidr.split_once('/')?.0.parse().ok()?;
        Some(match first {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + u32::try_from(ordinal).ok()?).into(),
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() + ordinal as u128).into(),
        })
    }
}

/// Returns the number of addresses in the CIDR `cidr`; `None` if the number is too large.
fn size_of(cidr: &str) -> Option<usize> {
    let net: IpNet = cidr.parse().ok()?;
    1_usize.checked_shl(u32::from(net.max_prefix_len() - net.prefix_len()))
}

pub(crate) fn changed(events: &[Event]) -> String {
    let key = |event: &Event| match event.kind {
        EventKind::Put if event.kv.version == 1 => format!("new {}", event.kv.key),
        EventKind::Put => format!("written {}", event.kv.key),
        EventKind::Delete => format!("deleted {}", event.kv.key),
    };
    format!("\n  changed: {}", events.iter().map(key).collect::<Vec<_>>().join(", "))
}

/// Returns the handle of a container in the test network `net`.
fn handle_of(container: &str) -> String {
    format!("net.{container}")
}

fn container_of(handle: &str) -> String {
    handle.strip_prefix("net.").unwrap_or(handle).to_owned()
}

fn parse<T: for<'de> Deserialize<'de>>(key: &str, value: &[u8]) -> Result<T, String> {
    serde_json::from_slice(value).map_err(|error| format!("{key}: {error}"))
}

#[cfg(test)]
mod tests {
    use kv::Revision;

    use super::*;

    const BLOCK: &str = "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0-29";
    const HANDLE: &str = "/calico/ipam/v2/handle/net.c";
    const AFFINITY: &str = "/calico/ipam/v2/host/n/ipv4/block/10.0.0.0-29";

    /// The document of a block in which the container `c` holds the third address.
    const HELD: &str = r#"{"cidr":"10.0.0.0/29","affinity":"host:n","allocations":[null,null,0,null,null,null,null,null],
        "unallocated":[3,4,5,6,7,0,1],"attributes":[{"handle_id":"net.c","secondary":{"node":"n"}}],
        "sequenceNumber":8,"deleted":false}"#;
    const COUNTED: &str = r#"{"block":{"10.0.0.0/29":1},"deleted":false}"#;
    const CONFIRMED: &str = r#"{"state":"confirmed","deleted":false}"#;

    fn event(key: &str, value: Option<&str>) -> Event {
        let kv = Kv {
            key: key.into(),
            value: value.unwrap_or_default().into(),
            create_revision: Revision::new(2),
            mod_revision: Revision::new(2),
            version: 1,
            lease: None,
        };
        Event { kind: if value.is_some() { EventKind::Put } else { EventKind::Delete }, kv, prev: None }
    }

    /// A consistent state at revision 2, in which the container `c` holds one address.
    fn held() -> Replay {
        let mut replay = Replay::begin(&[], 1).unwrap();
        let all = [event(BLOCK, Some(HELD)), event(HANDLE, Some(COUNTED)), event(AFFINITY, Some(CONFIRMED))];
        let changes = replay.advance(2, &all).unwrap();
        assert_eq!(changes, [Change::Given("10.0.0.2".parse().unwrap(), "c".into())]);
        assert_eq!(replay.held_by("c").len(), 1);
        replay
    }

    /// Applies the next revision to the state that [`held`] builds, and returns the violation that the checker must
    /// find.
    fn said(events: &[(&str, Option<&str>)]) -> String {
        let mut events: Vec<Event> = events.iter().map(|(key, value)| event(key, *value)).collect();
        // Sets the key version of each event to 2, so that the checker treats the event as a change of an existing key.
        events.iter_mut().for_each(|event| event.kv.version = 2);
        held().advance(3, &events).unwrap_err()
    }

    #[test]
    fn checker_allows_all_to_go_together() {
        let mut replay = held();
        let changes = replay.advance(3, &[event(BLOCK, None), event(HANDLE, None), event(AFFINITY, None)]).unwrap();
        assert_eq!(changes, [Change::Taken("10.0.0.2".parse().unwrap(), "c".into())]);
        assert!(replay.left().is_empty());
    }

    #[test]
    fn checker_sees_one_without_others() {
        assert!(said(&[(HANDLE, None)]).contains("blocks hold"));
        assert!(said(&[(HANDLE, Some(&COUNTED.replace('1', "2")))]).contains("blocks hold"));
        assert!(said(&[(AFFINITY, None)]).contains("host:n has no affinity to"));
        assert!(said(&[(AFFINITY, Some(&CONFIRMED.replace("confirmed", "pending")))]).contains("is pending"));
        let other = AFFINITY.replace("/n/", "/m/");
        assert!(said(&[(&other, Some(CONFIRMED))]).contains("host:m has an affinity to, and not,"));
        assert!(said(&[(BLOCK, None)]).contains("blocks hold None"));
        assert!(said(&[(BLOCK, None), (HANDLE, None)]).contains("and not,"));
        let released = HELD.replace("null,null,0,", "null,null,null,").replace("[3,4", "[2,3,4").replace(":8", ":9");
        let released = released.replace(r#"[{"handle_id":"net.c","secondary":{"node":"n"}}]"#, "[]");
        assert!(said(&[(BLOCK, Some(&released))]).contains("blocks hold None"));
        let unowned = released.replace(r#""host:n""#, "null");
        let said = said(&[(BLOCK, Some(&unowned)), (HANDLE, None), (AFFINITY, None)]);
        assert!(said.contains("is empty and has no owner") && said.contains("changed: written "), "{said}");
    }

    #[test]
    fn checker_sees_block_that_contradicts_itself() {
        let block = |from: &str, to: &str| said(&[(BLOCK, Some(&HELD.replace(":8", ":9").replace(from, to)))]);
        assert!(block("[3,4", "[3,3,4").contains("free twice"));
        assert!(block("[3,4", "[2,3,4").contains("free and allocated"));
        assert!(block("[3,4", "[4").contains("neither free nor allocated"));
        assert!(
            block("\"attributes\":[", "\"attributes\":[{\"handle_id\":\"x\",\"secondary\":{\"node\":\"n\"}},")
                .contains("match")
        );
        assert!(block("{\"node\":\"n\"}", "{}").contains("names no node"));
        assert!(block("10.0.0.0/29", "10.0.0.8/29").contains("another block"));
        assert!(block(":9", ":10").contains("sequence number 8 to 10"));
        assert!(block("{", "").contains("expected"));
    }

    #[test]
    fn checker_sees_revision_left_out() {
        assert!(held().advance(4, &[]).unwrap_err().contains("it came after revision 2"));
    }
}
