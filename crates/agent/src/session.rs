//! A store that stays open for all steps of one call.

use std::sync::Arc;

use datastore::{Create, Location, OpenStore, Sharing};
use ipam_core::Ipam;
use kv::{Deadline, Purpose, Store};
use tokio::runtime::{Builder, Runtime};

use crate::error::CniError;
use crate::failure::Failure;
use crate::ipam::{in_place, ipam_on};
use crate::store_at::StoreAt;

/// An open store, the runtime that drives it, and the time that the call has.
#[derive(Debug)]
pub struct Session {
    location: Location,
    deadline: Deadline,
    open: OpenStore,
    runtime: Runtime,
}

impl Session {
    /// Opens the store: through its daemon, if an embedded store has one.
    ///
    /// # Errors
    /// Those of the store.
    pub fn open(at: &StoreAt, purpose: Purpose) -> Result<Self, Failure> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        let (location, deadline) = (at.location.clone(), Deadline::after(at.budget()));
        let wait = if location.is_shared() { deadline.remaining() } else { deadline.remaining_for_work() };
        let options = Create::Never.with_wait(wait).with_purpose(purpose).with_sharing(Sharing::OnRequest);
        let open = runtime.block_on(datastore::open(&location, &in_place(options)))?;
        Ok(Self { location, deadline, open, runtime })
    }

    /// The store.
    pub fn store(&self) -> Arc<dyn Store> {
        self.open.store()
    }

    /// The store, if this process has it open at this location.
    pub(crate) fn opened_at(&self, location: &Location) -> Option<&OpenStore> {
        let is_here = self.open.served().is_none() || self.open.is_exclusive();
        (self.location == *location && is_here).then_some(&self.open)
    }

    /// True if other processes must wait for the store.
    pub fn is_exclusive(&self) -> bool {
        self.open.is_exclusive()
    }

    /// The allocator on the store.
    pub fn ipam(&self) -> Ipam {
        ipam_on(self.store(), &self.location, self.open.cluster())
    }

    /// The moment at which the call must be over.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Runs a future to its end.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Lets other processes have the store until its next use.
    pub fn pause(&self) {
        self.runtime.block_on(self.open.put_down());
    }

    /// Closes the store.
    pub fn close(self) {
        if let Err(error) = self.runtime.block_on(self.open.close()) {
            tracing::warn!(%error, "the store could not be closed cleanly");
        }
        // The process does not wait for a name server that does not answer.
        self.runtime.shutdown_background();
    }
}
