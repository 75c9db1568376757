//! The lane of verbs that write: one commit at a time, and on an embedded store one commit for all ADDs that wait.
//!
//! The lane has a [`OpenGuard`] for each round. A round assigns to all ADDs that wait, and then does one other
//! verb. So a process that waits for the store's lock waits for a round at the most, and no commit is carried from one
//! round to the next. A client that is gone by then, or whose time is over, is dropped: [`Asker`] is a client that waits for an answer.

use std::collections::VecDeque;
use std::future::ready;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::{Answer, HostLock, Verb, ipam_on};
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
const MOST_TOGETHER: usize = 48;
/// So many verbs wait at the most. A plugin that finds no room goes by itself.
const MOST_WAITING: usize = 4096;

/// A verb that waits.
#[derive(Debug)]
pub struct Job {
    /// The verb.
    pub verb: Verb,
    /// The client.
    pub asker: Asker,
    /// The store that the client means, of those that were at this place.
    pub generation: u64,
    /// The lock of Calico's plugins on this host.
    pub lock_file: PathBuf,
    /// When it came.
    pub begun: Instant,
    /// Where the answer goes.
    pub answer: oneshot::Sender<Answer>,
}

impl Job {
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
pub(crate) fn replaced() -> Answer {
    Answer::ByYourself("another store took the place of the daemon's".to_owned())
}

/// The way into the lane.
#[derive(Clone, Debug)]
pub struct Lane {
    jobs: mpsc::Sender<Job>,
}

impl Lane {
    /// A lane on a store, and what works on it until the last handle is dropped.
    pub fn new(held: SharedStore, metrics: Arc<Metrics>) -> (Self, impl Future<Output = ()>) {
        let (jobs, waiting) = mpsc::channel(MOST_WAITING);
        (Self { jobs }, Worker { held, metrics, jobs: waiting, waiting: VecDeque::new() }.run())
    }

    /// Lets a verb wait; the answer comes later.
    ///
    /// # Errors
    /// The job, if too many wait.
    pub fn enter(&self, job: Job) -> Result<(), Box<Job>> {
        self.jobs.try_send(job).map_err(|error| Box::new(error.into_inner()))
    }
}

struct Worker {
    held: SharedStore,
    metrics: Arc<Metrics>,
    jobs: mpsc::Receiver<Job>,
    waiting: VecDeque<Job>,
}

impl Worker {
    async fn run(mut self) {
        loop {
            if self.waiting.is_empty() {
                let Some(job) = self.jobs.recv().await else { return };
                self.waiting.push_back(job);
            }
            self.gather();
            let Some(until) = self.waiting.iter().map(|job| job.asker.until).min() else { continue };
            match self.held.keep_open(until).await {
                Ok(kept) => self.round(&kept).await,
                // The first client's time is over. There may be more for the others.
                Err(error) if *error.kind() == ErrorKind::Locked => {}
                Err(error) => {
                    tracing::debug!(%error, "the store is not open, so the plugins go by themselves");
                    self.waiting.drain(..).for_each(|job| job.answer(Answer::ByYourself(error.to_string())));
                }
            }
        }
    }

    /// Takes in all that wait, and drops those that ask no more.
    fn gather(&mut self) {
        while let Ok(job) = self.jobs.try_recv() {
            self.waiting.push_back(job);
        }
        self.waiting.retain(|job| job.asker.still_asks());
    }

    async fn round(&mut self, kept: &OpenGuard) {
        self.gather();
        for job in std::mem::take(&mut self.waiting) {
            match job.generation == kept.generation {
                true => self.waiting.push_back(job),
                false => job.answer(replaced()),
            }
        }
        let is_cluster = self.held.location().is_shared();
        if !is_cluster {
            let together = self.take_adds();
            self.assign_together(kept, together).await;
        }
        let next = self.waiting.iter().position(|job| is_cluster || job.assign_request().is_none());
        if let Some(job) = next.and_then(|next| self.waiting.remove(next)) {
            self.metrics.observe_queue(job.begun.elapsed());
            self.alone(kept, job).await;
        }
    }

