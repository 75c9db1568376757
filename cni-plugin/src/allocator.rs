//! The allocator on a store: opens it, does what the request asks for in one commit, and closes it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use datastore::{Create, Location};
use ipam_core::assign::{AssignRequest, Bridge, PoolDefinition, Repeated, Wanted};
use ipam_core::{BridgeError, Ipam, Nodes, gc};
use kv::{Deadline, ErrorKind, Operation, Store};

use crate::error::{CniError, Result};
use crate::intents::{FileIntents, INTENTS_FOLDER};
use crate::request::{
    AddRequest, Allocator, Assigned, Bridged, CheckRequest, Collected, DelRequest, GcRequest, Network, OwnPool,
};
use crate::sight::Sight;

/// How long a call may take, as for Calico's plugin, from waiting for the store to the answer.
const BUDGET: Duration = Duration::from_secs(90);

/// Keeps the books in the store that a request names.
#[derive(Clone, Debug, Default)]
pub struct StoreAllocator {
    given: Option<Arc<dyn Store>>,
}

impl StoreAllocator {
    /// An allocator that works on this store whatever a request names, and leaves it open: for who has one open already.
    pub fn on(store: Arc<dyn Store>) -> Self {
        Self { given: Some(store) }
    }

    /// Opens the store, does something with it, and closes it. A store that cannot be closed cleanly has nevertheless
    /// committed: that is logged and not an error.
    fn with_store<T>(
        &self,
        location: &Location,
        create: Create,
        work: impl AsyncFnOnce(Ipam, Deadline) -> Result<T>,
    ) -> Result<T, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        runtime.block_on(async {
            let deadline = Deadline::after(BUDGET);
            if let Some(store) = &self.given {
                return Ok(work(ipam_on(Arc::clone(store), location), deadline).await?);
            }
            if let Location::Etcd(_) = location {
                return Err(no_etcd_yet().into());
            }
            let open = datastore::open_in_place(location, create, deadline.remaining_for_work()).await?;
            let done = work(ipam_on(open.store(), location), deadline).await;
            if let Err(error) = open.close().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
            Ok(done?)
        })
    }
}

/// The store on etcd is there, but what an ADD must do there besides is not.
fn no_etcd_yet() -> kv::Error {
    let error = kv::Error::new(ErrorKind::Unsupported, Operation::Open, "etcd");
    error.with_detail("the plugin of this version cannot work on etcd yet; set datastore_type to sled or redb")
}

/// The allocator on a store. On etcd, where what a killed process has sent may still be carried out, it notes what it is
/// about to do; on a store that a process has to itself nothing is carried out after its death.
fn ipam_on(store: Arc<dyn Store>, location: &Location) -> Ipam {
    match location {
        Location::Etcd(_) => {
            let intents = FileIntents::new(INTENTS_FOLDER, location.to_string());
            Ipam::new(store, Nodes::Registered).with_intents(Arc::new(intents))
        }
        _ => Ipam::new(store, Nodes::FirstSeen),
    }
    .with_live(Arc::new(Sight))
}

impl Allocator for StoreAllocator {
    fn add(&self, request: &AddRequest) -> Result<Vec<Assigned>> {
        let create = if own_pools(&request.network).is_empty() { Create::Never } else { Create::IfMissing };
        let assign = assign_request(request);
        Ok(self.with_store(&request.store.location, create, async |ipam, deadline| {
            let assigned = ipam.assign(&assign, deadline).await.map_err(|error| explain(error, &request.network))?;
            Ok(assigned.into_iter().map(answer).collect())
        })?)
    }

    fn del(&self, request: &DelRequest) -> Result<()> {
        let old_handles = [request.old_handle.clone()];
        let released = self.with_store(&request.store.location, Create::Never, async |ipam, deadline| {
            let released = ipam.release_attachment(&request.attachment, &old_handles, deadline).await;
            released.map_err(|error| explain(error, &Network::Calico))
        });
        match released {
            Ok(addresses) => {
                tracing::debug!(?addresses, "released");
                Ok(())
            }
            Err(Failure::Missing(error)) => {
                tracing::warn!(%error, "nothing to release");
                Ok(())
            }
            Err(Failure::Cni(error)) => Err(error),
        }
    }

    fn check(&self, request: &CheckRequest) -> Result<Vec<IpAddr>> {
        Ok(self.with_store(&request.store.location, Create::Never, async |ipam, deadline| {
            ipam.held(&request.attachment, deadline).await.map_err(|error| explain(error, &Network::Calico))
        })?)
    }

    fn gc(&self, request: &GcRequest) -> Result<Collected> {
        let collected = self.with_store(&request.store.location, Create::Never, async |ipam, deadline| {
            collect(&ipam, request, deadline).await.map_err(|error| explain(error, &Network::Calico))
        });
        match collected {
            Err(Failure::Missing(error)) => {
                tracing::warn!(%error, "nothing to release");
                Ok(Collected::default())
            }
            other => Ok(other?),
        }
    }
}

