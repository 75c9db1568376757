//! A model of the part of Calico's kube-controllers that releases addresses which nobody uses.
//!
//! It looks at each address that is recorded with a node, a pod and a namespace. One whose pod is gone, or whose pod does not
//! have it, is a candidate, and if it still is so a while later it is released by address, handle and sequence number. The
//! controller remembers the record of an address as it first saw it, also when the record has changed since.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use kv::{Range, StoreExt};

use crate::calico::Calico;
use crate::documents::{BLOCKS, Block};

/// How often it sees a candidate before it releases it: a quarter of an hour.
const GRACE: usize = 3;

/// The pods of the cluster, by name, with the addresses that their status shows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pods(Arc<Mutex<BTreeMap<String, BTreeSet<IpAddr>>>>);

impl Pods {
    /// A pod is created, and has no address yet.
    pub(crate) fn create(&self, name: &str) {
        self.0.lock().unwrap().insert(name.to_owned(), BTreeSet::new());
    }

    /// The kubelet writes down what the pod's first network has given it.
    pub(crate) fn report(&self, name: &str, addresses: impl IntoIterator<Item = IpAddr>) {
        self.0.lock().unwrap().entry(name.to_owned()).or_default().extend(addresses);
    }

    /// A pod is deleted.
    pub(crate) fn delete(&self, name: &str) {
        self.0.lock().unwrap().remove(name);
    }

    /// Whether a pod may have an address.
    fn may_have(&self, name: &str, ip: IpAddr) -> bool {
        self.0.lock().unwrap().get(name).is_some_and(|addresses| addresses.is_empty() || addresses.contains(&ip))
    }
}

/// An address as it was first seen.
#[derive(Clone, Debug)]
struct Seen {
    cidr: String,
    number: u64,
    pod: Option<String>,
    candidate: usize,
}

/// The controller.
pub(crate) struct KubeControllers {
    pods: Pods,
    seen: BTreeMap<(String, IpAddr), Seen>,
}

impl KubeControllers {
    pub(crate) fn new(pods: Pods) -> Self {
        Self { pods, seen: BTreeMap::new() }
    }

    /// Looks once, and releases what it is sure of: the addresses, with their handles.
    pub(crate) async fn look(&mut self, calico: &Calico) -> Vec<(IpAddr, String)> {
        let listed = calico.store.list(Range::Prefix(BLOCKS.into())).await.unwrap();
        let blocks: Vec<Block> =
            listed.kvs.iter().map(|kv| serde_json::from_slice(kv.value.as_bytes()).unwrap()).collect();
        let mut there = BTreeSet::new();
        for block in &blocks {
            for (ip, handle, recorded) in block.held() {
                let key = (handle.to_owned(), ip);
                there.insert(key.clone());
                let is_pods = ["node", "pod", "namespace"].iter().all(|name| recorded.contains_key(*name));
                self.seen.entry(key).or_insert_with(|| Seen {
                    cidr: block.cidr.clone(),
                    number: block.sequence_number_of(ip).unwrap_or_default(),
                    pod: is_pods.then(|| recorded["pod"].clone()),
                    candidate: 0,
                });
            }
        }
        self.seen.retain(|key, _| there.contains(key));
        let mut leaked = Vec::new();
        for ((handle, ip), seen) in &mut self.seen {
            let Some(pod) = &seen.pod else { continue };
            seen.candidate = if self.pods.may_have(pod, *ip) { 0 } else { seen.candidate + 1 };
            if seen.candidate >= GRACE {
                leaked.push((handle.clone(), *ip, seen.clone()));
            }
        }
        let mut released = Vec::new();
        for (handle, ip, seen) in leaked {
            if calico.release_leaked(ip, &seen.cidr, &handle, seen.number).await == Ok(true) {
                released.push((ip, handle));
            }
        }
        released
    }
}
