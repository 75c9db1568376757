//! Carries out CNI verbs for a plugin: the trait [`Allocator`] and its two implementations.
//!
//! [`DaemonAllocator`] sends a CNI verb to the daemon `margay serve`, if the store has a daemon. If there is no daemon
//! or the daemon fails, [`DirectAllocator`] opens the store, carries out the verb, and closes the store.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use datastore::maintenance::check_creatable;
use datastore::served::{is_meant, is_trusted, socket};
use datastore::{Create, Location, OpenOptions};
use ipam_core::assign::{AssignedAddress, RepeatPolicy};
use ipam_core::model::keys;
use kv::{Content, Deadline, ErrorKind, Range, RangeRequest, Store};
use tokio::runtime::Builder;
use wire::{DaemonConnection, FROZEN_TIMEOUT, FrameKind};

use crate::error::{CniError, Code, Result, VerbFailure};
use crate::host_lock::HostLock;
use crate::rights::WriteRights;
use crate::session::{Session, StoreAccess, in_place, ipam_with_liveness};
use crate::verb::{Add, Answer, Check, CheckAnswer, Del, Gc, GcSummary, Quarantine, Verb, VerbRequest};

/// Carries out CNI verbs on a store, after the plugin has checked the verbs' requests.
///
/// A plugin process makes a single, synchronous call of an allocator. An implementation closes the store before the
/// call returns, because the process may end right afterwards.
pub trait Allocator {
    /// Carries out a verb on a store, and returns an answer of the kind that the verb expects.
    ///
    /// # Errors
    /// The plugin prints the returned error unchanged, and the runtime repeats the verb later. On a Calico network, the
    /// error has Calico's message and the code 999. If the store cannot be reached, the error of a CHECK has the code
    /// 11.
    fn call(&self, at: &StoreAccess, verb: &Verb) -> Result<Answer>;
}

impl dyn Allocator + '_ {
    /// Carries out an ADD on a store. Returns `None` if a pool's selector needs the labels of the pod's namespace, and
    /// the request does not contain these labels.
    ///
    /// # Errors
    /// Any error of [`call`](Allocator::call).
    pub fn add(&self, at: &StoreAccess, add: &Add) -> Result<Option<Vec<AssignedAddress>>> {
        match self.call(at, &Verb::Add(Box::new(add.clone())))? {
            Answer::Assigned(assigned) => Ok(Some(assigned)),
            Answer::NamespaceWanted => Ok(None),
            other => Err(wrong_answer_error(&other)),
        }
    }

    /// Carries out a DEL on a store, and returns the released addresses.
    ///
    /// # Errors
    /// Any error of [`call`](Allocator::call).
    pub fn del(&self, at: &StoreAccess, del: Del) -> Result<Vec<IpAddr>> {
        match self.call(at, &Verb::Del(del))? {
            Answer::Released(addresses) => {
                tracing::debug!(?addresses, "released addresses");
                Ok(addresses)
            }
            other => Err(wrong_answer_error(&other)),
        }
    }

    /// Carries out a CHECK on a store.
    ///
    /// # Errors
    /// Any error of [`call`](Allocator::call).
    pub fn check(&self, at: &StoreAccess, check: Check) -> Result<CheckAnswer> {
        match self.call(at, &Verb::Check(check))? {
            Answer::Checked(checked) => Ok(checked),
            other => Err(wrong_answer_error(&other)),
        }
    }

    /// Checks for a STATUS whether this ADD would succeed now.
    ///
    /// # Errors
    /// The problem with the store or the configuration that would make an ADD fail. STATUS reports a problem with the
    /// store or the configuration with CNI error code 50.
    pub fn status(&self, at: &StoreAccess, add: Add) -> Result<()> {
        if self.call(at, &Verb::Status(Box::new(add)))? == Answer::NamespaceWanted {
            tracing::info!(
                "STATUS did not check for a free address: which pools are allowed depends on the namespace of a pod, \
                 and a STATUS call names no pod"
            );
        }
        Ok(())
    }

    /// Carries out a GC on a store.
    ///
    /// # Errors
    /// Any error of [`call`](Allocator::call).
    pub fn gc(&self, at: &StoreAccess, gc: Gc) -> Result<GcSummary> {
        match self.call(at, &Verb::Gc(gc))? {
            Answer::Collected(collected) => Ok(collected),
            other => Err(wrong_answer_error(&other)),
        }
    }

    /// Releases the addresses for which another device answered the probe of an ADD, and quarantines the released
    /// addresses.
    ///
    /// # Errors
    /// Any error of [`call`](Allocator::call).
    pub fn quarantine(&self, at: &StoreAccess, what: Quarantine) -> Result<()> {
        self.call(at, &Verb::Quarantine(what)).map(drop)
    }
}

