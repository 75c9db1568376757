//! A model of the part of Calico's kube-controllers that releases leaked addresses.
//!
//! The controller periodically checks each address that is recorded with a node, a pod and a namespace. An address is a
//! candidate for release if its pod does not exist, or if the pod's status does not list the address. Once an address
//! has been a candidate in [`GRACE`] consecutive checks, the controller releases it by address, handle and sequence
//! number. The controller keeps the attributes with which it first saw an address, even if the attributes have changed
//! since.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use kv::{Range, StoreExt};

use crate::calico::Calico;
use crate::documents::{BLOCKS, Block};

/// The number of consecutive checks in which an address must be a candidate before the controller releases it. In
/// Calico, the checks before a release take a quarter of an hour.
const GRACE: usize = 3;

/// The pods of the cluster, each with the addresses in its status.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pods(Arc<Mutex<BTreeMap<String, BTreeSet<IpAddr>>>>);

impl Pods {
    /// Creates a pod whose status lists no addresses.
    pub(crate) fn create(&self, name: &str) {
        self.0.lock().unwrap().insert(name.to_owned(), BTreeSet::new());
    }

    /// Adds the addresses of the pod's first network to its status, as the kubelet does.
    pub(crate) fn report(&self, name: &str, addresses: impl IntoIterator<Item = IpAddr>) {
        self.0.lock().unwrap().entry(name.to_owned()).or_default().extend(addresses);
    }

    pub(crate) fn delete(&self, name: &str) {
        self.0.lock().unwrap().remove(name);
    }

    /// True if the pod exists and may use the address `ip`. A pod whose status lists no addresses may use any address.
    fn may_have(&self, name: &str, ip: IpAddr) -> bool {
        self.0.lock().unwrap().get(name).is_some_and(|addresses| addresses.is_empty() || addresses.contains(&ip))
    }
}

/// An address, with the attributes that it had when the controller first saw it.
#[derive(Clone, Debug)]
struct Seen {
    cidr: String,
    number: u64,
    pod: Option<String>,
    candidate: usize,
}

pub(crate) struct KubeControllers {
    pods: Pods,
    seen: BTreeMap<(String, IpAddr), Seen>,
}

impl KubeControllers {
    pub(crate) fn new(pods: Pods) -> Self {
        Self { pods, seen: BTreeMap::new() }
    }

    /// Checks all assigned addresses of the cluster once. Returns the addresses that this check of kube-controllers
    /// released, with their handles.
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
