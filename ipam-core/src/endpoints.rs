//! Reads, stores and deletes workload endpoints. A main CNI plugin reads existing endpoints before it sets up a
//! container's interface, and stores the interface's endpoint afterwards. An endpoint is deleted in a commit of its
//! own, or in the commit that releases its addresses.

use std::sync::Arc;

use kv::{Attempts, Content, Deadline, Key, Range, Revision, StoreExt, TransactOptions, Transaction};
use serde::{Deserialize, Serialize};

use crate::assign_context::decode_all;
use crate::boxed_future;
use crate::error::{Error, Result};
use crate::import_lock;
use crate::ipam::{Ipam, transact};
use crate::model::keys::ResourceKind;
use crate::model::{
    ClusterInformation, Document, EndpointFacts, Orchestrator, Pool, WorkloadEndpoint, keys, new_profile,
    split_endpoint_name,
};

/// Maximum number of endpoint documents read in one request.
const ENDPOINTS_PER_READ: usize = 32;

/// The endpoint that a DEL deletes, and the container to which the endpoint must belong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointToDelete {
    /// The namespace of the endpoint to delete.
    pub namespace: String,
    /// The name of the endpoint to delete.
    pub name: String,
    /// The container to which the endpoint must belong to be deleted.
    pub owner: EndpointOwner,
}

/// The container to which an endpoint must belong for a DEL to delete it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndpointOwner {
    /// A DEL deletes the endpoint without checking the endpoint's container, because the endpoint's name already
    /// contains the container's id.
    Any,
    /// A DEL deletes the endpoint only if the endpoint names the deleted container or no container, because a late DEL
    /// of an old sandbox must not delete the endpoint of the pod's newer sandbox.
    Container(String),
}

impl EndpointToDelete {
    /// Returns the store key of the endpoint.
    pub fn key(&self) -> Key {
        keys::workload_endpoint(&self.namespace, &self.name)
    }

    /// Deletes the endpoint as part of a transaction. Returns false if the endpoint is missing or belongs to a
    /// container other than the one in the DEL.
    ///
    /// A damaged endpoint is not an error, so the caller can still release the container's addresses. With
    /// [`EndpointOwner::Any`], a damaged endpoint is deleted. With [`EndpointOwner::Container`], a damaged endpoint is
    /// kept, because it may belong to a newer sandbox of the pod.
    pub(crate) async fn delete(&self, tx: &mut Transaction) -> Result<bool> {
        let key = self.key();
        let Some(stored) = tx.get(&key).await? else { return Ok(false) };
        let is_ours = match &self.owner {
            EndpointOwner::Any => true,
            EndpointOwner::Container(container) => match WorkloadEndpoint::decode(&key, stored.as_bytes()) {
                Ok(endpoint) => endpoint.container().is_empty() || endpoint.container() == container,
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "keeping a workload endpoint that cannot be decoded: another container may own the endpoint"
                    );
                    false
                }
            },
        };
        if is_ours {
            tx.delete(&key)?;
        }
        Ok(is_ours)
    }
}

impl Ipam {
    /// Returns the endpoints of a node in all namespaces. Damaged endpoints are skipped. Reads the keys of all
    /// endpoints of the cluster, but only the documents of the node's endpoints.
    ///
    /// # Errors
    /// Any store error.
    #[boxed_future]
    pub async fn endpoints_of_node(&self, node: &str, deadline: Deadline) -> Result<Vec<WorkloadEndpoint>> {
        self.endpoints_of_nodes(|of| of == node, deadline).await
    }

    /// Returns the endpoints of all nodes that `is_wanted` accepts; see [`Self::endpoints_of_node`].
    ///
    /// # Errors
    /// Any store error.
    pub async fn endpoints_of_nodes(
        &self,
        is_wanted: impl Fn(&str) -> bool + Send + Sync,
        deadline: Deadline,
    ) -> Result<Vec<WorkloadEndpoint>> {
        let all = Range::Prefix(keys::workload_endpoints_prefix());
        let listed = self.store().list_at(all, Revision::UNSET, Content::KeysOnly).await?;
        let is_nodes = |key: &Key| {
            let parts = keys::parse_workload_endpoint(key).and_then(|(_, name)| split_endpoint_name(name));
            parts.is_some_and(|[of, ..]| is_wanted(&of))
        };
        let names: Vec<Key> = listed.kvs.into_iter().map(|kv| kv.key).filter(is_nodes).collect();
        let mut endpoints = Vec::new();
        for some in names.chunks(ENDPOINTS_PER_READ) {
            let found = transact!(self, deadline, |tx| Ok(tx.peek(some, Content::Full).await?))?;
            let decoded = found.iter().flatten().map(|kv| WorkloadEndpoint::decode(&kv.key, kv.value.as_bytes()));
            endpoints.extend(decoded.filter_map(std::result::Result::ok));
        }
        Ok(endpoints)
    }

