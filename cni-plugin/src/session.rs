//! A store that stays open for all steps of one call.

use std::sync::Arc;
use std::time::Duration;

use datastore::{Create, Location, OpenStore};
use ipam_core::Ipam;
use kv::{Deadline, Store};
use tokio::runtime::{Builder, Runtime};

use crate::allocator::failure::Failure;
use crate::allocator::{budget, in_place, ipam_on};
use crate::error::CniError;
use crate::request::StoreAt;

/// The purpose of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To assign.
    Assign,
    /// To release: it may use what a full disk has left for that.
    Release,
}

/// An open store, the runtime that drives it, and the time that the call has.
#[derive(Debug)]
pub(crate) struct Session {
    location: Location,
    purpose: Purpose,
    deadline: Deadline,
    open: OpenStore,
    runtime: Runtime,
}

/// A session that has closed the store for other processes for a while.
#[derive(Debug)]
pub(crate) struct Paused {
    location: Location,
    purpose: Purpose,
    deadline: Deadline,
    runtime: Runtime,
}

impl Session {
    /// Opens the store: through its daemon, if an embedded store has one.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) fn open(at: &StoreAt, purpose: Purpose) -> Result<Self, Failure> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        let deadline = Deadline::after(budget(at));
        Paused { location: at.location.clone(), purpose, deadline, runtime }.resume()
    }

    /// The store.
    pub(crate) fn store(&self) -> Arc<dyn Store> {
        self.open.store()
    }

    /// The store, if this process has it open at this location.
    pub(crate) fn opened_at(&self, location: &Location) -> Option<&OpenStore> {
        (self.location == *location && self.open.served().is_none()).then_some(&self.open)
    }

    /// True if other processes must wait for the store.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.open.embedded().is_some()
    }

    /// The allocator on the store.
    pub(crate) fn ipam(&self) -> Ipam {
        ipam_on(self.store(), &self.location, self.open.cluster())
    }

    /// The moment at which the call must be over.
    pub(crate) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Runs a future to its end.
    pub(crate) fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Lets other processes have the store.
    pub(crate) fn pause(self) -> Paused {
        let Self { location, purpose, deadline, open, runtime } = self;
        close(&runtime, open);
        Paused { location, purpose, deadline, runtime }
    }

    /// Closes the store.
    pub(crate) fn close(self) {
        close(&self.runtime, self.open);
        // A name server that does not answer holds up nobody.
        self.runtime.shutdown_background();
    }
}

impl Paused {
    /// Runs a future to its end.
    pub(crate) fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// The moment at which the call must be over.
    pub(crate) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Opens the store again.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) fn resume(self) -> Result<Session, Failure> {
        let Self { location, purpose, deadline, runtime } = self;
        let open = runtime.block_on(open(&location, purpose, deadline))?;
        Ok(Session { location, purpose, deadline, open, runtime })
    }
}

async fn open(location: &Location, purpose: Purpose, deadline: Deadline) -> kv::Result<OpenStore> {
    let wait: Duration = if location.is_shared() { deadline.remaining() } else { deadline.remaining_for_work() };
    let options = Create::Never.with_wait(wait).with_purpose(match purpose {
        Purpose::Assign => datastore::Purpose::Any,
        Purpose::Release => datastore::Purpose::Release,
    });
    datastore::reach(location, &in_place(options)).await
}

fn close(runtime: &Runtime, open: OpenStore) {
    if let Err(error) = runtime.block_on(open.close()) {
        tracing::warn!(%error, "the store could not be closed cleanly");
    }
}
