//! The allocator on a store: opens it, does what the request asks for in one commit, and closes it.

pub(crate) mod failure;
pub(crate) mod rights;
mod vm;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use datastore::care::could_be_made;
use datastore::{Blocking, ClusterStore, Create, DEFAULT_CONF_DIR, Location, OpenOptions, OpenStore, Purpose};
use ipam_core::assign::{AssignRequest, Assigned as Given, Bridge, NamespaceLabels, PoolDefinition, Repeated, Wanted};
use ipam_core::attachment::Attachment;
use ipam_core::model::keys;
use ipam_core::net::nth;
use ipam_core::pools::start_of;
use ipam_core::{Ipam, Nodes};
use ipnet::IpNet;
use kv::{Content, Deadline, ErrorKind, Range, RangeRequest, Store};
use tokio::runtime::Builder;

use self::failure::{Failure, explain};
use self::rights::Rights;
use crate::error::{CniError, Code, Result};
use crate::hints::{FileHints, FullPools, HINTS_FOLDER};
use crate::host_lock::HostLock;
use crate::intents::{FileIntents, INTENTS_FOLDER};
use crate::request::{
    AddRequest, Allocator, Assigned, Bridged, CheckRequest, Checked, Collected, DelRequest, GcRequest, LEAST, Network,
    OwnPool, Quarantine, StoreAt,
};
use crate::run::Rules;
use crate::session::Session;
use crate::sight::Sight;
use crate::verbs::{self, Check, Del, Gc};

/// How long a call on an embedded store may take, from waiting for the store to the answer: as long as one of Calico's
/// plugin on its cluster.
const BUDGET: Duration = Duration::from_secs(90);
/// How long a STATUS may take.
pub(crate) const STATUS_BUDGET: Duration = Duration::from_millis(900);
/// The part of that for which it waits for the store lock. A caller that waited in vain searches for the lock holder
/// for another 300 ms.
const STATUS_WAIT: Duration = Duration::from_millis(500);

/// Keeps the books in the store that a request names.
#[derive(Clone, Debug, Default)]
pub struct StoreAllocator {
    given: Option<Arc<dyn Store>>,
    session: Option<Arc<Session>>,
}

impl StoreAllocator {
    /// An allocator on a store that the caller has open. It works on this store, whatever a request names, and does not
    /// close it.
    pub fn on(store: Arc<dyn Store>) -> Self {
        Self { given: Some(store), session: None }
    }

    /// An allocator that works in a session where the session has the store that a request names.
    pub(crate) fn within(session: Arc<Session>) -> Self {
        Self { given: None, session: Some(session) }
    }

    /// Carries out an ADD.
    fn assign(&self, request: &AddRequest, at: &StoreAt, assign: &AssignRequest) -> Result<Vec<Given>, Failure> {
        let what_for = if own_pools(&request.network).is_empty() { Use::Assign } else { Use::Make };
        self.with_store(at, what_for, async |ipam, deadline| {
            if let Some(vm) = &request.vm
                && let Some(assigned) = vm::assign(&ipam, assign, vm, deadline).await?
            {
                return Ok(assigned);
            }
            verbs::assign(&ipam, assign, deadline).await
        })
    }

    /// Opens the store, does something with it, and closes it. A store that cannot be closed cleanly has nevertheless
    /// committed: that is logged and not an error.
    fn with_store<T>(
        &self,
        at: &StoreAt,
        what_for: Use,
        work: impl AsyncFnOnce(Ipam, Deadline) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let location = &at.location;
        let is_cluster = location.is_shared();
        if let Some(session) = &self.session
            && let Some(open) = session.opened_at(location)
        {
            return session.run(async {
                let _lock = lock(at, what_for, open.store()).await;
                work(on_machine(open.store(), location, open.cluster()), session.deadline()).await
            });
        }
        let mut builder = Builder::new_current_thread();
        let runtime = if is_cluster { builder.enable_all() } else { builder.enable_time() }.build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        let budget = if what_for == Use::Status { STATUS_BUDGET } else { budget(at) };
        let deadline = Deadline::after(budget);
        let done = runtime.block_on(async {
            if let Some(store) = &self.given {
                return work(on_machine(Arc::clone(store), location, None), deadline).await;
            }
            let wait = if is_cluster { deadline.remaining() } else { deadline.remaining_for_work() };
            let open = open(location, what_for, wait).await?;
            let lock = lock(at, what_for, open.store()).await;
            let room = if what_for == Use::Status { open.check_room().await } else { Ok(()) };
            let done = match room {
                Ok(()) => work(on_machine(open.store(), location, open.cluster()), deadline).await,
                Err(error) => Err(error.into()),
            };
            // The next call need not wait until the store is closed.
            drop(lock);
            if let Err(error) = open.close().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
            done
        });
        // A name server that does not answer holds up nobody.
        runtime.shutdown_background();
        done
    }
}

