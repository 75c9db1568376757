//! Sets up a cluster in which Margay runs alone: the ClusterInformation document, the first pools, and the documents of
//! nodes. Where Calico runs, its node agent writes these documents.

use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{ClusterInformation, Document, NewPool, Node, NodeFacts, Pool};
use ipam_core::{Result, transact};
use ipnet::IpNet;
use kv::{Deadline, Range, StoreExt, Transaction};

use crate::Operator;
use crate::documents::WriteOutcome;

/// The documents that [`Operator::set_up_cluster`] writes.
#[derive(Clone, Debug)]
pub struct ClusterSetup {
    /// Whether the store needs a ClusterInformation document.
    pub scope: SetupScope,
    /// The first pools of the store; empty if the store must have a pool already.
    pub pools: Vec<FirstPool>,
}

/// Whether a store needs a ClusterInformation document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupScope {
    /// The store is a cluster's, so plugins refuse to work without the document.
    Cluster,
    /// The store belongs to one machine, and has no such document.
    Machine,
}

/// A pool that [`Operator::set_up_cluster`] creates.
#[derive(Clone, Debug)]
pub struct FirstPool {
    /// The definition of the pool.
    pub new: NewPool,
    /// Whether the pool's packets leave a node with the node's address.
    pub nat: NatOutgoing,
}

/// The flag `natOutgoing` of a new pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NatOutgoing {
    /// Packets to destinations outside all pools leave a node with the node's address.
    On,
    /// Packets keep the container's address.
    Off,
}

/// The outcome of [`Operator::set_up_cluster`].
#[derive(Clone, Debug, PartialEq)]
pub enum SetupOutcome {
    /// The store has everything that the plugins need.
    Done(SetupReport),
    /// Nothing was written, for this reason.
    Refused(SetupRefusal),
}

/// The documents that the plugins need, after [`Operator::set_up_cluster`].
#[derive(Clone, Debug, PartialEq)]
pub struct SetupReport {
    /// The ClusterInformation document; `None` with [`SetupScope::Machine`].
    pub cluster: Option<(ClusterInformation, Presence)>,
    /// The requested pools, or all pools of the store if no pool was requested.
    pub pools: Vec<(Pool, Presence)>,
}

/// Whether a document existed before [`Operator::set_up_cluster`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The call has created the document.
    Created,
    /// The document existed, and is unchanged.
    Existed,
}

/// The reason why [`Operator::set_up_cluster`] has written nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetupRefusal {
    /// The flag `datastoreReady` is not true: Calico is being upgraded or migrated.
    Locked,
    /// No pool was requested, and the store has none.
    NoPool,
    /// A pool of the requested name has another CIDR.
    OtherCidr {
        /// The name of the pool.
        name: String,
        /// The CIDR of the stored pool.
        stored: IpNet,
        /// The requested CIDR.
        wanted: IpNet,
    },
}

impl Operator {
    /// Creates the documents that the plugins need, in one commit. Documents that exist stay unchanged, so the call can
    /// be repeated. A requested pool exists if the store has a pool of the same CIDR, whatever its name.
    ///
    /// The commit guards the ClusterInformation document and, if it creates a pool, all pools. Before the commit, stale
    /// affinities in the range of a new pool are deleted; see [`ipam_core::Ipam::drop_affinities_beside`].
    ///
    /// # Errors
    /// `InvalidPool`, with Calico's error message, for an invalid pool. `Malformed` for a damaged ClusterInformation
    /// document. Any store error.
    pub async fn set_up_cluster(&self, setup: &ClusterSetup, deadline: Deadline) -> Result<SetupOutcome> {
        for FirstPool { new, .. } in &setup.pools {
            if self.ipam().store().get(keys::resource(ResourceKind::IpPool, &new.name)).await?.is_none() {
                self.ipam().drop_affinities_beside(new, deadline).await?;
            }
        }
        transact!(self.ipam(), deadline, |tx| self.set_up_in(tx, setup).await)
    }

