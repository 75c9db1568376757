//! A test node and its etcd members: runs plugin calls on the node, and reads their pending commits and outcomes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use agent::{PENDING_COMMITS_FOLDER, PendingCommitFolder};
use datastore::Create;
use ipam_core::affinity::ReleaseIf;
use ipam_core::attachment::Attachment;
use ipam_core::model::{Owner, keys};
use ipam_core::pending_commits::PendingCommit;
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Op, StoreExt};
use serde_json::Value;

use super::inside::until_disconnected;
use super::plan::HostLocks;
use crate::lab::{Lab, runtime};
use crate::process::{Call, Outcome};
use crate::server::Etcd;
use crate::victim::Victim;

const NODE: &str = "node-1";
const WAIT: Duration = Duration::from_secs(60);
/// Maximum number of times that a plugin call is repeated in a test round.
const ATTEMPTS: usize = 100;

/// A node whose plugins query a chosen etcd member before the other members.
#[derive(Debug)]
pub(super) struct Host<'a> {
    lab: &'a Lab,
    /// The indexes of the etcd members, in the order in which plugins query them.
    order: Vec<usize>,
    notes: PendingCommitFolder,
    locks: HostLocks,
}

/// A plugin call that was repeated until it succeeded.
#[derive(Debug, Default)]
pub(super) struct Settled {
    /// The addresses in the result of an ADD; empty for a DEL.
    pub(super) addresses: Vec<IpAddr>,
    /// How many times the plugin call has logged that it sends a pending commit again.
    pub(super) sent_again: usize,
    /// The number of failed attempts of the plugin call before the successful attempt.
    pub(super) failed: usize,
}

impl<'a> Host<'a> {
    pub(super) fn new(lab: &'a Lab, first: usize, locks: HostLocks) -> Self {
        let count = lab.etcds.len();
        let order: Vec<usize> = (0..count).map(|step| (first + step) % count).collect();
        let hosts: Vec<_> = order.iter().map(|place| lab.etcds[*place].address().to_string()).collect();
        let store = stores::at(&format!("etcd://{}", hosts.join(","))).unwrap();
        Self { lab, order, notes: PendingCommitFolder::new(PENDING_COMMITS_FOLDER, store.to_string()), locks }
    }

    /// Returns the etcd member that plugins query first, which is the member that the test stops.
    pub(super) fn stopped(&self) -> &Etcd {
        &self.lab.etcds[self.order[0]]
    }

    /// Returns the index of an etcd member that the test does not stop, if there are several members.
    pub(super) fn other_place(&self) -> usize {
        *self.order.last().unwrap()
    }

    fn conf(&self, container: &str) -> Value {
        let urls: Vec<_> = self.order.iter().map(|place| self.lab.etcds[*place].url()).collect();
        let mut conf = self.lab.conf_at(&urls);
        conf["datastore_timeout"] = 1.into();
        if self.locks == HostLocks::Apart {
            conf["ipam_lock_file"] = self.lab.root.path().join(container).to_str().unwrap().into();
        }
        conf
    }

    pub(super) fn call(&self, verb: &str, container: &str) -> Call {
        Call::new(verb, container, &self.conf(container))
    }

    pub(super) fn start(&self, container: &str) -> Victim {
        Victim::start(self.call("ADD", container), Path::new("/no-such-store"))
    }

    /// Repeats a plugin call until it succeeds, as runtimes do.
    pub(super) fn settle(&self, verb: &str, container: &str) -> Result<Settled, String> {
        let call = self.call(verb, container);
        let mut settled = Settled::default();
        let mut last: Option<Outcome> = None;
        while settled.failed < ATTEMPTS {
            let outcome = call.run();
            settled.sent_again +=
                outcome.stderr.matches("an earlier assignment was interrupted; sending its commit again").count();
            if outcome.exit == 0 {
                settled.addresses = if verb == "ADD" { outcome.addresses() } else { Vec::new() };
                return Ok(settled);
            }
            settled.failed += 1;
            last = Some(outcome);
        }
        Err(format!("{verb} of {container} has failed {ATTEMPTS} times: {last:?}"))
    }

    pub(super) fn noted(&self, container: &str) -> Vec<PendingCommit> {
        let text = str::to_owned;
        let (network, container) = (text("net1"), text(container));
        let attachment = Attachment { network, container, interface: text("eth0"), node: text(NODE), boot: None };
        self.notes.recorded_here(&attachment).unwrap()
    }

    /// Runs a store operation through one particular etcd member.
    fn through<T>(&self, member: &Etcd, work: impl AsyncFnOnce(&Ipam) -> Option<T>) -> Option<T> {
        let location = stores::at(&format!("etcd://{}", member.address())).unwrap();
        runtime().block_on(async {
            let open = datastore::open(&location, &Create::Never.with_wait(WAIT)).await.unwrap();
            let done = work(&Ipam::new(open.store(), Nodes::Registered)).await;
            open.close().await.unwrap();
            done
        })
    }

    /// Releases the node's empty blocks through an etcd member that keeps running.
    pub(super) fn give_back(&self) {
        let owner = Owner::host(NODE);
        let given = self.through(&self.lab.etcds[self.other_place()], async |ipam| {
            ipam.release_all_affinities(&owner, ReleaseIf::Empty, Deadline::after(WAIT)).await.ok()
        });
        assert!(given.is_some(), "the blocks of the node could not be released");
    }

    /// Waits until the etcd member that was stopped has forwarded all its received requests, and has applied all
    /// commits. The test waits until a write through the resumed member succeeds: etcd orders this write after all
    /// earlier requests.
    pub(super) fn until_all_has_landed(&self) {
        until_disconnected(self.stopped());
        let until = Instant::now() + WAIT;
        let write = async |ipam: &Ipam| ipam.store().put("/margay-late/barrier", "").await.ok();
        while self.through(self.stopped(), write).is_none() {
            assert!(Instant::now() < until, "the member that was stopped does not serve again");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Checks that the given containers hold exactly the given addresses, and that no other address is held.
    pub(super) fn check(&self, expected: &BTreeMap<&str, Vec<IpAddr>>) -> Result<(), String> {
        // `books` panics unless the store's blocks, handles and affinities agree.
        let held = self.lab.books().held;
        for (container, addresses) in expected {
            let handle = format!("net1.{container}");
            let has: Vec<_> = held.iter().filter(|(_, holder)| **holder == handle).map(|(ip, _)| *ip).collect();
            if has != *addresses {
                return Err(format!("LEAKED: {container} is to have {addresses:?}, and {has:?} is there"));
            }
            if !self.noted(container).is_empty() {
                return Err(format!("a note about {container} is left"));
            }
        }
        let wanted: usize = expected.values().map(Vec::len).sum();
        if held.len() == wanted { Ok(()) } else { Err(format!("LEAKED: there is {held:?}, of which nothing is known")) }
    }
}

/// Returns bytes that etcd's log contains only if this pending commit was sent: the block document with the new
/// address.
pub(super) fn mark_of(note: &PendingCommit) -> Vec<u8> {
    let block = note.txn.success.iter().find_map(|op| match op {
        Op::Put { key, value, .. } => keys::parse_block(key).map(|_| value.as_bytes().to_vec()),
        _ => None,
    });
    block.unwrap_or_else(|| panic!("a commit without a block: {note:?}"))
}
