//! The allocator on a store: opens it, does what the request asks for in one commit, and closes it.

use std::sync::Arc;
use std::time::Duration;

use datastore::{Create, Location, OpenStore};
use ipam_core::assign::{AssignRequest, Bridge, PoolDefinition, Repeated, Wanted};
use ipam_core::{BridgeError, Ipam, Nodes, gc};
use kv::{Deadline, ErrorKind, Operation, Store};

use crate::error::{CniError, Code, Result};
use crate::intents::{FileIntents, INTENTS_FOLDER};
use crate::request::{
    AddRequest, Allocator, Assigned, Bridged, CheckRequest, Checked, Collected, DelRequest, GcRequest, Network, OwnPool,
};
use crate::sight::Sight;

/// How long a call may take, as for Calico's plugin, from waiting for the store to the answer.
const BUDGET: Duration = Duration::from_secs(90);
/// How long a STATUS may take.
const STATUS_BUDGET: Duration = Duration::from_millis(900);
/// How much of that it waits for the store. Who waited in vain looks for the holder for another 300 ms.
const STATUS_WAIT: Duration = Duration::from_millis(500);

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
        what_for: Use,
        work: impl AsyncFnOnce(Ipam, Deadline) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        runtime.block_on(async {
            let deadline = Deadline::after(if what_for == Use::Status { STATUS_BUDGET } else { BUDGET });
            if let Some(store) = &self.given {
                return work(ipam_on(Arc::clone(store), location), deadline).await;
            }
            if let Location::Etcd(_) = location {
                return Err(no_etcd_yet().into());
            }
            let open = open(location, what_for, deadline.remaining_for_work()).await?;
            let room = if what_for == Use::Status { open.check_room().await } else { Ok(()) };
            let done = match room {
                Ok(()) => work(ipam_on(open.store(), location), deadline).await,
                Err(error) => Err(error.into()),
            };
            if let Err(error) = open.close().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
            done
        })
    }
}

/// What a verb does with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// It works on what is there.
    Existing,
    /// It looks whether it could work on what is there, without waiting for long.
    Status,
    /// It makes the store if there is none.
    Make,
    /// It gives back, and may use for that what a full disk has left for it.
    Release,
}

async fn open(location: &Location, what_for: Use, wait: Duration) -> kv::Result<OpenStore> {
    match what_for {
        Use::Existing => datastore::open_in_place(location, Create::Never, wait).await,
        Use::Status => datastore::open_in_place(location, Create::Never, wait.min(STATUS_WAIT)).await,
        Use::Make => datastore::open_in_place(location, Create::IfMissing, wait).await,
        Use::Release => datastore::open_in_place_to_release(location, wait).await,
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
        let what_for = if own_pools(&request.network).is_empty() { Use::Existing } else { Use::Make };
        let assign = assign_request(request);
        Ok(self.with_store(&request.store.location, what_for, async |ipam, deadline| {
            let assigned = ipam.assign(&assign, deadline).await.map_err(|error| explain(error, &request.network))?;
            Ok(assigned.into_iter().map(answer).collect())
        })?)
    }

    fn del(&self, request: &DelRequest) -> Result<()> {
        let old_handles = [request.old_handle.clone()];
        let released = self.with_store(&request.store.location, Use::Release, async |ipam, deadline| {
            let released = ipam.release_attachment(&request.attachment, &old_handles, deadline).await;
            released.map_err(|error| explain(error, &Network::Calico))
        });
        match released {
            Ok(addresses) => {
                tracing::debug!(?addresses, "released");
                Ok(())
            }
            Err(Failure::Store(error)) if *error.kind() == ErrorKind::Missing => {
                tracing::warn!(%error, "nothing to release");
                Ok(())
            }
            Err(failure) => Err(failure.into()),
        }
    }

    fn check(&self, request: &CheckRequest) -> Result<Checked> {
        let old_handles = [request.old_handle.clone()];
        let compared = self.with_store(&request.store.location, Use::Existing, async |ipam, deadline| {
            let compared = ipam.compare(&request.attachment, &old_handles, &request.addresses, deadline).await;
            match compared {
                // Somebody's document, which says nothing.
                Err(ipam_core::Error::Malformed(error)) => Ok(Checked::Unknown(error.to_string())),
                Err(error) => Err(explain(error, &Network::Calico)),
                Ok(comparison) => Ok(Checked::Compared(comparison)),
            }
        });
        compared.or_else(|failure| match failure {
            Failure::Store(error) if *error.kind() == ErrorKind::Locked => Ok(Checked::Unknown(error.to_string())),
            Failure::Store(error) if is_out_of_reach(error.kind()) => {
                Err(CniError::from(error).with_code(Code::TryAgain))
            }
            failure => Err(failure.into()),
        })
    }

    fn status(&self, request: &AddRequest) -> Result<()> {
        let assign = assign_request(request);
        let would = self.with_store(&request.store.location, Use::Status, async |ipam, deadline| {
            let would = ipam.would_assign(&assign, deadline).await;
            would.map(drop).map_err(|error| explain(error, &request.network))
        });
        let makes_store = !own_pools(&request.network).is_empty();
        would.or_else(|failure| match failure {
            Failure::Store(error) if *error.kind() == ErrorKind::Locked => {
                tracing::info!(%error, "others have the store all the time, which says that it works");
                Ok(())
            }
            // The first ADD makes it.
            Failure::Store(error) if *error.kind() == ErrorKind::Missing && makes_store => Ok(()),
            failure => Err(failure.into()),
        })
    }

    fn gc(&self, request: &GcRequest) -> Result<Collected> {
        let collected = self.with_store(&request.store.location, Use::Release, async |ipam, deadline| {
            collect(&ipam, request, deadline).await.map_err(|error| explain(error, &Network::Calico))
        });
        match collected {
            Err(Failure::Store(error)) if *error.kind() == ErrorKind::Missing => {
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

/// True if an error says that the store may be whole and cannot be asked now.
fn is_out_of_reach(kind: &ErrorKind) -> bool {
    kind.is_transient() || matches!(kind, ErrorKind::Io | ErrorKind::CommitIo | ErrorKind::NoSpace)
}

/// Why nothing came of a call.
#[derive(Debug)]
enum Failure {
    /// The store's error.
    Store(kv::Error),
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
        Self::Store(error)
    }
}

impl From<Failure> for CniError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Store(error) => error.into(),
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
fn explain(error: ipam_core::Error, network: &Network) -> Failure {
    match error {
        ipam_core::Error::Store(error) => error.into(),
        ipam_core::Error::Bridge(error @ BridgeError::GatewayInUse { .. }) => {
            CniError::internal(error.to_string()).into()
        }
        ipam_core::Error::Bridge(error) => CniError::config(error.to_string()).into(),
        error => {
            let advice = advice(&error).filter(|_| *network != Network::Calico);
            CniError::from_error(&error).with_details(advice.unwrap_or_default()).into()
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