/// Releases what the list does not have, a commit for each block.
async fn collect(ipam: &Ipam, request: &GcRequest, deadline: Deadline) -> ipam_core::Result<Collected> {
    let holdings = ipam.holdings(&request.node, deadline).await?;
    let stale = gc::stale(&holdings, &request.network, &request.valid, request.now);
    let mut collected =
        Collected { young: stale.young, undated: stale.undated, unmarked: holdings.unmarked, ..Collected::default() };
    for batch in gc::batches(&stale.gone) {
        let freed = ipam.free(&batch, deadline).await?;
        collected.released.extend(freed.released);
        collected.changed += freed.changed.len();
    }
    Ok(collected)
}

/// Why nothing came of a call.
#[derive(Debug)]
enum Failure {
    /// There is no store.
    Missing(kv::Error),
    /// Everything else.
    Cni(CniError),
}

impl From<CniError> for Failure {
    fn from(error: CniError) -> Self {
        Self::Cni(error)
    }
}

impl From<kv::Error> for Failure {
    fn from(error: kv::Error) -> Self {
        match error.kind() {
            ErrorKind::Missing => Self::Missing(error),
            _ => Self::Cni(error.into()),
        }
    }
}

impl From<Failure> for CniError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Missing(error) => error.into(),
            Failure::Cni(error) => error,
        }
    }
}

fn own_pools(network: &Network) -> &[OwnPool] {
    match network {
        Network::Calico => &[],
        Network::Bridged(bridged) => &bridged.own_pools,
    }
}

fn assign_request(request: &AddRequest) -> AssignRequest {
    let wanted =
        Wanted { these: request.wanted.clone(), any_v4: request.count_v4 as usize, any_v6: request.count_v6 as usize };
    let mut assign = AssignRequest::new(request.attachment.clone(), wanted);
    assign.attributes.clone_from(&request.attributes);
    assign.v4_pools.clone_from(&request.pools_v4);
    assign.v6_pools.clone_from(&request.pools_v6);
    assign.max_blocks = request.max_blocks.unwrap_or(0);
    match &request.network {
        Network::Calico => assign.repeated = Repeated::Refused,
        Network::Bridged(Bridged { gateway_v4, gateway_v6, own_pools }) => {
            assign.bridge = Some(Bridge { v4: *gateway_v4, v6: *gateway_v6 });
            assign.define = definitions(&request.attachment.network, own_pools);
        }
    }
    assign
}

/// The pools that a configuration defines, named after the network; an IPv6 one says so, so that a network may get a
/// second family later.
fn definitions(network: &str, pools: &[OwnPool]) -> Vec<PoolDefinition> {
    let name = pool_name(network);
    let definition = |pool: &OwnPool| PoolDefinition {
        name: if pool.subnet.addr().is_ipv6() { format!("{name}-ipv6") } else { name.clone() },
        cidr: pool.subnet,
        ranges: pool.ranges.clone(),
    };
    pools.iter().map(definition).collect()
}

/// A network's name as the name of a pool, which has fewer letters to choose from.
fn pool_name(network: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    network.chars().map(letter).collect::<String>().trim_matches('-').to_owned()
}

fn answer(assigned: ipam_core::assign::Assigned) -> Assigned {
    Assigned {
        address: assigned.ip,
        block_prefix: assigned.block.prefix_len(),
        pool_prefix: assigned.pool.prefix_len(),
        gateway: assigned.gateway,
    }
}

/// The error as a runtime is told it. What the configuration of a bridged network can mend is code 7; on a network of
/// Calico's the allocator's errors are plain ones, as Calico's are.
fn explain(error: ipam_core::Error, network: &Network) -> CniError {
    match error {
        ipam_core::Error::Store(error) => error.into(),
        ipam_core::Error::Bridge(error @ BridgeError::GatewayInUse { .. }) => CniError::internal(error.to_string()),
        ipam_core::Error::Bridge(error) => CniError::config(error.to_string()),
        error => {
            let advice = advice(&error).filter(|_| *network != Network::Calico);
            CniError::from_error(&error).with_details(advice.unwrap_or_default())
        }
    }
}

/// What to do about an error of the allocator, where its text does not say.
fn advice(error: &ipam_core::Error) -> Option<String> {
    Some(match error {
        ipam_core::Error::Exhausted { .. } => {
            "see how full it is with: margay ipam show --show-blocks; then make a larger pool, or widen its range"
                .into()
        }
        ipam_core::Error::Pool(_) => "see which pools there are with: margay pool list".into(),
        ipam_core::Error::AlreadyAssigned(ip) => format!("see who has it with: margay ipam show --ip {ip}"),
        ipam_core::Error::UnknownNode(_) => "nodes are registered in this store, and this one is not among them".into(),
        _ => return None,
    })
}
