//! Provides a process that plays a role with its job, and sends its messages to the process that started it.

use std::env;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use super::{ADDRESS_VARIABLE, FOLDER_VARIABLE};
use crate::harness::{BoxError, Fixture, Harness, Tenancy};
use crate::subject::BoundedHandle;

/// Maximum time that a process waits for the store, unless its role sets a different time.
const STORE_WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The store and the arguments of a process with a role.
pub(crate) struct RoleJob<'a> {
    harness: &'a dyn Harness,
    address: String,
    arguments: Vec<u64>,
}

impl<'a> RoleJob<'a> {
    /// Reads the job of this process from its environment.
    ///
    /// # Errors
    /// If the environment has no address of a store.
    pub(crate) fn of_this_process(harness: &'a dyn Harness, arguments: Vec<u64>) -> Result<Self, BoxError> {
        Ok(Self { harness, address: env::var(ADDRESS_VARIABLE)?, arguments })
    }

    pub(crate) fn argument(&self, place: usize) -> Result<u64, BoxError> {
        self.arguments.get(place).copied().ok_or_else(|| format!("argument {place} of the role is missing").into())
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The folder for the role, if the role needs a folder.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        env::var_os(FOLDER_VARIABLE).map(PathBuf::from)
    }

    /// A handle on a joined store with a time limit for each call.
    pub(crate) fn handle(&self, fixture: &dyn Fixture) -> BoundedHandle {
        BoundedHandle::new(fixture.store(), STORE_WAIT_TIMEOUT, Tenancy::Exclusive)
    }

    /// Opens the store. Waits up to a minute for the store.
    pub(crate) async fn join(&self) -> kv::Result<Box<dyn Fixture>> {
        self.join_within(STORE_WAIT_TIMEOUT).await
    }

    /// Opens the store. Waits up to `wait` for the store.
    pub(crate) async fn join_within(&self, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        self.harness.join(&self.address, wait).await
    }
}

/// Sends a line to the process that started this process.
pub(crate) fn say(line: impl Display) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}