    /// True if the store has an address or an endpoint of a workload, whatever node it is recorded for. `handles` are
    /// the handles under which addresses of the workload may be assigned. Reads the keys of all endpoints of the
    /// namespace.
    ///
    /// # Errors
    /// Any store error.
    #[boxed_future]
    pub async fn knows_workload(&self, workload: &WorkloadQuery, deadline: Deadline) -> Result<bool> {
        let WorkloadQuery { handles, namespace, orchestrator, id } = workload;
        let handles: Vec<Key> = handles.iter().map(|handle| keys::handle(handle)).collect();
        let found = transact!(reading self, deadline, |tx| Ok(tx.peek(&handles, Content::KeysOnly).await?))?;
        if found.iter().any(Option::is_some) {
            return Ok(true);
        }
        let of_namespace = Range::Prefix(keys::workload_endpoint(namespace, ""));
        let listed = self.store().list_at(of_namespace, Revision::UNSET, Content::KeysOnly).await?;
        let mut names = listed.kvs.iter().filter_map(|kv| keys::parse_workload_endpoint(&kv.key));
        Ok(names.any(|(_, name)| {
            split_endpoint_name(name).is_some_and(|[_, of, its, _]| of == orchestrator.as_str() && its == *id)
        }))
    }

    /// Deletes a stored endpoint. Returns false if the endpoint is missing, or if it belongs to a container other than
    /// the one in `endpoint`.
    ///
    /// # Errors
    /// Any store error.
    #[boxed_future]
    pub async fn delete_endpoint(&self, endpoint: &EndpointToDelete, deadline: Deadline) -> Result<bool> {
        transact!(self, deadline, |tx| endpoint.delete(tx).await)
    }
}

/// The workload that [`Ipam::knows_workload`] looks for.
#[derive(Clone, Debug)]
pub struct WorkloadQuery {
    /// The handles under which addresses of the workload may be assigned.
    pub handles: Vec<String>,
    /// The namespace of the workload's endpoints.
    pub namespace: String,
    /// The kind of the workload: a pod or a plain container.
    pub orchestrator: Orchestrator,
    /// The pod's name for a pod, otherwise the container's id.
    pub id: String,
}

/// What a main CNI plugin reads from the store before it sets up a container's interface.
#[derive(Clone, Debug)]
pub struct EndpointQuery {
    /// The namespace of the endpoints to read.
    pub namespace: String,
    /// The common prefix of the names of the endpoints to read; `None` to read no endpoints.
    pub prefix: Option<String>,
    /// The name of the profile that the container's network needs, if any.
    pub profile: Option<String>,
    /// Whether the query also reads all pools.
    pub pools: PoolsToRead,
}

/// Whether an [`EndpointQuery`] also reads the pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolsToRead {
    /// The [`EndpointQuery`] reads no pools.
    Skipped,
    /// The [`EndpointQuery`] reads all pools.
    Read,
    /// The [`EndpointQuery`] reads all pools if only Margay runs in the cluster. This costs a second request, but only
    /// in such a cluster.
    IfMargayAlone,
}

/// The documents that an [`EndpointQuery`] has read from the store.
#[derive(Clone, Debug)]
pub struct EndpointContext {
    /// The ClusterInformation document; `None` if the document is missing. A damaged document counts as empty.
    pub cluster: Option<ClusterInformation>,
    /// The endpoints whose names have the queried prefix, with the revisions of their last writes. Damaged endpoints
    /// are skipped.
    pub endpoints: Vec<(WorkloadEndpoint, Revision)>,
    /// All stored pools; empty if the query does not read the pools.
    pub pools: Vec<Pool>,
}

/// An endpoint that a main CNI plugin will store after it has set up the interface. [`Ipam::begin_endpoint`] reads the
/// existing endpoints, and [`PendingEndpoint::store`] commits the new endpoint.
///
/// If the store stays open from [`Ipam::begin_endpoint`] to [`PendingEndpoint::store`], the commit costs only one
/// request, which guards the keys that were read.
#[derive(Debug)]
pub struct PendingEndpoint {
    ipam: Ipam,
    query: EndpointQuery,
    deadline: Deadline,
    attempt: Option<(Attempts, Transaction)>,
}

impl Ipam {
    /// Reads the endpoints, the profile and the pools that a main CNI plugin needs, in one request.
    ///
    /// # Errors
    /// Any store error.
    #[boxed_future]
    pub async fn begin_endpoint(
        &self,
        query: EndpointQuery,
        deadline: Deadline,
    ) -> Result<(PendingEndpoint, EndpointContext)> {
        let mut pending = PendingEndpoint { ipam: self.clone(), query, deadline, attempt: None };
        let before = pending.read_again().await?;
        Ok((pending, before))
    }
}

impl PendingEndpoint {
    /// Reads what [`Ipam::begin_endpoint`] reads once more, after [`Self::store`] has failed because another writer
    /// has written the endpoint.
    ///
    /// # Errors
    /// Any store error.
    #[boxed_future]
    pub async fn read_again(&mut self) -> Result<EndpointContext> {
        let (mut attempts, mut tx) = self.begin().await?;
        loop {
            match self.read(&mut tx).await {
                Ok(before) => {
                    self.attempt = Some((attempts, tx));
                    return Ok(before);
                }
                // A read at the revision of the transaction fails if the store fails, or if the revision was compacted
                // between two requests. `Attempts::end` returns the error or allows another attempt.
                Err(error) => {
                    if attempts.end::<(), Error>(tx, Err(error)).await?.is_some() {
                        return Err(Error::Invalid("a failed read was committed".to_owned()));
                    }
                    tx = attempts.begin().await?;
                }
            }
        }
    }