    async fn set_up_in(&self, tx: &mut Transaction, setup: &ClusterSetup) -> Result<SetupOutcome> {
        let ipam = self.ipam();
        let (key, pools) = (keys::cluster_information(), Range::Prefix(keys::resources_prefix(ResourceKind::IpPool)));
        tx.prefetch(vec![key.clone()], vec![pools.clone().into()]).await?;
        let stored = match (setup.scope, tx.get(&key).await?) {
            (SetupScope::Machine, _) => None,
            (SetupScope::Cluster, None) => {
                let guid = ipam.uid().replace('-', "");
                Some((ClusterInformation::of_margay(&guid, &ipam.uid(), ipam.now()), Presence::Created))
            }
            (SetupScope::Cluster, Some(stored)) => {
                Some((ClusterInformation::decode(&key, stored.as_bytes())?, Presence::Existed))
            }
        };
        if stored.as_ref().is_some_and(|(cluster, _)| !cluster.is_ready()) {
            return Ok(SetupOutcome::Refused(SetupRefusal::Locked));
        }
        let listed = tx.snapshot_list(&pools).await?;
        let existing: Vec<Pool> =
            listed.iter().filter_map(|(key, value)| Pool::decode(key, value.as_bytes()).ok()).collect();
        if setup.pools.is_empty() && existing.is_empty() {
            return Ok(SetupOutcome::Refused(SetupRefusal::NoPool));
        }
        let mut report = SetupReport { cluster: stored, pools: Vec::new() };
        for wanted in &setup.pools {
            let (name, cidr) = (&wanted.new.name, wanted.new.cidr);
            let of_name = existing.iter().find(|pool| pool.name() == name);
            if let Some(pool) = of_name.filter(|pool| pool.cidr() != cidr) {
                let (name, stored) = (name.clone(), pool.cidr());
                return Ok(SetupOutcome::Refused(SetupRefusal::OtherCidr { name, stored, wanted: cidr }));
            }
            match existing.iter().find(|pool| pool.cidr() == cidr) {
                Some(pool) => report.pools.push((pool.clone(), Presence::Existed)),
                None => {
                    ipam.check_beside_others(tx, &wanted.new).await?;
                    let mut pool = Pool::new(&wanted.new, &ipam.uid(), ipam.now())?;
                    if wanted.nat == NatOutgoing::On {
                        pool.enable_nat_outgoing();
                    }
                    report.pools.push((pool, Presence::Created));
                }
            }
        }
        // Write only after all checks: what a refusal or an error leaves behind would be committed.
        if let Some((cluster, Presence::Created)) = &report.cluster {
            tx.put(&key, cluster.encode()?)?;
        }
        for (pool, _) in report.pools.iter().filter(|(_, presence)| *presence == Presence::Created) {
            let key = keys::resource(ResourceKind::IpPool, pool.name());
            tx.get(&key).await?;
            tx.put(&key, pool.encode()?)?;
        }
        if setup.pools.is_empty() {
            report.pools = existing.into_iter().map(|pool| (pool, Presence::Existed)).collect();
        }
        Ok(SetupOutcome::Done(report))
    }

    /// Returns the cluster's ClusterInformation document; `None` if the store has none. A damaged document counts as
    /// empty.
    ///
    /// # Errors
    /// Any store error.
    pub async fn cluster_information(&self) -> Result<Option<ClusterInformation>> {
        let stored = self.ipam().store().get(keys::cluster_information()).await?;
        Ok(stored.map(|kv| ClusterInformation::decode_or_empty(kv.value.as_bytes())))
    }

    /// Writes the document of a node, or adds the facts to the stored document. Labels and fields that another program
    /// has written are kept. The commit guards the node's document.
    ///
    /// # Errors
    /// `Malformed` if the stored document is damaged. Any store error.
    pub async fn register_node(&self, name: &str, facts: &NodeFacts, deadline: Deadline) -> Result<WriteOutcome> {
        let key = keys::resource(ResourceKind::Node, name);
        transact!(self.ipam(), deadline, |tx| {
            let stored = tx.get(&key).await?;
            let decoded = stored.as_ref().map(|value| Node::decode(&key, value.as_bytes())).transpose()?;
            let mut node = match &decoded {
                Some(node) => node.clone(),
                None => Node::new(name, facts.labels.clone(), &self.ipam().uid(), self.ipam().now()),
            };
            node.add_facts(facts);
            if decoded.as_ref() == Some(&node) {
                return Ok(WriteOutcome::Unchanged);
            }
            tx.put(&key, node.encode()?)?;
            Ok(if stored.is_some() { WriteOutcome::Changed } else { WriteOutcome::Created })
        })
    }
}
