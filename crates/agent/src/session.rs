//! Opens the store of a plugin's call for all steps of the call, and creates the allocator that plugins and the daemon
//! use on an open store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use datastore::{Blocking, ClusterStore, Create, Location, OpenOptions, OpenStore, Sharing};
use ipam_core::gc::{Evidence, LivenessSource};
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Purpose, Store};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use crate::error::{CniError, VerbFailure};
use crate::hints::{FileHints, FullPoolHints, HINTS_FOLDER};
use crate::pending_commits::{PENDING_COMMITS_FOLDER, PendingCommitFolder};

/// Minimum time that remains for a later step of a call, even if the time limit of the call has passed.
pub const MIN_STEP_BUDGET: Duration = Duration::from_secs(1);
/// Time limit of a call on an embedded store, from the wait for the store to the answer. Calico's plugin has the same
/// time limit for a call on a cluster.
const EMBEDDED_CALL_TIMEOUT: Duration = Duration::from_secs(90);

/// The location of a store, the lock of its host, and the time limit of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreAccess {
    /// The location of the store.
    pub location: Location,
    /// The file that all of Calico's plugins on this host lock while they work on a cluster's store: the setting
    /// `ipam_lock_file`, or else the file that Calico uses by default. An embedded store has a lock of its own.
    pub lock_file: PathBuf,
    /// Time limit of a call on a cluster's store: the setting `datastore_timeout`, or 10 s.
    pub patience: Duration,
    /// Time that earlier steps of a call on an embedded store have used.
    pub spent: Duration,
}

impl StoreAccess {
    /// Returns the access with the remaining time of the call, because one time limit covers all steps of the call. The
    /// remaining time is always enough to report a failure.
    #[must_use]
    pub fn with_time_left(&self, begun: Instant) -> Self {
        let left = self.patience.saturating_sub(begun.elapsed()).max(MIN_STEP_BUDGET);
        Self { patience: left.min(self.patience), spent: self.spent + begun.elapsed(), ..self.clone() }
    }

    /// Returns the time limit of the rest of the call.
    pub fn budget(&self) -> Duration {
        if self.location.is_shared() {
            self.patience
        } else {
            EMBEDDED_CALL_TIMEOUT.saturating_sub(self.spent).max(MIN_STEP_BUDGET)
        }
    }
}

/// An open store, the runtime that drives it, and the deadline of the call.
#[derive(Debug)]
pub struct Session {
    location: Location,
    deadline: Deadline,
    open: OpenStore,
    runtime: Runtime,
}

impl Session {
    /// Opens the store. If an embedded store has a daemon, opens the store through the daemon.
    ///
    /// # Errors
    /// Any store error.
    pub fn open(at: &StoreAccess, purpose: Purpose) -> Result<Self, VerbFailure> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        let (location, deadline) = (at.location.clone(), Deadline::after(at.budget()));
        let wait = if location.is_shared() { deadline.remaining() } else { deadline.remaining_for_work() };
        let options = Create::Never.with_wait(wait).with_purpose(purpose).with_sharing(Sharing::OnRequest);
        let open = runtime.block_on(datastore::open(&location, &in_place(options)))?;
        Ok(Self { location, deadline, open, runtime })
    }

    /// Returns the open store.
    pub fn store(&self) -> Arc<dyn Store> {
        self.open.store()
    }

    /// Returns the open store if this process itself, not a daemon, has opened the store at this location.
    pub(crate) fn opened_at(&self, location: &Location) -> Option<&OpenStore> {
        let is_here = self.open.served().is_none() || self.open.is_exclusive();
        (self.location == *location && is_here).then_some(&self.open)
    }

    /// Returns whether other processes must wait for the store.
    pub fn is_exclusive(&self) -> bool {
        self.open.is_exclusive()
    }

    /// Returns the allocator on the session's store.
    pub fn ipam(&self) -> Ipam {
        ipam_for_store(self.store(), &self.location, self.open.cluster())
    }

    /// Returns the deadline of the call.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Runs a future to completion on the session's runtime.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Releases the store to other processes until this session uses the store again.
    pub fn pause(&self) {
        self.runtime.block_on(self.open.release_store());
    }

    /// Closes the store. A failure to close the store is only logged.
    pub fn close(self) {
        if let Err(error) = self.runtime.block_on(self.open.close()) {
            tracing::warn!(%error, "the store could not be closed cleanly");
        }
        // A name server that does not answer must not delay the end of the process.
        self.runtime.shutdown_background();
    }
}

/// Sets the options for a process that carries out one operation at a time and then ends.
pub(crate) fn in_place(options: OpenOptions) -> OpenOptions {
    options.with_blocking(Blocking::InPlace)
}

/// Returns the allocator on an open store.
///
/// On etcd a commit of a killed process may still be carried out, so the allocator records each commit as pending
/// before it sends the commit. On an embedded store no commit is carried out after the death of the process, so the
/// allocator records no pending commits. On etcd the allocator also remembers where it found free addresses, to save a
/// round trip. On any store the allocator remembers which of several pools were full.
pub fn ipam_for_store(store: Arc<dyn Store>, location: &Location, cluster: Option<Arc<dyn ClusterStore>>) -> Ipam {
    if location.is_shared() {
        let intents = PendingCommitFolder::new(PENDING_COMMITS_FOLDER, location.to_string()).with_cluster(cluster);
        // The store's name in hints lacks the cluster's id, because hints are read before the cluster has reported its
        // id.
        let hints = FileHints::new(HINTS_FOLDER, location.in_order());
        Ipam::new(store, Nodes::Registered).with_pending_commits(Arc::new(intents)).with_hints(Arc::new(hints))
    } else {
        let hints = FullPoolHints(FileHints::new(HINTS_FOLDER, location.to_string()));
        Ipam::new(store, Nodes::FirstSeen).with_hints(Arc::new(hints))
    }
}

/// Returns the allocator of [`ipam_for_store`] for a process that scans the machine when no address is free.
pub(crate) fn ipam_with_liveness(
    store: Arc<dyn Store>,
    location: &Location,
    cluster: Option<Arc<dyn ClusterStore>>,
) -> Ipam {
    ipam_for_store(store, location, cluster).with_liveness(Arc::new(HostLiveness))
}

/// Scans this machine on request for evidence of addresses in use.
#[derive(Clone, Copy, Debug)]
struct HostLiveness;

#[async_trait]
impl LivenessSource for HostLiveness {
    async fn evidence(&self) -> Option<Evidence> {
        let (done, looked) = oneshot::channel();
        // The scan has a thread of its own, because the thread that drives the store must not wait for network
        // namespaces.
        let scanning = std::thread::Builder::new().name("sight".into()).spawn(move || done.send(host::scan()));
        if let Err(error) = scanning {
            tracing::warn!(
                %error,
                "cannot start a thread to scan network namespaces; addresses left over from earlier boots stay assigned"
            );
            return None;
        }
        match looked.await {
            Ok(Ok(host::NetnsScan { addresses: live, namespaces, within })) => {
                let (boot, up) = (host::short_boot(&host::boot_id()?)?, host::uptime()?);
                Some(Evidence { boot, up, live, namespaces, within })
            }
            Ok(Err(blind)) => {
                tracing::warn!(
                    %blind,
                    "cannot scan all network namespaces; addresses left over from earlier boots stay assigned"
                );
                None
            }
            Err(_) => None,
        }
    }
}