fn wrong_answer_error(answer: &Answer) -> CniError {
    CniError::internal(format!("the allocator answered another verb: {answer:?}"))
}

/// An allocator that sends CNI verbs to the store's daemon. If the daemon does not carry out a verb, the plugin opens
/// the store itself.
#[derive(Clone, Debug, Default)]
pub struct DaemonAllocator {
    direct: DirectAllocator,
}

#[derive(Debug)]
enum DaemonReply {
    Answer(Answer),
    /// The daemon has not received the request.
    NotRunning,
    /// The daemon received the request but did not answer, so it is unknown whether the request was carried out.
    Lost,
}

impl DaemonAllocator {
    /// Creates an allocator for a plugin call that already has the store open. If the daemon declines a verb, the verb
    /// runs on the session's open store.
    pub fn within(session: Arc<Session>) -> Self {
        Self { direct: DirectAllocator::within(session) }
    }
}

impl Allocator for DaemonAllocator {
    fn call(&self, at: &StoreAccess, verb: &Verb) -> Result<Answer> {
        if verb.needs_the_plugin() {
            return self.direct.call(at, verb);
        }
        let begun = Instant::now();
        // The connection that carries the yield request must stay open until this process has opened the store.
        let (repeated, _announced) = match ask_daemon(at, verb) {
            DaemonReply::Answer(Answer::Refused(error)) => return Err(error),
            DaemonReply::Answer(answer) if verb.is_answered_by(&answer) => return Ok(answer),
            DaemonReply::Answer(answer) => {
                tracing::debug!(?answer, "the margay daemon declined the CNI call; opening the store directly");
                (verb.as_repeat(), ask_daemon_to_yield(&at.location))
            }
            DaemonReply::Lost | DaemonReply::NotRunning
                if matches!(verb, Verb::Status(_))
                    && at.location.path().is_some()
                    && begun.elapsed() >= STATUS_TIMEOUT =>
            {
                tracing::info!(
                    "the margay daemon serves this store, but did not answer in time; STATUS reports ready without \
                     opening the store"
                );
                return Ok(Answer::Ready);
            }
            DaemonReply::Lost => (verb.as_repeat(), None),
            DaemonReply::NotRunning => (None, None),
        };
        self.direct.call(&at.with_time_left(begun), repeated.as_ref().unwrap_or(verb))
    }
}

impl Verb {
    /// Returns the verb that the plugin runs itself after it sent this verb to the daemon and got no answer. Returns
    /// `None` if the plugin may repeat the verb as it is. A repeated ADD returns the addresses that the daemon may
    /// already have assigned to the attachment.
    fn as_repeat(&self) -> Option<Self> {
        let Self::Add(add) = self else { return None };
        let mut add = add.clone();
        add.request.repeated = RepeatPolicy::SameAnswer;
        Some(Self::Add(add))
    }
}

/// Sends a verb to the daemon, and waits for the answer until the verb's time limit has passed or the daemon dies.
fn ask_daemon(at: &StoreAccess, verb: &Verb) -> DaemonReply {
    let within = verb.budget(at);
    let end = Instant::now() + within;
    let location = &at.location;
    let Some(socket) = socket(location) else { return DaemonReply::NotRunning };
    let connection = match DaemonConnection::open(&socket, within, |uid| is_trusted(location, uid)) {
        Ok(connection) => connection,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return DaemonReply::NotRunning;
        }
        Err(error) => {
            tracing::warn!(%error, socket = %socket.display(), "cannot use the margay daemon; opening the store directly");
            return DaemonReply::NotRunning;
        }
    };
    if !is_meant(location, &connection.hello) {
        tracing::debug!(
            hello = ?connection.hello,
            "the margay daemon does not serve this store, or is not the same version as the plugin; \
             opening the store directly"
        );
        return DaemonReply::NotRunning;
    }
    let within: Duration = end.saturating_duration_since(Instant::now());
    let asked = VerbRequest { within, lock_file: at.lock_file.clone(), verb: verb.clone() };
    match connection.ask(FrameKind::Verb, &asked, within) {
        Ok(answer) => DaemonReply::Answer(answer),
        Err(error) => {
            tracing::warn!(%error, "received no answer from the margay daemon; opening the store directly");
            DaemonReply::Lost
        }
    }
}