/// The use that a verb makes of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// It works on the store that is there.
    Existing,
    /// It assigns from the store that is there.
    Assign,
    /// It checks whether it could work on the store that is there, with a short wait.
    Status,
    /// It makes the store if there is none.
    Make,
    /// It releases, and may use the ballast for that on a full disk.
    Release,
    /// The same for many attachments, with a commit for each block.
    Collect,
}

impl Use {
    /// True for ADD and DEL: during these Calico's plugin holds the host's lock.
    fn is_one_attachments(self) -> bool {
        matches!(self, Self::Assign | Self::Make | Self::Release)
    }
}

async fn open(location: &Location, what_for: Use, wait: Duration) -> kv::Result<OpenStore> {
    let options = match what_for {
        Use::Existing | Use::Assign => Create::Never.with_wait(wait),
        Use::Status if location.is_shared() => Create::Never.with_wait(wait),
        Use::Status => Create::Never.with_wait(wait.min(STATUS_WAIT)),
        Use::Make => Create::IfMissing.with_wait(wait),
        Use::Release | Use::Collect => Create::Never.with_wait(wait).with_purpose(Purpose::Release),
    };
    datastore::open(location, &in_place(options)).await
}

/// For a process that does one thing at a time and ends.
pub(crate) fn in_place(options: OpenOptions) -> OpenOptions {
    options.with_blocking(Blocking::InPlace)
}

/// Takes the host's lock where a cluster's store asks for it.
async fn lock(at: &StoreAt, what_for: Use, store: Arc<dyn Store>) -> Option<HostLock> {
    let is_due = at.location.is_shared() && what_for.is_one_attachments();
    if is_due { HostLock::take(&at.lock_file, at.patience, connect(store)).await } else { None }
}

/// Connects to the store: a cluster is connected to with the first request. That is a third of the time for which a call of
/// sixteen at once would hold the host's lock.
async fn connect(store: Arc<dyn Store>) {
    let request = RangeRequest::new(Range::Key(keys::config())).with_content(Content::KeysOnly);
    // The call itself meets the same error, and reports it.
    let _ = store.range(request).await;
}

/// How long a call may take.
pub(crate) fn budget(at: &StoreAt) -> Duration {
    if at.location.is_shared() { at.patience } else { BUDGET.saturating_sub(at.spent).max(LEAST) }
}

/// True if an error says that there is no store yet. A cluster always has one: there the missing thing is a credential
/// file.
pub(crate) fn is_no_store(error: &kv::Error, location: &Location) -> bool {
    *error.kind() == ErrorKind::Missing && !location.is_shared()
}

/// The allocator on a store. On etcd a commit of a killed process may still be carried out, so the allocator records
/// each commit as pending before it sends it. On a store that a process has to itself nothing is carried out after its
/// death. On etcd it also remembers where it found room, which saves a round trip. Everywhere it remembers which of several
/// pools were full.
pub(crate) fn ipam_on(store: Arc<dyn Store>, location: &Location, cluster: Option<Arc<dyn ClusterStore>>) -> Ipam {
    if location.is_shared() {
        let intents = FileIntents::new(INTENTS_FOLDER, location.to_string()).on(cluster);
        // Hints are read before the cluster has reported its id.
        let hints = FileHints::new(HINTS_FOLDER, location.in_order());
        Ipam::new(store, Nodes::Registered).with_intents(Arc::new(intents)).with_hints(Arc::new(hints))
    } else {
        let hints = FullPools(FileHints::new(HINTS_FOLDER, location.to_string()));
        Ipam::new(store, Nodes::FirstSeen).with_hints(Arc::new(hints))
    }
}

/// The same for a process that scans the machine when it finds no room.
fn on_machine(store: Arc<dyn Store>, location: &Location, cluster: Option<Arc<dyn ClusterStore>>) -> Ipam {
    ipam_on(store, location, cluster).with_live(Arc::new(Sight))
}

