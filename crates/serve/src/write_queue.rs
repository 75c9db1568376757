//! The lane of verbs that write: one commit at a time, and on an embedded store one commit for all ADDs that wait.
//!
//! The lane has a [`OpenGuard`] for each round. A round assigns to all ADDs that wait, and then does one other
//! verb. So a process that waits for the store's lock waits for a round at the most, and no commit is carried from one
//! round to the next. A client that is gone by then, or whose time is over, is dropped: [`Client`] is a client that waits for an answer.

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

/// So many ADDs share a commit: a transaction has room for about twice as many.
const MAX_ADDS_PER_COMMIT: usize = 48;
/// So many verbs wait at the most. A plugin that finds no room goes by itself.
const MAX_QUEUED_VERBS: usize = 4096;

/// A verb that waits.
#[derive(Debug)]
pub struct QueuedVerb {
    /// The verb.
    pub verb: Verb,
    /// The client.
    pub client: Client,
    /// The store that the client means, of those that were at this place.
    pub generation: u64,
    /// The lock of Calico's plugins on this host.
    pub lock_file: PathBuf,
    /// When it came.
    pub received_at: Instant,
    /// Where the answer goes.
    pub answer: oneshot::Sender<Answer>,
}

impl QueuedVerb {
    fn answer(self, answer: Answer) {
        // A client that is gone needs none.
        let _ = self.answer.send(answer);
    }

    fn assign_request(&self) -> Option<&AssignRequest> {
        match &self.verb {
            Verb::Add(add) => Some(&add.request),
            _ => None,
        }
    }
}

/// The answer to a client that means a store whose place another one has taken.
pub(crate) fn replaced_answer() -> Answer {
    Answer::Declined("another store took the place of the daemon's".to_owned())
}

/// The way into the lane.
#[derive(Clone, Debug)]
pub struct WriteQueue {
    jobs: mpsc::Sender<QueuedVerb>,
}

impl WriteQueue {
    /// A lane on a store, and what works on it until the last handle is dropped.
    pub fn new(shared_store: SharedStore, metrics: Arc<Metrics>) -> (Self, impl Future<Output = ()>) {
        let (jobs, waiting) = mpsc::channel(MAX_QUEUED_VERBS);
        (Self { jobs }, QueueWorker { shared_store, metrics, jobs: waiting, waiting: VecDeque::new() }.run())
    }

    /// Lets a verb wait; the answer comes later.
    ///
    /// # Errors
    /// The job, if too many wait.
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
                // The first client's time is over. There may be more for the others.
                Err(error) if *error.kind() == ErrorKind::Locked => {}
                Err(error) => {
                    tracing::debug!(%error, "the store is not open, so the plugins go by themselves");
                    self.waiting.drain(..).for_each(|job| job.answer(Answer::Declined(error.to_string())));
                }
            }
        }
    }

    /// Takes in all that wait, and drops those that ask no more.
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

    /// The ADDs of one node, as many as share a commit.
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

    /// Assigns to all of these in one commit. If that cannot be, to each alone.
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
                    tracing::debug!(count = jobs.len(), "assigned together");
                    for (job, assigned) in jobs.into_iter().zip(answers) {
                        job.answer(Answer::Assigned(assigned));
                    }
                    return;
                }
                // The plugins ask again, each as the attachment that it is, and get what may have been assigned.
                Err(ipam_core::Error::Store(error)) if error.outcome() == Outcome::Unknown => {
                    return jobs.into_iter().for_each(|job| job.answer(Answer::Declined(error.to_string())));
                }
                Err(_) if !clients.iter().all(Client::is_waiting) => {}
                Err(error) => {
                    tracing::debug!(count = jobs.len(), %error, "not assigned together, so each is assigned alone");
                    break;
                }
            }
        }
        for job in jobs {
            self.carry_out_alone(kept, job).await;
        }
    }

    /// Carries out one verb.
    async fn carry_out_alone(&self, kept: &OpenGuard, job: QueuedVerb) {
        if !job.client.is_waiting() {
            return;
        }
        let ipam = match self.ipam(kept, job.verb.purpose(), vec![job.client.clone()]) {
            Ok(ipam) => ipam,
            Err(error) => return job.answer(Answer::Declined(error.to_string())),
        };
        // As the plugin by itself has it: for one attachment on a cluster.
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

/// The longest time that a request may take, whatever the client says.
const MAX_REQUEST_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// The moment at which a request that comes now is of no use any more.
pub(crate) fn request_deadline(within: Duration) -> Instant {
    Instant::now() + within.min(MAX_REQUEST_TIMEOUT)
}

/// A client that waits for an answer, until a moment.
#[derive(Clone, Debug)]
pub struct Client {
    connection: Arc<OwnedFd>,
    /// After that the answer is of no use.
    pub until: Instant,
}

impl Client {
    /// The client at the other end of a connection.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(connection: impl AsFd, until: Instant) -> io::Result<Self> {
        Ok(Self { connection: Arc::new(connection.as_fd().try_clone_to_owned()?), until })
    }

    /// True while the connection is open and the moment has not come.
    pub fn is_waiting(&self) -> bool {
        Instant::now() < self.until && !peer::is_gone(&*self.connection)
    }

    /// The time that is left, for a call of the allocator.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.until.saturating_duration_since(Instant::now()))
    }
}

/// A store that refuses to commit once one of its clients does not ask any more.
///
/// A plugin whose connection is closed goes on by itself, or is dead and its runtime has called DEL. A commit for it would
/// come too late. Each request that it finishes is a beat of the [`Pulse`](crate::metrics::Pulse).
#[derive(Debug)]
pub struct CancellableStore {
    inner: Arc<dyn Store>,
    clients: Vec<Client>,
    metrics: Arc<Metrics>,
}

impl CancellableStore {
    /// The store, as these clients ask for it. The time of each commit is noted.
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