/// Asks the daemon of an embedded store to release the store for this process. The returned connection must stay open
/// until this process has opened the store.
fn ask_daemon_to_yield(location: &Location) -> Option<DaemonConnection> {
    let socket = socket(location).filter(|_| location.path().is_some())?;
    let mut connection = DaemonConnection::open(&socket, FROZEN_TIMEOUT, |uid| is_trusted(location, uid)).ok()?;
    connection.ask_to_yield().ok()?;
    Some(connection)
}

/// Time limit for carrying out a STATUS.
const STATUS_TIMEOUT: Duration = Duration::from_millis(900);
/// The part of [`STATUS_TIMEOUT`] that a STATUS may spend waiting for the store lock. If a STATUS times out waiting for
/// the store lock, finding out which process holds the lock takes another 300 ms.
const STATUS_LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// An allocator that opens the store in this process.
#[derive(Clone, Debug, Default)]
pub struct DirectAllocator {
    given: Option<Arc<dyn Store>>,
    session: Option<Arc<Session>>,
}

impl DirectAllocator {
    /// Creates an allocator that uses the caller's open store for every call, even if the call names another location.
    /// The allocator never closes the caller's store.
    pub fn on(store: Arc<dyn Store>) -> Self {
        Self { given: Some(store), session: None }
    }

    /// Creates an allocator that uses the session's open store for every call that names the location of this store.
    pub fn within(session: Arc<Session>) -> Self {
        Self { given: None, session: Some(session) }
    }

    /// Opens the store, carries out the verb, and closes the store. A failure to close the store is only logged,
    /// because the verb has already been committed.
    fn carry_out(&self, at: &StoreAccess, verb: &Verb) -> Result<Answer, VerbFailure> {
        let location = &at.location;
        if let Some(session) = &self.session
            && let Some(open) = session.opened_at(location)
        {
            return session.run(async {
                let _lock = lock_host(at, verb, open.store()).await;
                let ipam = ipam_with_liveness(open.store(), location, open.cluster());
                verb.carry_out(&ipam, location, session.deadline()).await
            });
        }
        let is_cluster = location.is_shared();
        let mut builder = Builder::new_current_thread();
        let runtime = if is_cluster { builder.enable_all() } else { builder.enable_time() }.build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        let deadline = Deadline::after(verb.budget(at));
        let done = runtime.block_on(async {
            if let Some(store) = &self.given {
                let ipam = ipam_with_liveness(Arc::clone(store), location, None);
                return verb.carry_out(&ipam, location, deadline).await;
            }
            let wait = if is_cluster { deadline.remaining() } else { deadline.remaining_for_work() };
            let open = datastore::open(location, &verb.options(location, wait)).await?;
            let lock = lock_host(at, verb, open.store()).await;
            let room = if matches!(verb, Verb::Status(_)) { open.check_room().await } else { Ok(()) };
            let done = match room {
                Ok(()) => {
                    let ipam = ipam_with_liveness(open.store(), location, open.cluster());
                    verb.carry_out(&ipam, location, deadline).await
                }
                Err(error) => Err(error.into()),
            };
            // Release the host lock before closing the store, so that the next plugin call does not wait while the
            // store is closed.
            drop(lock);
            if let Err(error) = open.close().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
            done
        });
        // An unresponsive name server must not delay the end of the process.
        runtime.shutdown_background();
        done
    }
}

impl Allocator for DirectAllocator {
    fn call(&self, at: &StoreAccess, verb: &Verb) -> Result<Answer> {
        let done = self.carry_out(at, verb);
        if let Verb::Add(add) = verb {
            let attachment = &add.request.attachment;
            if let Some(rights) = WriteRights::of(&at.location, &attachment.network, &attachment.node) {
                match &done {
                    Ok(_) => rights.forget_refusal(),
                    Err(VerbFailure::Store(_)) => rights.forget(),
                    Err(VerbFailure::NamespaceWanted | VerbFailure::NoRoom(_) | VerbFailure::Cni(_)) => {}
                }
            }
        }
        done.or_else(|failure| verb.recover_failure(&at.location, failure))
    }
}