    async fn begin(&self) -> Result<(Attempts, Transaction)> {
        let options = TransactOptions::new(self.deadline).with_extra_reads([import_lock::import_lock_key()]);
        let mut attempts = Attempts::new(Arc::clone(self.ipam.store()), options);
        let tx = attempts.begin().await?;
        Ok((attempts, tx))
    }

    async fn read(&self, tx: &mut Transaction) -> Result<EndpointContext> {
        let EndpointQuery { namespace, prefix, profile, pools } = &self.query;
        let cluster = keys::cluster_information();
        let prefix = prefix.as_ref().map(|prefix| Range::Prefix(keys::workload_endpoint(namespace, prefix)));
        let pools_range = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        let keys = [Some(cluster.clone()), profile.as_deref().map(keys::profile)];
        let ranges = [prefix.clone(), (*pools == PoolsToRead::Read).then(|| pools_range.clone())];
        tx.prefetch(keys.into_iter().flatten().collect(), ranges.into_iter().flatten().map(Into::into).collect())
            .await?;
        let cluster = tx.snapshot_get(&cluster).await?;
        let cluster = cluster.map(|value| ClusterInformation::decode_or_empty(value.as_bytes()));
        let mut endpoints = Vec::new();
        if let Some(prefix) = &prefix {
            for (key, value) in tx.snapshot_list(prefix).await? {
                let decoded = WorkloadEndpoint::decode(&key, value.as_bytes()).ok();
                endpoints.extend(decoded.zip(tx.written_at(&key)));
            }
        }
        let pools = match pools {
            PoolsToRead::IfMargayAlone if cluster.as_ref().is_some_and(ClusterInformation::is_margay_alone) => {
                decode_all(&tx.snapshot_list(&pools_range).await?)
            }
            PoolsToRead::Skipped | PoolsToRead::IfMargayAlone => Vec::new(),
            PoolsToRead::Read => decode_all(&tx.snapshot_list(&pools_range).await?),
        };
        Ok(EndpointContext { cluster, endpoints, pools })
    }

    /// Stores an endpoint. If the profile of the CNI network does not exist, the commit also creates it, for
    /// `orchestrator`. `replaced` is the revision of the existing endpoint that [`Ipam::begin_endpoint`] has read;
    /// `None` if the endpoint must not exist.
    ///
    /// # Errors
    /// `EndpointExists` or `EndpointChanged` if another writer has written the endpoint since [`Ipam::begin_endpoint`].
    /// Any store error.
    #[boxed_future]
    pub async fn store(
        &mut self,
        endpoint: &WorkloadEndpoint,
        replaced: Option<Revision>,
        orchestrator: Orchestrator,
    ) -> Result<()> {
        let (mut attempts, mut tx) = match self.attempt.take() {
            Some(begun) => begun,
            None => self.begin().await?,
        };
        loop {
            let done = self.write(&mut tx, endpoint, replaced, orchestrator).await;
            let done = import_lock::unless_import_locked(&mut tx, done).await;
            if attempts.end(tx, done).await?.is_some() {
                return Ok(());
            }
            tx = attempts.begin().await?;
        }
    }

    async fn write(
        &self,
        tx: &mut Transaction,
        endpoint: &WorkloadEndpoint,
        replaced: Option<Revision>,
        orchestrator: Orchestrator,
    ) -> Result<()> {
        let key = endpoint.key();
        let profile = self.query.profile.as_deref();
        tx.prefetch([Some(key.clone()), profile.map(keys::profile)].into_iter().flatten().collect(), Vec::new())
            .await?;
        let written = tx.get(&key).await?.and_then(|_| tx.written_at(&key));
        if written != replaced {
            let name = format!("WorkloadEndpoint({}/{})", endpoint.namespace(), endpoint.name());
            return Err(if replaced.is_none() { Error::EndpointExists(name) } else { Error::EndpointChanged(name) });
        }
        tx.put(&key, endpoint.encode().map_err(Error::Malformed)?)?;
        if let Some(profile) = profile {
            let key = keys::profile(profile);
            if tx.get(&key).await?.is_none() {
                let document = new_profile(profile, orchestrator, &self.ipam.uid(), self.ipam.now());
                tx.put(&key, document.map_err(Error::Malformed)?)?;
            }
        }
        Ok(())
    }

    /// Creates an endpoint document with a new unique id. `new_endpoint` only builds the document and writes nothing to
    /// the store.
    pub fn new_endpoint(&self, name: &str, facts: &EndpointFacts) -> WorkloadEndpoint {
        WorkloadEndpoint::new(&self.query.namespace, name, facts, &self.ipam.uid(), self.ipam.now())
    }

    /// Returns the namespace of the query and of the new endpoint.
    pub fn namespace(&self) -> &str {
        &self.query.namespace
    }
}