    /// The ADDs of one node, as many as share a commit.
    fn take_adds(&mut self) -> Vec<Job> {
        let mut node = None;
        let mut together = Vec::new();
        for job in std::mem::take(&mut self.waiting) {
            let its = job.assign_request().map(|request| request.attachment.node.clone());
            let is_beside = its.is_some() && (node.is_none() || node == its) && together.len() < MOST_TOGETHER;
            if is_beside {
                node = its;
                self.metrics.observe_queue(job.begun.elapsed());
                together.push(job);
            } else {
                self.waiting.push_back(job);
            }
        }
        together
    }

    /// Assigns to all of these in one commit. If that cannot be, to each alone.
    async fn assign_together(&self, kept: &OpenGuard, mut jobs: Vec<Job>) {
        loop {
            jobs.retain(|job| job.asker.still_asks());
            if jobs.len() < 2 {
                break;
            }
            let requests: Vec<AssignRequest> = jobs.iter().filter_map(Job::assign_request).cloned().collect();
            let askers: Vec<Asker> = jobs.iter().map(|job| job.asker.clone()).collect();
            let left = askers.iter().map(|asker| asker.until).min().unwrap_or_else(Instant::now);
            let deadline = Deadline::after(left.saturating_duration_since(Instant::now()));
            let Ok(ipam) = self.ipam(kept, Purpose::Any, askers.clone()) else { break };
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
                    return jobs.into_iter().for_each(|job| job.answer(Answer::ByYourself(error.to_string())));
                }
                Err(_) if !askers.iter().all(Asker::still_asks) => {}
                Err(error) => {
                    tracing::debug!(count = jobs.len(), %error, "not assigned together, so each is assigned alone");
                    break;
                }
            }
        }
        for job in jobs {
            self.alone(kept, job).await;
        }
    }

    /// Carries out one verb.
    async fn alone(&self, kept: &OpenGuard, job: Job) {
        if !job.asker.still_asks() {
            return;
        }
        let ipam = match self.ipam(kept, job.verb.purpose(), vec![job.asker.clone()]) {
            Ok(ipam) => ipam,
            Err(error) => return job.answer(Answer::ByYourself(error.to_string())),
        };
        // As the plugin by itself has it: for one attachment on a cluster.
        let locks = self.held.location().is_shared() && job.verb.takes_host_lock();
        let budget = job.asker.until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let lock = if locks { HostLock::take(&job.lock_file, budget, ready(())).await } else { None };
        let done = job.verb.carry_out(&ipam, self.held.location(), job.asker.deadline()).await;
        drop(lock);
        job.answer(done.into());
    }

    fn ipam(&self, kept: &OpenGuard, purpose: Purpose, askers: Vec<Asker>) -> Result<Ipam> {
        let store = AskedStore::new(kept.store(purpose)?, askers, Arc::clone(&self.metrics));
        let store: Arc<dyn Store> = Arc::new(store);
        Ok(ipam_on(store, self.held.location(), kept.open()?.cluster()))
    }
}

/// The longest time that a request may take, whatever the client says.
const LONGEST: Duration = Duration::from_secs(10 * 60);

/// The moment at which a request that comes now is of no use any more.
pub(crate) fn until(within: Duration) -> Instant {
    Instant::now() + within.min(LONGEST)
}

/// A client that waits for an answer, until a moment.
#[derive(Clone, Debug)]
pub struct Asker {
    connection: Arc<OwnedFd>,
    /// After that the answer is of no use.
    pub until: Instant,
}

impl Asker {
    /// The client at the other end of a connection.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(connection: impl AsFd, until: Instant) -> io::Result<Self> {
        Ok(Self { connection: Arc::new(connection.as_fd().try_clone_to_owned()?), until })
    }

    /// True while the connection is open and the moment has not come.
    pub fn still_asks(&self) -> bool {
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
pub struct AskedStore {
    inner: Arc<dyn Store>,
    askers: Vec<Asker>,
    metrics: Arc<Metrics>,
}

impl AskedStore {
    /// The store, as these clients ask for it. The time of each commit is noted.
    pub fn new(inner: Arc<dyn Store>, askers: Vec<Asker>, metrics: Arc<Metrics>) -> Self {
        Self { inner, askers, metrics }
    }
}

#[async_trait]
impl Store for AskedStore {
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
        if !self.askers.iter().all(Asker::still_asks) {
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
