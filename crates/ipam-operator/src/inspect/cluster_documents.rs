//! Collects and checks the documents that an inspection needs to judge blocks: settings, pools, reservations and nodes.

use std::collections::BTreeSet;

use ipam_core::assign::{bridge, define};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{
    AssignmentMode, Document, IpReservation, IpamConfig, Malformed, Node, Pool, check_stored_pool, without_tunnels,
};
use ipam_core::net::{Family, overlap};
use ipam_core::reservations::Reservations;
use ipam_core::selector::Selector;
use ipnet::IpNet;
use kv::Kv;

use super::finding::{ClusterFacts, Code, Finding, Inspection, Subject};

/// The settings, pools, reservations and nodes of the store, which an inspection reads before the blocks.
#[derive(Debug, Default)]
pub(super) struct ClusterDocuments {
    config: Option<IpamConfig>,
    /// The readable pools, sorted by name.
    pub(super) pools: Vec<Pool>,
    reservations: Vec<IpReservation>,
    reserved: Option<Reservations>,
    /// The names of the registered nodes.
    pub(super) nodes: BTreeSet<String>,
}

impl ClusterDocuments {
    /// Adds a document if its key is that of the settings, the cluster information, a pool, a reservation or a node.
    /// Returns false, and adds nothing, if the key is that of another kind of document, such as a block.
    pub(super) fn add(&mut self, kv: &Kv, done: &mut Inspection) -> bool {
        if kv.key == keys::config() {
            self.add_config(kv, &mut done.findings);
        } else if kv.key == keys::cluster_information() {
            done.cluster = Some(cluster(kv));
        } else if let Some(name) = keys::parse_resource(ResourceKind::IpPool, &kv.key) {
            self.add_pool(name, kv, &mut done.findings);
        } else if let Some(name) = keys::parse_resource(ResourceKind::IpReservation, &kv.key) {
            let read = IpReservation::decode(&kv.key, kv.value.as_bytes());
            let subject = Subject::Reservation(name.to_owned());
            self.reservations.extend(or_find(read, Code::UnreadableReservation, subject, &mut done.findings));
        } else if let Some(name) = keys::parse_resource(ResourceKind::Node, &kv.key) {
            // A node whose document cannot be read is still registered.
            self.nodes.insert(name.to_owned());
            let read = Node::decode(&kv.key, kv.value.as_bytes());
            or_find(read, Code::UnreadableNode, Subject::Node(name.to_owned()), &mut done.findings);
        } else {
            return false;
        }
        true
    }

    pub(super) fn cooldown_seconds(&self) -> i64 {
        self.config.as_ref().map_or(0, IpamConfig::cooldown_seconds)
    }

    /// The addresses of all reservations. The set of reserved addresses is computed on the first call. Add all
    /// reservations before calling this.
    pub(super) fn reserved(&mut self) -> &Reservations {
        self.reserved.get_or_insert_with(|| Reservations::from_documents(&self.reservations).0)
    }

    /// True if a node is not registered although other nodes are registered. In a store without registered nodes, no
    /// node counts as gone.
    pub(super) fn is_gone(&self, node: &str) -> bool {
        !self.nodes.is_empty() && !self.nodes.contains(node)
    }