impl Verb {
    pub(crate) fn budget(&self, at: &StoreAccess) -> Duration {
        if matches!(self, Self::Status(_)) { STATUS_TIMEOUT } else { at.budget() }
    }

    fn options(&self, location: &Location, wait: Duration) -> OpenOptions {
        let (create, wait) = match self {
            Self::Add(add) if add.makes_store() => (Create::IfMissing, wait),
            Self::Status(_) if !location.is_shared() => (Create::Never, wait.min(STATUS_LOCK_TIMEOUT)),
            _ => (Create::Never, wait),
        };
        in_place(create.with_wait(wait).with_purpose(self.purpose()))
    }

    /// Converts a failure into a successful answer if the verb tolerates this failure.
    fn recover_failure(&self, location: &Location, failure: VerbFailure) -> Result<Answer> {
        match (self, failure) {
            (Self::Add(_) | Self::Status(_), VerbFailure::NamespaceWanted) => Ok(Answer::NamespaceWanted),
            (Self::Del(_), VerbFailure::Store(error)) if is_no_store(&error, location) => {
                tracing::warn!(%error, "the store does not exist, so there is nothing to release");
                Ok(Answer::Released(Vec::new()))
            }
            (Self::Gc(_), VerbFailure::Store(error)) if is_no_store(&error, location) => {
                tracing::warn!(%error, "the store does not exist, so there is nothing to release");
                Ok(Answer::Collected(GcSummary::default()))
            }
            (Self::Check(_), VerbFailure::Store(error)) if *error.kind() == ErrorKind::Locked => {
                Ok(Answer::Checked(CheckAnswer::Unknown(error.to_string())))
            }
            (Self::Check(_), VerbFailure::Store(error)) if is_out_of_reach(error.kind()) => {
                Err(CniError::from(error).with_code(Code::TryAgain))
            }
            (Self::Status(_), VerbFailure::Store(error)) if *error.kind() == ErrorKind::Locked => {
                tracing::info!(
                    %error,
                    "another process holds the store lock, so the store is in use; STATUS reports ready without \
                     opening the store"
                );
                Ok(Answer::Ready)
            }
            // STATUS succeeds if the store does not exist yet, because the first ADD creates the store.
            (Self::Status(add), VerbFailure::Store(error)) if is_no_store(&error, location) && add.makes_store() => {
                check_can_create(location)?;
                Ok(Answer::Ready)
            }
            (_, failure) => Err(failure.into()),
        }
    }
}

/// Acquires the host lock if the verb needs it and the store is a cluster.
async fn lock_host(at: &StoreAccess, verb: &Verb, store: Arc<dyn Store>) -> Option<HostLock> {
    let is_due = at.location.is_shared() && verb.takes_host_lock();
    if is_due { HostLock::take(&at.lock_file, at.patience, connect_store(store)).await } else { None }
}

/// Connects to an etcd cluster by sending a request whose result is ignored. A plugin connects to the cluster while it
/// waits for the host lock. Connecting under the host lock would take a third of the time that a plugin holds the lock
/// (measured with 16 concurrent calls).
async fn connect_store(store: Arc<dyn Store>) {
    let request = RangeRequest::new(Range::Key(keys::config())).with_content(Content::KeysOnly);
    // If the connection's first request fails, ignore the error: the verb's own requests will fail in the same way and
    // report it.
    let _ = store.range(request).await;
}

/// Returns whether a store error means that the store does not exist yet. A cluster's store always exists; the error
/// `Missing` on a cluster means that a credential file is missing.
pub fn is_no_store(error: &kv::Error, location: &Location) -> bool {
    *error.kind() == ErrorKind::Missing && !location.is_shared()
}

/// Checks that an ADD could create the missing store.
fn check_can_create(location: &Location) -> Result<(), VerbFailure> {
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
    Ok(runtime.block_on(check_creatable(location))?)
}

/// Returns whether a store error means that the store cannot be read now, but may be intact.
fn is_out_of_reach(kind: &ErrorKind) -> bool {
    kind.is_transient() || matches!(kind, ErrorKind::Io | ErrorKind::CommitIo | ErrorKind::NoSpace)
}
