//! A plugin by itself: opens the store, does the verb in one commit, and closes the store.

use std::sync::Arc;
use std::time::Duration;

use datastore::care::could_be_made;
use datastore::{Create, Location, OpenOptions};
use ipam_core::model::keys;
use kv::{Content, Deadline, ErrorKind, Range, RangeRequest, Store};
use tokio::runtime::Builder;

use crate::allocator::Allocator;
use crate::error::{CniError, Code, Result};
use crate::failure::Failure;
use crate::host_lock::HostLock;
use crate::ipam::{in_place, on_machine};
use crate::rights::Rights;
use crate::session::Session;
use crate::store_at::StoreAt;
use crate::verb::{Answer, Checked, Collected, Verb};

/// How long a STATUS may take.
pub(crate) const STATUS_BUDGET: Duration = Duration::from_millis(900);
/// The part of that for which it waits for the store lock. A caller that waited in vain searches for the lock holder
/// for another 300 ms.
const STATUS_WAIT: Duration = Duration::from_millis(500);

/// Does verbs in the store that a call names.
#[derive(Clone, Debug, Default)]
pub struct Alone {
    given: Option<Arc<dyn Store>>,
    session: Option<Arc<Session>>,
}

impl Alone {
    /// An allocator on a store that the caller has open. It works on this store, whatever a call names, and does not
    /// close it.
    pub fn on(store: Arc<dyn Store>) -> Self {
        Self { given: Some(store), session: None }
    }

    /// An allocator that works in a session where the session has the store that a call names.
    pub fn within(session: Arc<Session>) -> Self {
        Self { given: None, session: Some(session) }
    }

    /// Opens the store, does the verb, and closes the store. A store that cannot be closed cleanly has nevertheless
    /// committed: that is logged and not an error.
    fn carry_out(&self, at: &StoreAt, verb: &Verb) -> Result<Answer, Failure> {
        let location = &at.location;
        if let Some(session) = &self.session
            && let Some(open) = session.opened_at(location)
        {
            return session.run(async {
                let _lock = lock(at, verb, open.store()).await;
                let ipam = on_machine(open.store(), location, open.cluster());
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
                let ipam = on_machine(Arc::clone(store), location, None);
                return verb.carry_out(&ipam, location, deadline).await;
            }
            let wait = if is_cluster { deadline.remaining() } else { deadline.remaining_for_work() };
            let open = datastore::open(location, &verb.options(location, wait)).await?;
            let lock = lock(at, verb, open.store()).await;
            let room = if matches!(verb, Verb::Status(_)) { open.check_room().await } else { Ok(()) };
            let done = match room {
                Ok(()) => {
                    let ipam = on_machine(open.store(), location, open.cluster());
                    verb.carry_out(&ipam, location, deadline).await
                }
                Err(error) => Err(error.into()),
            };
            // The next call need not wait until the store is closed.
            drop(lock);
            if let Err(error) = open.close().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
            done
        });
        // The process does not wait for a name server that does not answer.
        runtime.shutdown_background();
        done
    }
}

impl Allocator for Alone {
    fn call(&self, at: &StoreAt, verb: &Verb) -> Result<Answer> {
        let done = self.carry_out(at, verb);
        if let Verb::Add(add) = verb {
            let attachment = &add.request.attachment;
            if let Some(rights) = Rights::of(&at.location, &attachment.network, &attachment.node) {
                match &done {
                    Ok(_) => rights.forget_refusal(),
                    Err(Failure::Store(_)) => rights.forget(),
                    Err(Failure::NamespaceWanted | Failure::NoRoom(_) | Failure::Cni(_)) => {}
                }
            }
        }
        done.or_else(|failure| verb.excuse(&at.location, failure))
    }
}

impl Verb {
    /// How long it may take.
    pub(crate) fn budget(&self, at: &StoreAt) -> Duration {
        if matches!(self, Self::Status(_)) { STATUS_BUDGET } else { at.budget() }
    }

    /// How the store is opened for it.
    fn options(&self, location: &Location, wait: Duration) -> OpenOptions {
        let (create, wait) = match self {
            Self::Add(add) if add.makes_store() => (Create::IfMissing, wait),
            Self::Status(_) if !location.is_shared() => (Create::Never, wait.min(STATUS_WAIT)),
            _ => (Create::Never, wait),
        };
        in_place(create.with_wait(wait).with_purpose(self.purpose()))
    }

    /// The answer all the same, where a failure is none for this verb.
    fn excuse(&self, location: &Location, failure: Failure) -> Result<Answer> {
        match (self, failure) {
            (Self::Add(_) | Self::Status(_), Failure::NamespaceWanted) => Ok(Answer::NamespaceWanted),
            (Self::Del(_), Failure::Store(error)) if is_no_store(&error, location) => {
                tracing::warn!(%error, "nothing to release");
                Ok(Answer::Released(Vec::new()))
            }
            (Self::Gc(_), Failure::Store(error)) if is_no_store(&error, location) => {
                tracing::warn!(%error, "nothing to release");
                Ok(Answer::Collected(Collected::default()))
            }
            (Self::Check(_), Failure::Store(error)) if *error.kind() == ErrorKind::Locked => {
                Ok(Answer::Checked(Checked::Unknown(error.to_string())))
            }
            (Self::Check(_), Failure::Store(error)) if is_out_of_reach(error.kind()) => {
                Err(CniError::from(error).with_code(Code::TryAgain))
            }
            (Self::Status(_), Failure::Store(error)) if *error.kind() == ErrorKind::Locked => {
                tracing::info!(%error, "others have the store all the time, which says that it works");
                Ok(Answer::Ready)
            }
            // The first ADD makes it.
            (Self::Status(add), Failure::Store(error)) if is_no_store(&error, location) && add.makes_store() => {
                could_make(location)?;
                Ok(Answer::Ready)
            }
            (_, failure) => Err(failure.into()),
        }
    }
}

/// Takes the host's lock where a cluster's store asks for it.
async fn lock(at: &StoreAt, verb: &Verb, store: Arc<dyn Store>) -> Option<HostLock> {
    let is_due = at.location.is_shared() && verb.takes_host_lock();
    if is_due { HostLock::take(&at.lock_file, at.patience, connect(store)).await } else { None }
}

/// Connects to the store: a cluster is connected to with the first request. That is a third of the time for which a call of
/// sixteen at once would hold the host's lock.
async fn connect(store: Arc<dyn Store>) {
    let request = RangeRequest::new(Range::Key(keys::config())).with_content(Content::KeysOnly);
    // The call itself meets the same error, and reports it.
    let _ = store.range(request).await;
}

/// True if an error says that there is no store yet. A cluster always has one: there the missing thing is a credential
/// file.
pub fn is_no_store(error: &kv::Error, location: &Location) -> bool {
    *error.kind() == ErrorKind::Missing && !location.is_shared()
}

/// Fails where the first ADD could not make the store.
fn could_make(location: &Location) -> Result<(), Failure> {
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
    Ok(runtime.block_on(could_be_made(location))?)
}

/// True if an error says that the store may be whole and cannot be queried now.
fn is_out_of_reach(kind: &ErrorKind) -> bool {
    kind.is_transient() || matches!(kind, ErrorKind::Io | ErrorKind::CommitIo | ErrorKind::NoSpace)
}
