//! Looking through everything that IPAM keeps, and the workload endpoints beside it, and mending what can be mended without a
//! guess.
//!
//! All of an inspection is of one revision. It takes no lock and changes nothing, so that it can be made at any time; a
//! foreign writer that changes one key after the other can be seen half-way. [`Operator::mend`] is for a finding that is
//! still there: it reads again, and commits only if nothing of it has changed.
//!
//! A fault is a [`Finding`] with a [`Code`]. An inspection never guesses the user of an address: no repair frees
//! one that is allocated.

mod block_facts;
mod blocks;
mod code;
mod endpoints;
mod finding;
mod handles;
mod mend;
mod mend_handle;
mod reclaim;
mod secondary;
mod surroundings;
mod workloads;

use ipam_core::Result;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::usage::{Reading, reread};
use kv::{Content, Deadline, Key, Kv, Range, Revision};
use time::OffsetDateTime;

pub use code::{Code, Severity, UnknownCode};
pub use finding::{AllocatedAddress, Cluster, Counts, Finding, Inspection, LeakedHandle, Subject};
pub use mend::Mended;
pub use reclaim::{HandleRevision, Reclaimed};

use crate::Operator;
use block_facts::Blocks;
use endpoints::Endpoints;
use handles::Handles;
use secondary::Secondary;
use surroundings::Surroundings;
use workloads::Workloads;

/// Whether an inspection tells every address that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// It tells findings and numbers only.
    Findings,
    /// It tells the addresses, too, which takes far more memory.
    Addresses,
}

/// An inspection that is being made. It is given every key of [`Inspector::ranges`] at one revision, range after range
/// and each in the order of its keys, and keeps little of them.
#[derive(Debug)]
pub struct Inspector {
    now: OffsetDateTime,
    keep: Keep,
    around: Surroundings,
    blocks: Blocks,
    handles: Handles,
    secondary: Secondary,
    endpoints: Endpoints,
    workloads: Workloads,
    done: Inspection,
}

impl Inspector {
    /// An inspection at this time.
    pub fn new(now: OffsetDateTime, keep: Keep) -> Self {
        Self {
            now,
            keep,
            around: Surroundings::default(),
            blocks: Blocks::default(),
            handles: Handles::default(),
            secondary: Secondary::default(),
            endpoints: Endpoints::default(),
            workloads: Workloads::default(),
            done: Inspection::default(),
        }
    }

    /// The ranges to read, in this order.
    pub fn ranges() -> Vec<Range> {
        let resources = [ResourceKind::IpPool, ResourceKind::IpReservation, ResourceKind::Node];
        let mut ranges = vec![Range::Key(keys::config()), Range::Key(keys::cluster_information())];
        ranges.extend(resources.map(|kind| Range::Prefix(keys::resources_prefix(kind))));
        ranges.push(Range::Prefix(keys::workload_endpoints_prefix()));
        // Blocks, the configuration once more, handles, affinities.
        ranges.push(Range::Prefix(keys::ipam_prefix()));
        ranges.push(Range::Prefix(keys::sticky_prefix()));
        ranges
    }

    /// Takes the next key.
    pub fn add(&mut self, kv: &Kv) {
        let (key, value) = (&kv.key, kv.value.as_bytes());
        if self.around.add(kv, &mut self.done) {
            return;
        }
        if let Some(cidr) = keys::parse_block(key) {
            self.add_block(cidr, key, value);
        } else if let Some(id) = keys::parse_handle(key) {
            self.done.counts.handles += 1;
            self.handles.compare(id, kv, &self.blocks, &mut self.done);
        } else if let Some((owner, cidr)) = keys::parse_affinity(key) {
            self.done.counts.affinities += 1;
            let pool = self.around.pool_of(cidr);
            self.blocks.compare_affinity((&owner, cidr), pool, kv, &mut self.done.findings);
        } else if let Some(name) = keys::parse_sticky(key) {
            self.workloads.compare(name, kv, &self.blocks, &mut self.done);
        } else if !self.endpoints.add(kv, &self.around, &mut self.done) && keys::parse_legacy_host(key).is_none() {
            self.done.findings.push(unknown(key));
        }
    }

    /// Ends it. `revision` is the one that was read.
    pub fn finish(mut self, revision: Revision) -> Inspection {
        self.around.finish(&mut self.done);
        self.blocks.finish(&mut self.done);
        self.handles.finish(&self.blocks, &mut self.done);
        self.workloads.finish(&self.blocks, &mut self.done);
        self.secondary.finish(&mut self.done.findings);
        self.endpoints.finish(&self.around, &mut self.done.findings);
        self.done.revision = revision;
        self.done.findings.sort_unstable();
        self.done
    }
}

fn unknown(key: &Key) -> Finding {
    Finding::new(Code::UnknownKey, Subject::Key(key.to_string()), "nothing of IPAM is kept under this key")
}

impl Operator {
    /// Looks through everything, at one revision and in pages.
    ///
    /// # Errors
    /// Those of the store; `Timeout` after the deadline.
    pub async fn inspect(&self, keep: Keep, deadline: Deadline) -> Result<Inspection> {
        Ok(reread(|| self.read_for_inspection(keep, deadline)).await?)
    }

    /// An inspection for somebody who reads the store in a way of their own.
    pub fn inspector(&self, keep: Keep) -> Inspector {
        Inspector::new(self.ipam().now(), keep)
    }

    async fn read_for_inspection(&self, keep: Keep, deadline: Deadline) -> kv::Result<Inspection> {
        let mut inspector = self.inspector(keep);
        let mut reading = Reading::new(deadline);
        for range in Inspector::ranges() {
            self.ipam().each(range, Content::Full, &mut reading, |kv| inspector.add(kv)).await?;
        }
        Ok(inspector.finish(reading.at))
    }
}
