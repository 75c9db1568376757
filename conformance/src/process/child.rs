//! Runs in a child process that plays a role: reads its job, and reports to its parent process.

use std::env;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use super::{ADDRESS_VARIABLE, FOLDER_VARIABLE};
use crate::harness::{BoxError, Fixture, Harness, Tenancy};
use crate::subject::BoundedHandle;

/// Maximum time that a child process waits for the store, unless its role sets a different time.
const STORE_WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The store address and the arguments for a child process with a role.
pub(crate) struct RoleJob<'a> {
    harness: &'a dyn Harness,
    address: String,
    arguments: Vec<u64>,
}

impl<'a> RoleJob<'a> {
    /// Reads the job of this child process from its environment variables.
    ///
    /// # Errors
    /// An error if the environment variable with the address of the store is not set.
    pub(crate) fn of_this_process(harness: &'a dyn Harness, arguments: Vec<u64>) -> Result<Self, BoxError> {
        Ok(Self { harness, address: env::var(ADDRESS_VARIABLE)?, arguments })
    }

    pub(crate) fn argument(&self, place: usize) -> Result<u64, BoxError> {
        self.arguments.get(place).copied().ok_or_else(|| format!("argument {place} of the role is missing").into())
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The folder for this child process, if its parent process set one.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        env::var_os(FOLDER_VARIABLE).map(PathBuf::from)
    }

    /// Wraps a store that this process has opened in a handle with a time limit for each call.
    pub(crate) fn handle(&self, fixture: &dyn Fixture) -> BoundedHandle {
        BoundedHandle::new(fixture.store(), STORE_WAIT_TIMEOUT, Tenancy::Exclusive)
    }

    /// Opens the store, and waits up to a minute for the store lock.
    pub(crate) async fn join(&self) -> kv::Result<Box<dyn Fixture>> {
        self.join_within(STORE_WAIT_TIMEOUT).await
    }

    /// Opens the store, and waits up to `wait` for the store lock.
    pub(crate) async fn join_within(&self, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        self.harness.join(&self.address, wait).await
    }
}

pub(crate) fn say(line: impl Display) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}
