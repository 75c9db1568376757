//! The other side: the job of a process that plays a role, and its words.

use std::env;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use super::{ADDRESS_VARIABLE, FOLDER_VARIABLE};
use crate::harness::{BoxError, Fixture, Harness, Tenancy};
use crate::subject::BoundedHandle;

/// How long a process waits for the store, unless the role says otherwise.
const STORE_WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The job of a process, and its place.
pub(crate) struct RoleJob<'a> {
    harness: &'a dyn Harness,
    address: String,
    arguments: Vec<u64>,
}

impl<'a> RoleJob<'a> {
    /// The job of this process, as its environment has it.
    ///
    /// # Errors
    /// The environment has no address of a store.
    pub(crate) fn of_this_process(harness: &'a dyn Harness, arguments: Vec<u64>) -> Result<Self, BoxError> {
        Ok(Self { harness, address: env::var(ADDRESS_VARIABLE)?, arguments })
    }

    /// An argument of the role.
    pub(crate) fn argument(&self, place: usize) -> Result<u64, BoxError> {
        self.arguments.get(place).copied().ok_or_else(|| format!("argument {place} of the role is missing").into())
    }

    /// The store's address.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The folder that the role needs, if any.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        env::var_os(FOLDER_VARIABLE).map(PathBuf::from)
    }

    /// A handle on a store that was joined, of which every call is bounded in time.
    pub(crate) fn handle(&self, fixture: &dyn Fixture) -> BoundedHandle {
        BoundedHandle::new(fixture.store(), STORE_WAIT_TIMEOUT, Tenancy::Exclusive)
    }

    /// Opens the store, with all the time in the world.
    pub(crate) async fn join(&self) -> kv::Result<Box<dyn Fixture>> {
        self.join_within(STORE_WAIT_TIMEOUT).await
    }

    /// Opens the store unless it is in use for so long.
    pub(crate) async fn join_within(&self, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        self.harness.join(&self.address, wait).await
    }
}

/// Says a line to the process that started this one.
pub(crate) fn say(line: impl Display) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}
