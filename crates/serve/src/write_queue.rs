//! Queues the CNI verbs that need a write, and executes them one commit at a time. On an embedded store, all waiting
//! ADDs share one commit.
//!
//! The queue works in rounds and keeps one [`OpenGuard`] per round. In each round, the queue assigns addresses for all
//! waiting ADDs, and carries out one verb of another kind. A process that waits for the store lock waits for at most
//! one round of the daemon's write queue, and no commit spans two rounds. A verb is dropped if its [`Client`] has
//! disconnected or run out of time.

use std::collections::VecDeque;
use std::future::ready;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::{Answer, HostLock, Verb, ipam_for_store};
use async_trait::async_trait;
use datastore::shared_store::{OpenGuard, SharedStore};
use ipam_core::Ipam;
use ipam_core::assign::AssignRequest;
use kv::{
    Deadline, Error, ErrorKind, Operation, Outcome, Purpose, RangeRequest, RangeResponse, Result, Revision, Store, Txn,
    TxnResponse, WatchRequest, WatchStream,
};
use tokio::sync::{mpsc, oneshot};
use wire::peer;

use crate::metrics::Metrics;

/// Maximum number of ADDs committed in one transaction (about half of what fits).
const MAX_ADDS_PER_COMMIT: usize = 48;
/// Maximum number of queued verbs. When the queue is full, the plugin opens the store itself.
const MAX_QUEUED_VERBS: usize = 4096;

/// A queued CNI verb and where to send its answer.
#[derive(Debug)]
pub struct QueuedVerb {
    /// The CNI verb to carry out.
    pub verb: Verb,
    /// The client that waits for the answer to the verb.
    pub client: Client,
    /// Generation of the store that the client connected to. The generation changes when another store replaces the
    /// store that the client connected to.
    pub generation: u64,
    /// Path of the host lock that Calico's plugins take on this host.
    pub lock_file: PathBuf,
    /// When the daemon received the request.
    pub received_at: Instant,
    /// The channel for the answer to the verb.
    pub answer: oneshot::Sender<Answer>,
}

impl QueuedVerb {
    fn answer(self, answer: Answer) {
        // The client disconnected; dropping the answer is fine.
        let _ = self.answer.send(answer);
    }

    fn assign_request(&self) -> Option<&AssignRequest> {
        match &self.verb {
            Verb::Add(add) => Some(&add.request),
            _ => None,
        }
    }
}

/// Returns the answer to a client whose store was replaced by another store at the same path.
pub(crate) fn replaced_answer() -> Answer {
    Answer::Declined("another store took the place of the daemon's".to_owned())
}

/// A handle for submitting verbs to the write queue.
#[derive(Clone, Debug)]
pub struct WriteQueue {
    jobs: mpsc::Sender<QueuedVerb>,
}

impl WriteQueue {
    /// Creates a write queue for a store. Returns the queue's handle, and the future that carries out queued verbs
    /// until the last handle is dropped.
    pub fn new(shared_store: SharedStore, metrics: Arc<Metrics>) -> (Self, impl Future<Output = ()>) {
        let (jobs, waiting) = mpsc::channel(MAX_QUEUED_VERBS);
        (Self { jobs }, QueueWorker { shared_store, metrics, jobs: waiting, waiting: VecDeque::new() }.run())
    }

    /// Queues a verb. The answer arrives through the verb's `answer` channel.
    ///
    /// # Errors
    /// Returns the verb if the queue is full.
    pub fn submit(&self, job: QueuedVerb) -> Result<(), Box<QueuedVerb>> {
        self.jobs.try_send(job).map_err(|error| Box::new(error.into_inner()))
    }
}

struct QueueWorker {
    shared_store: SharedStore,
    metrics: Arc<Metrics>,
    jobs: mpsc::Receiver<QueuedVerb>,
    waiting: VecDeque<QueuedVerb>,
}