    /// The pool that contains the block with this CIDR.
    pub(super) fn pool_of(&self, cidr: IpNet) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.cidr().contains(&cidr))
    }

    /// True if a secondary network has used the pool, and Calico assigns from the pool only if a request names it.
    pub(super) fn is_bridged(&self, pool: &Pool) -> bool {
        let name = bridge::reservation_name(pool.name());
        pool.assignment_mode() == AssignmentMode::Manual
            && self.reservations.iter().any(|reservation| reservation.name() == name)
    }

    /// Compares the pools and reservations with each other, and adds the numbers of pools, reservations and nodes to
    /// the inspection.
    pub(super) fn finish(&self, done: &mut Inspection) {
        done.counts.pools = self.pools.len();
        done.counts.reservations = self.reservations.len();
        done.counts.nodes = self.nodes.len();
        done.pools = self.pools.iter().map(|pool| (pool.name().to_owned(), pool.cidr())).collect();
        let lengths = self.pools.iter().filter_map(|pool| Some((pool.cidr(), pool.prefix_length()?)));
        done.prefix_lengths = lengths.collect();
        let findings = &mut done.findings;
        self.find_overlaps(findings);
        for skipped in Reservations::from_documents(&self.reservations).1 {
            let what = format!("{} reserves nothing", skipped.entry);
            findings.push(Finding::new(Code::OddReservation, Subject::Reservation(skipped.reservation), what));
        }
        for pool in &self.pools {
            findings.extend(self.unreserved(pool));
        }
    }

    fn add_config(&mut self, kv: &Kv, findings: &mut Vec<Finding>) {
        if self.config.is_some() {
            return;
        }
        let subject = || Subject::Key(kv.key.to_string());
        let read = IpamConfig::decode(&kv.key, kv.value.as_bytes());
        let config = or_find(read, Code::UnreadableConfig, subject(), findings).unwrap_or_default();
        if let Err(error) = config.check() {
            findings.push(Finding::new(Code::ContradictoryConfig, subject(), error.to_string()));
        }
        self.config = Some(config);
    }

    fn add_pool(&mut self, name: &str, kv: &Kv, findings: &mut Vec<Finding>) {
        let subject = || Subject::Pool(name.to_owned());
        let read = Pool::decode(&kv.key, kv.value.as_bytes());
        let Some(pool) = or_find(read, Code::UnreadablePool, subject(), findings) else { return };
        let (cidr, size) = (pool.cidr(), pool.block_size());
        let is_size = pool.prefix_length().is_some() || Family::of_net(cidr).block_sizes().contains(&size);
        let known = findings.len();
        if !is_size || size < cidr.prefix_len() {
            let what = format!("a pool {cidr} cannot have blocks of /{size}");
            findings.push(Finding::new(Code::BrokenPool, subject(), what));
        }
        for (of, text) in [("node", pool.node_selector()), ("namespace", pool.namespace_selector())] {
            if let Err(error) = text.parse::<Selector>() {
                let what = format!("its {of} selector {text:?}: {error}");
                findings.push(Finding::new(Code::BrokenSelector, subject(), what));
            }
        }
        if let Some(error) = check_stored_pool(&pool).err().filter(|_| findings.len() == known) {
            let mendable = without_tunnels(&pool).is_some_and(|changed| check_stored_pool(&changed).is_ok());
            findings.push(Finding::new(Code::UnmanageablePool, subject(), error.to_string()).mendable(mendable));
        }
        self.pools.push(pool);
    }

    fn find_overlaps(&self, findings: &mut Vec<Finding>) {
        for (index, pool) in self.pools.iter().enumerate() {
            for other in self.pools.iter().take(index).filter(|other| overlap(other.cidr(), pool.cidr())) {
                let what = format!("{} has addresses of {} ({})", pool.cidr(), other.name(), other.cidr());
                findings.push(Finding::new(Code::PoolsOverlap, Subject::Pool(pool.name().to_owned()), what));
            }
        }
    }

    /// Reports missing reservations in the pool of a bridged network. A pool without any reservation is not reported,
    /// because only a reservation shows that the pool belongs to a bridged network.
    fn unreserved(&self, pool: &Pool) -> Option<Finding> {
        let named = |name: String| self.reservations.iter().find(|reservation| reservation.name() == name);
        match named(bridge::reservation_name(pool.name())) {
            Some(document) => {
                let missing = lacking(pool, document);
                let what = format!("{} of pool {} are not reserved", list(&missing), pool.name());
                let subject = Subject::Reservation(document.name().to_owned());
                (!missing.is_empty()).then(|| Finding::new(Code::BridgeHalfReserved, subject, what).mendable(true))
            }
            None => {
                let ends = bridge::reserved(pool.cidr(), None);
                named(define::reservation_name(pool.name())).filter(|_| !ends.is_empty())?;
                let what = format!("nothing keeps {} and its gateway free", list(&ends));
                Some(Finding::new(Code::BridgeUnreserved, Subject::Pool(pool.name().to_owned()), what))
            }
        }
    }
}

/// The addresses that a bridged network's reservation should cover but does not.
pub(super) fn lacking(pool: &Pool, reservation: &IpReservation) -> Vec<IpNet> {
    let reserved = Reservations::from_documents([reservation]).0;
    let mut wanted = bridge::reserved(pool.cidr(), bridge::recorded_gateway(reservation));
    wanted.retain(|net| !reserved.covers(*net));
    wanted
}

fn list(nets: &[IpNet]) -> String {
    nets.iter().map(|net| net.addr().to_string()).collect::<Vec<_>>().join(", ")
}

/// Returns the decoded document, or adds a finding and returns `None` if the document cannot be decoded.
fn or_find<D>(read: Result<D, Malformed>, code: Code, subject: Subject, findings: &mut Vec<Finding>) -> Option<D> {
    read.map_err(|error| findings.push(Finding::new(code, subject, error.reason()))).ok()
}

fn cluster(kv: &Kv) -> ClusterFacts {
    let document: serde_json::Value = serde_json::from_slice(kv.value.as_bytes()).unwrap_or_default();
    let spec = &document["spec"];
    let text = |field: &str| spec[field].as_str().unwrap_or_default().to_owned();
    ClusterFacts {
        guid: text("clusterGUID"),
        kind: text("clusterType"),
        locked: spec["datastoreReady"] == false,
        revision: kv.mod_revision,
    }
}
