//! Networks that are not Calico's, in a store that Calico reads: which blocks and addresses of theirs Calico acts on.
//!
//! An address with our name of the node is of such a network, and so is every other address of the same network. Of an
//! address from before there were such names nothing more is known until its network has assigned one anew, somewhere in
//! the cluster.

use std::collections::{BTreeMap, BTreeSet};

use ipam_core::attachment::{NAMESPACE, NETWORK, NODE, OWN_NODE, POD};
use ipam_core::model::{Block, Owner};
use ipnet::IpNet;

use super::code::Code;
use super::finding::{Finding, Subject, addresses};

/// The memory of the blocks.
#[derive(Debug, Default)]
pub(super) struct Secondary {
    /// The networks that are known not to be Calico's.
    known: BTreeSet<String>,
    notes: Vec<Note>,
}

/// A block in which one of such a network may be.
#[derive(Debug)]
struct Note {
    cidr: IpNet,
    is_nodes: bool,
    /// Whether a network that is not Calico's has used the block's pool.
    is_bridged: bool,
    /// How many addresses carry our names.
    own: u64,
    /// How many addresses carry Calico's names and the network's.
    calicos: BTreeMap<String, u64>,
    /// How many addresses name no network: Calico's program has assigned them.
    nameless: u64,
}

impl Secondary {
    /// Looks at a block.
    pub(super) fn add(&mut self, block: &Block, is_bridged: bool) {
        let is_nodes = matches!(block.owner(), Some(Owner::Host(name)) if !name.is_empty());
        let mut note = Note { cidr: block.cidr(), is_nodes, is_bridged, own: 0, calicos: BTreeMap::new(), nameless: 0 };
        for (_, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            let network = entry.get(NETWORK);
            if entry.get(OWN_NODE).is_some() {
                note.own += 1;
                if let Some(network) = network.filter(|network| !self.known.contains(*network)) {
                    self.known.insert(network.to_owned());
                }
            }
            let names_of_calicos = [NODE, POD, NAMESPACE].iter().any(|name| entry.get(name).is_some());
            match network {
                Some(network) if names_of_calicos => *note.calicos.entry(network.to_owned()).or_default() += 1,
                None if entry.get(OWN_NODE).is_none() => note.nameless += 1,
                _ => {}
            }
        }
        // Most blocks of a cluster are Calico's alone.
        if note.own > 0 || !note.calicos.is_empty() {
            self.notes.push(note);
        }
    }

    /// Says what is wrong, now that all networks are known.
    pub(super) fn finish(&self, findings: &mut Vec<Finding>) {
        for note in &self.notes {
            findings.extend(self.names(note));
            findings.extend(self.owner(note));
        }
    }

    /// Addresses that kube-controllers may release.
    fn names(&self, note: &Note) -> Option<Finding> {
        let known: Vec<(&String, &u64)> = note.calicos.iter().filter(|(name, _)| self.known.contains(*name)).collect();
        let count: u64 = known.iter().map(|(_, count)| **count).sum();
        let networks: Vec<String> = known.into_iter().map(|(name, _)| name.clone()).collect();
        let what = format!("{} of {}", addresses(count), networks.join(", "));
        let finding = Finding::new(Code::CalicosNames, Subject::Block(note.cidr), what);
        (count > 0).then(|| finding.mendable(true).with_networks(networks))
    }

    /// A node's own block that should not be.
    fn owner(&self, note: &Note) -> Option<Finding> {
        let (networks, others): (Vec<&String>, Vec<&String>) =
            note.calicos.keys().partition(|network| self.known.contains(*network));
        let networks: Vec<String> = networks.into_iter().cloned().collect();
        let is_of_known = note.own > 0 || !networks.is_empty();
        if !note.is_nodes || !(is_of_known || (note.is_bridged && note.nameless == 0)) {
            return None;
        }
        let (code, what) = match (&others[..], note.nameless) {
            ([], 0) => (Code::SecondaryOfNode, "all of its addresses are of such networks".to_owned()),
            (others, 0) if !is_of_known => {
                let names = others.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
                (Code::SecondaryOfNode, format!("whether {names} is Calico's is not known"))
            }
            (others, nameless) => {
                let count: u64 = others.iter().filter_map(|name| note.calicos.get(*name)).sum();
                (Code::MixedBlock, format!("{} of it may be Calico's", addresses(count + nameless)))
            }
        };
        let finding = Finding::new(code, Subject::Block(note.cidr), what);
        Some(finding.mendable(others.is_empty()).with_networks(networks))
    }
}