impl QueueWorker {
    async fn run(mut self) {
        loop {
            if self.waiting.is_empty() {
                let Some(job) = self.jobs.recv().await else { return };
                self.waiting.push_back(job);
            }
            self.drain_queue();
            let Some(until) = self.waiting.iter().map(|job| job.client.until).min() else { continue };
            match self.shared_store.keep_open(until).await {
                Ok(kept) => self.run_round(&kept).await,
                // The earliest deadline of the waiting clients has passed, but clients with later deadlines may still
                // have time.
                Err(error) if *error.kind() == ErrorKind::Locked => {}
                Err(error) => {
                    tracing::debug!(
                        %error,
                        "the daemon cannot open the store; plugins that wait for the daemon open the store directly"
                    );
                    self.waiting.drain(..).for_each(|job| job.answer(Answer::Declined(error.to_string())));
                }
            }
        }
    }

    /// Receives all submitted verbs, and drops verbs whose client no longer waits.
    fn drain_queue(&mut self) {
        while let Ok(job) = self.jobs.try_recv() {
            self.waiting.push_back(job);
        }
        self.waiting.retain(|job| job.client.is_waiting());
    }

    async fn run_round(&mut self, kept: &OpenGuard) {
        self.drain_queue();
        for job in std::mem::take(&mut self.waiting) {
            match job.generation == kept.generation {
                true => self.waiting.push_back(job),
                false => job.answer(replaced_answer()),
            }
        }
        let is_cluster = self.shared_store.location().is_shared();
        if !is_cluster {
            let together = self.take_adds();
            self.assign_together(kept, together).await;
        }
        let next = self.waiting.iter().position(|job| is_cluster || job.assign_request().is_none());
        if let Some(job) = next.and_then(|next| self.waiting.remove(next)) {
            self.metrics.observe_queue(job.received_at.elapsed());
            self.carry_out_alone(kept, job).await;
        }
    }

    /// Takes up to [`MAX_ADDS_PER_COMMIT`] waiting ADDs of one node from the queue.
    fn take_adds(&mut self) -> Vec<QueuedVerb> {
        let mut node = None;
        let mut together = Vec::new();
        for job in std::mem::take(&mut self.waiting) {
            let its = job.assign_request().map(|request| request.attachment.node.clone());
            let is_beside = its.is_some() && (node.is_none() || node == its) && together.len() < MAX_ADDS_PER_COMMIT;
            if is_beside {
                node = its;
                self.metrics.observe_queue(job.received_at.elapsed());
                together.push(job);
            } else {
                self.waiting.push_back(job);
            }
        }
        together
    }

    /// Assigns addresses for all of the given ADDs in one commit. If the commit fails, carries out the ADDs one by one.
    async fn assign_together(&self, kept: &OpenGuard, mut jobs: Vec<QueuedVerb>) {
        loop {
            jobs.retain(|job| job.client.is_waiting());
            if jobs.len() < 2 {
                break;
            }
            let requests: Vec<AssignRequest> = jobs.iter().filter_map(QueuedVerb::assign_request).cloned().collect();
            let clients: Vec<Client> = jobs.iter().map(|job| job.client.clone()).collect();
            let left = clients.iter().map(|client| client.until).min().unwrap_or_else(Instant::now);
            let deadline = Deadline::after(left.saturating_duration_since(Instant::now()));
            let Ok(ipam) = self.ipam(kept, Purpose::Any, clients.clone()) else { break };
            match ipam.assign_together(&requests, deadline).await {
                Ok(answers) => {
                    tracing::debug!(count = jobs.len(), "assigned addresses to several containers in one commit");
                    for (job, assigned) in jobs.into_iter().zip(answers) {
                        job.answer(Answer::Assigned(assigned));
                    }
                    return;
                }
                // A commit with an unknown outcome may have succeeded. If a commit's outcome is unknown, the plugins
                // retry; a retry returns the address that the commit assigned, if it succeeded.
                Err(ipam_core::Error::Store(error)) if error.outcome() == Outcome::Unknown => {
                    return jobs.into_iter().for_each(|job| job.answer(Answer::Declined(error.to_string())));
                }
                Err(_) if !clients.iter().all(Client::is_waiting) => {}
                Err(error) => {
                    tracing::debug!(
                        count = jobs.len(),
                        %error,
                        "cannot assign addresses to several containers in one commit; assigning addresses to one \
                         container at a time"
                    );
                    break;
                }
            }
        }
        for job in jobs {
            self.carry_out_alone(kept, job).await;
        }
    }