impl StoreAllocator {
    /// ADD, with this answer to an attachment that requests again the addresses that it has.
    pub(crate) fn add_repeated(&self, request: &AddRequest, repeated: Repeated) -> Result<Vec<Assigned>> {
        let mut assign = assign_request(request);
        assign.repeated = repeated;
        let begun = Instant::now();
        let assigned = match (self.assign(request, &request.store, &assign), &request.namespaces) {
            (Err(Failure::NamespaceWanted), Some(namespaces)) => {
                let left = |at: &StoreAt| at.patience.saturating_sub(begun.elapsed());
                assign.namespace_labels = namespaces.labels(&request.namespace, left(&request.store))?;
                assign.namespace = NamespaceLabels::Known;
                let at = StoreAt { patience: left(&request.store), ..request.store.clone() };
                self.assign(request, &at, &assign)
            }
            (assigned, _) => assigned,
        };
        let Attachment { network, node, .. } = &request.attachment;
        if let Some(rights) = Rights::of(&request.store.location, network, node) {
            match &assigned {
                Ok(_) => rights.forget_refusal(),
                Err(Failure::Store(_)) => rights.forget(),
                Err(Failure::NamespaceWanted | Failure::Cni(_)) => {}
            }
        }
        Ok(assigned?.into_iter().map(answer).collect())
    }
}

impl Allocator for StoreAllocator {
    fn add(&self, request: &AddRequest) -> Result<Vec<Assigned>> {
        self.add_repeated(request, repeated(&request.network))
    }

    fn del(&self, request: &DelRequest) -> Result<()> {
        let del = Del::of(request);
        let released = self.with_store(&request.store, Use::Release, async |ipam, deadline| {
            let Some(vm) = &request.vm else { return verbs::release(&ipam, &del, deadline).await };
            let Del { attachment, old_handle, addresses, endpoint, .. } = &del;
            let old_handles = std::slice::from_ref(old_handle);
            let released = Box::pin(ipam.release_vm_pod(vm, attachment, old_handles, addresses, deadline)).await;
            let released = released.map_err(|error| explain(error, Rules::Calico))?;
            if let Some(endpoint) = endpoint {
                let deleted = ipam.delete_endpoint(endpoint, deadline).await;
                deleted.map_err(|error| explain(error, Rules::Calico))?;
            }
            Ok(released)
        });
        match released {
            Ok(addresses) => {
                tracing::debug!(?addresses, "released");
                Ok(())
            }
            Err(Failure::Store(error)) if is_no_store(&error, &request.store.location) => {
                tracing::warn!(%error, "nothing to release");
                Ok(())
            }
            Err(failure) => Err(failure.into()),
        }
    }