    async fn carry_out_alone(&self, kept: &OpenGuard, job: QueuedVerb) {
        if !job.client.is_waiting() {
            return;
        }
        let ipam = match self.ipam(kept, job.verb.purpose(), vec![job.client.clone()]) {
            Ok(ipam) => ipam,
            Err(error) => return job.answer(Answer::Declined(error.to_string())),
        };
        // For a verb about one attachment on a cluster, the daemon takes the host lock, as plugins without a daemon do.
        let locks = self.shared_store.location().is_shared() && job.verb.takes_host_lock();
        let budget = job.client.until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let lock = if locks { HostLock::take(&job.lock_file, budget, ready(())).await } else { None };
        let done = job.verb.carry_out(&ipam, self.shared_store.location(), job.client.deadline()).await;
        drop(lock);
        job.answer(done.into());
    }

    fn ipam(&self, kept: &OpenGuard, purpose: Purpose, clients: Vec<Client>) -> Result<Ipam> {
        let store = CancellableStore::new(kept.store(purpose)?, clients, Arc::clone(&self.metrics));
        let store: Arc<dyn Store> = Arc::new(store);
        Ok(ipam_for_store(store, self.shared_store.location(), kept.open()?.cluster()))
    }
}

/// Maximum time that a request may take, even if the client asks for more.
const MAX_REQUEST_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Returns the deadline of a request that arrives now with the time limit `within`.
pub(crate) fn request_deadline(within: Duration) -> Instant {
    Instant::now() + within.min(MAX_REQUEST_TIMEOUT)
}

/// A client that waits for an answer until its deadline.
#[derive(Clone, Debug)]
pub struct Client {
    connection: Arc<OwnedFd>,
    /// The time at which the client stops waiting.
    pub until: Instant,
}

impl Client {
    /// Creates a `Client` for a connection; duplicates the connection's file descriptor.
    ///
    /// # Errors
    /// An I/O error if the file descriptor cannot be duplicated.
    pub fn new(connection: impl AsFd, until: Instant) -> io::Result<Self> {
        Ok(Self { connection: Arc::new(connection.as_fd().try_clone_to_owned()?), until })
    }

    /// Returns whether the client's connection is open and its deadline has not passed.
    pub fn is_waiting(&self) -> bool {
        Instant::now() < self.until && !peer::is_gone(&*self.connection)
    }

    /// The client's remaining time, as a deadline for the allocator.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.until.saturating_duration_since(Instant::now()))
    }
}

/// A store that refuses to commit once one of its clients no longer waits.
///
/// A plugin that has closed its connection either continues without the daemon, or has died and its runtime has called
/// DEL. A plugin that has closed its connection cannot receive the answer, so its verb must not be committed any more.
/// Reports each request that a `CancellableStore` completes to the [`Pulse`](crate::metrics::Pulse) as progress.
#[derive(Debug)]
pub struct CancellableStore {
    inner: Arc<dyn Store>,
    clients: Vec<Client>,
    metrics: Arc<Metrics>,
}

impl CancellableStore {
    /// Wraps a store so that it refuses to commit once one of the given clients no longer waits. The time of each
    /// commit is recorded in `metrics`.
    pub fn new(inner: Arc<dyn Store>, clients: Vec<Client>, metrics: Arc<Metrics>) -> Self {
        Self { inner, clients, metrics }
    }
}

#[async_trait]
impl Store for CancellableStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let answer = self.inner.range(request).await;
        self.metrics.pulse.beat();
        answer
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        if txn.is_read_only() {
            let answer = self.inner.txn(txn).await;
            self.metrics.pulse.beat();
            return answer;
        }
        if !self.clients.iter().all(Client::is_waiting) {
            let error = Error::new(ErrorKind::Conflict { attempts: 0 }, Operation::Txn, "serve");
            return Err(error.with_detail("the caller does not ask any more").with_outcome(Outcome::NotApplied));
        }
        let begun = Instant::now();
        let answer = self.inner.txn(txn).await;
        self.metrics.observe_commit(begun.elapsed());
        answer
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }
}