    fn check(&self, request: &CheckRequest) -> Result<Checked> {
        let check = Check::of(request);
        let compared = self.with_store(&request.store, Use::Existing, async |ipam, deadline| {
            verbs::compare(&ipam, &check, deadline).await
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
        let would = self.with_store(&request.store, Use::Status, async |ipam, deadline| {
            verbs::would_assign(&ipam, &request.store.location, &assign, deadline).await
        });
        let makes_store = !own_pools(&request.network).is_empty();
        would.or_else(|failure| match failure {
            Failure::Store(error) if *error.kind() == ErrorKind::Locked => {
                tracing::info!(%error, "others have the store all the time, which says that it works");
                Ok(())
            }
            Failure::NamespaceWanted => {
                pools_depend_on_namespace();
                Ok(())
            }
            // The first ADD makes it.
            Failure::Store(error) if is_no_store(&error, &request.store.location) && makes_store => {
                Ok(could_make(&request.store.location)?)
            }
            failure => Err(failure.into()),
        })
    }

    fn quarantine(&self, at: &StoreAt, what: &Quarantine) -> Result<()> {
        self.with_store(at, Use::Assign, async |ipam, deadline| verbs::quarantine(&ipam, what, deadline).await)?;
        Ok(())
    }

    fn gc(&self, request: &GcRequest) -> Result<Collected> {
        let gc = Gc::of(request);
        let collected = self.with_store(&request.store, Use::Collect, async |ipam, deadline| {
            verbs::collect(&ipam, &gc, deadline).await
        });
        match collected {
            Err(Failure::Store(error)) if is_no_store(&error, &request.store.location) => {
                tracing::warn!(%error, "nothing to release");
                Ok(Collected::default())
            }
            other => Ok(other?),
        }
    }
}

/// Fails where the first ADD could not make the store.
fn could_make(location: &Location) -> Result<(), Failure> {
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
    Ok(runtime.block_on(could_be_made(location))?)
}

/// Logs that a STATUS cannot know which pools there are.
pub(crate) fn pools_depend_on_namespace() {
    tracing::info!("which pools there are depends on the namespace of the pod");
}

/// The answer of a network to an attachment that requests again an address that it has.
fn repeated(network: &Network) -> Repeated {
    if *network == Network::Calico { Repeated::Refused } else { Repeated::SameAnswer }
}

/// True if an error says that the store may be whole and cannot be queried now.
fn is_out_of_reach(kind: &ErrorKind) -> bool {
    kind.is_transient() || matches!(kind, ErrorKind::Io | ErrorKind::CommitIo | ErrorKind::NoSpace)
}

fn own_pools(network: &Network) -> &[OwnPool] {
    match network {
        Network::Calico => &[],
        Network::Bridged(bridged) => &bridged.own_pools,
    }
}

pub(crate) fn assign_request(request: &AddRequest) -> AssignRequest {
    let wanted =
        Wanted { these: request.wanted.clone(), any_v4: request.count_v4 as usize, any_v6: request.count_v6 as usize };
    let mut assign = AssignRequest::new(request.attachment.clone(), wanted);
    assign.attributes.clone_from(&request.attributes);
    assign.sticky.clone_from(&request.sticky);
    assign.v4_pools.clone_from(&request.pools_v4);
    assign.v6_pools.clone_from(&request.pools_v6);
    assign.max_blocks = request.max_blocks.unwrap_or(0);
    assign.repeated = repeated(&request.network);
    if request.namespaces.is_some() {
        assign.namespace = NamespaceLabels::NotYetRead;
    }
    match &request.network {
        Network::Calico => {}
        Network::Bridged(Bridged { gateway_v4, gateway_v6, gateways, own_pools, .. }) => {
            assign.bridge = Some(Bridge { v4: *gateway_v4, v6: *gateway_v6 });
            assign.gateways.clone_from(gateways);
            assign.define = definitions(&request.attachment.network, own_pools);
        }
    }
    assign
}

/// The pools that a configuration defines, named after the network; an IPv6 one says so, so that a network may get a
/// second family later. Further ones of a family are numbered.
fn definitions(network: &str, pools: &[OwnPool]) -> Vec<PoolDefinition> {
    let used = if pools.iter().any(|pool| pool.is_auto) { used_here() } else { Vec::new() };
    let definition = |pool: &OwnPool| {
        let network = pool.name.as_deref().unwrap_or(network);
        let mut name = pool_name(network);
        // A chosen subnet does not tell networks apart whose names differ in letters that no pool's name can have.
        if pool.is_auto && name != network {
            name += &format!("-{:08x}", start_of(network));
        }
        if !pool.is_v4() {
            name += "-ipv6";
        }
        if pool.number > 0 {
            name += &format!("-{}", pool.number + 1);
        }
        let (ranges, free_of) = (pool.ranges.clone(), pool.is_auto.then(|| used.clone()));
        PoolDefinition { name, cidr: pool.subnet, ranges, set: pool.set, free_of, gateway: pool.gateway }
    };
    pools.iter().map(definition).collect()
}

/// The networks that this machine uses, and that a pool of its own choice keeps off.
fn used_here() -> Vec<IpNet> {
    let mut used = host::routes().unwrap_or_else(|error| {
        tracing::warn!(%error, "the routes of this machine could not be read: a new subnet may overlap with one of them");
        Vec::new()
    });
    used.extend(datastore::runtime_subnets(Path::new(DEFAULT_CONF_DIR)).0);
    used
}

/// A network's name as the name of a pool, which has fewer letters to choose from.
fn pool_name(network: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    network.chars().map(letter).collect::<String>().trim_matches('-').to_owned()
}

/// An assignment as the protocol layer has it. The first address of a prefix is that of no host (in IPv6 it is the routers'
/// anycast address), so the interface gets the second one.
pub(crate) fn answer(assigned: Given) -> Assigned {
    let second = |length| nth(IpNet::new(assigned.ip, length).ok()?, 1);
    Assigned {
        address: assigned.prefix_length.and_then(second).unwrap_or(assigned.ip),
        prefix_length: assigned.prefix_length,
        block_prefix: assigned.block.prefix_len(),
        pool_prefix: assigned.pool.prefix_len(),
        gateway: assigned.gateway,
    }
}
