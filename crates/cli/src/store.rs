//! Opens and closes the store on which a command runs.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use datastore::{Create, Location, OpenOptions, OpenStore, Purpose, Sharing, maintenance};
use ipam_core::Nodes;
use ipam_operator::Operator;
use kv::{ErrorKind, Store};

use crate::error::{CommandFailure, CommandResult};

/// Default time limit of the wait for the store lock. Plugins hold the store lock for milliseconds.
pub(crate) const DEFAULT_LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// How a command accesses its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreUse {
    /// The command reads an existing store.
    Read,
    /// The command reads all blocks of an existing store, which can take long. Other processes that wait for the store
    /// lock can use the store between two reads, except while a daemon has the store open.
    ReadAll,
    /// The command writes to an existing store.
    Write,
    /// The command writes to the store, and the store is created if it does not exist.
    Make,
    /// The command releases addresses or removes history. On a full disk, a command that releases addresses or removes
    /// history may use the disk space that the store has reserved.
    Release,
}

/// The location of a store, and options for opening the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreAccess<'a> {
    pub(crate) location: &'a Location,
    /// Time limit of the wait for the store lock.
    pub(crate) wait: Duration,
    /// The folder of the CNI network configurations.
    pub(crate) conf_dir: &'a Path,
}

impl fmt::Display for StoreAccess<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.location.fmt(f)
    }
}

impl<'a> StoreAccess<'a> {
    #[cfg(test)]
    pub(crate) fn of(location: &'a Location) -> Self {
        Self { location, wait: DEFAULT_LOCK_TIMEOUT, conf_dir: Path::new("/nowhere") }
    }

    /// Returns access to the store at `location`, with the options of `self`.
    pub(crate) fn other<'b>(self, location: &'b Location) -> StoreAccess<'b>
    where
        'a: 'b,
    {
        StoreAccess { location, ..self }
    }

    /// Returns a copy of this store access with a different timeout for the store lock.
    pub(crate) fn with_wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// Opens the store, through the store's daemon if one runs. `store_use` decides whether a missing store is created;
    /// a missing store never has a daemon.
    pub(crate) async fn open(self, store_use: StoreUse) -> CommandResult<OpenStore> {
        let sharing = if store_use == StoreUse::ReadAll { Sharing::InTurns } else { Sharing::Served };
        self.open_with(self.options(store_use).with_sharing(sharing)).await
    }

    /// Opens the store's own files, even if the store has a daemon. If a daemon has the store open, the daemon closes
    /// the store for this process.
    pub(crate) async fn open_files(self, store_use: StoreUse) -> CommandResult<OpenStore> {
        self.open_with(self.options(store_use)).await
    }

    /// Opens an existing store for reading. Uses the store's daemon if one runs. Returns `None` if the store does not
    /// exist.
    pub(crate) async fn open_existing(self) -> CommandResult<Option<OpenStore>> {
        match datastore::open(self.location, &self.options(StoreUse::Read).with_sharing(Sharing::Served)).await {
            Err(error) if *error.kind() == ErrorKind::Missing => Ok(None),
            opened => opened.map(Some).map_err(|error| self.explain(error)),
        }
    }

    async fn open_with(self, options: OpenOptions) -> CommandResult<OpenStore> {
        datastore::open(self.location, &options).await.map_err(|error| self.explain(error))
    }

    fn options(self, store_use: StoreUse) -> OpenOptions {
        match store_use {
            StoreUse::Read | StoreUse::ReadAll | StoreUse::Write => Create::Never.with_wait(self.wait),
            StoreUse::Make => Create::IfMissing.with_wait(self.wait),
            StoreUse::Release => Create::Never.with_wait(self.wait).with_purpose(Purpose::Release),
        }
    }

    /// Opens the store, calls `work` with an [`Operator`], which reads and writes the store's documents, and closes the
    /// store, even after an error.
    pub(crate) async fn with_operator<T>(
        self,
        store_use: StoreUse,
        work: impl AsyncFnOnce(&Operator) -> CommandResult<T>,
    ) -> CommandResult<T> {
        let open = self.open(store_use).await?;
        let store = open.store();
        self.with_operator_on(open, store, work).await
    }

    /// Calls `work` with an [`Operator`] that reads and writes documents in `store`, which is the open store or a
    /// wrapper around it. Closes `open` after `work` has finished, even if `work` fails.
    pub(crate) async fn with_operator_on<T>(
        self,
        open: OpenStore,
        store: Arc<dyn Store>,
        work: impl AsyncFnOnce(&Operator) -> CommandResult<T>,
    ) -> CommandResult<T> {
        let operator = Operator::new(store, self.nodes());
        self.run_and_close(open, async move |_: &OpenStore| work(&operator).await).await
    }

    /// Calls the closure `work` with an open store, and closes the store even if `work` fails.
    pub(crate) async fn run_and_close<T, E: From<CommandFailure>>(
        self,
        open: OpenStore,
        work: impl AsyncFnOnce(&OpenStore) -> Result<T, E>,
    ) -> Result<T, E> {
        let done = work(&open).await;
        let closed = open.close().await.map_err(|error| self.explain(error));
        let done = done?;
        closed?;
        Ok(done)
    }

    /// Returns which node names the store accepts in requests. If an embedded store has no registered node, it accepts
    /// the node that uses the store first.
    pub(crate) fn nodes(self) -> Nodes {
        if self.location.is_shared() { Nodes::Registered } else { Nodes::FirstSeen }
    }

    pub(crate) async fn has_waiters(self) -> CommandResult<bool> {
        Ok(maintenance::waiting(self.location).await.map_err(|error| self.explain(error))? > 0)
    }

    /// Converts a store error to a command failure with advice for the user.
    pub(crate) fn explain(self, error: kv::Error) -> CommandFailure {
        explain(self.location, error)
    }
}

fn explain(location: &Location, error: kv::Error) -> CommandFailure {
    let is_here = location.path().is_some();
    let hint = match error.kind() {
        ErrorKind::Missing if is_here => {
            return CommandFailure::new(format!("there is no store at {location}")).hint(format!(
                "if this is the right place, make one with: margay --store {location} pool create NAME CIDR"
            ));
        }
        ErrorKind::Corrupt | ErrorKind::RevisionRegressed if is_here => format!(
            "to put a backup in its place, and keep the damaged store beside it: margay --store {location} store \
             restore FILE --replace"
        ),
        ErrorKind::Unsupported if is_here => match other_engine(location) {
            Some(other) => format!("--store names another one: {other}, if that is its engine, or another folder"),
            None => "--store names another folder".to_owned(),
        },
        kind => match advice(kind, is_here, system_error(&error)) {
            Some(advice) => advice.to_owned(),
            None => return CommandFailure::from(error),
        },
    };
    CommandFailure::from(error).hint(hint)
}

/// Returns `location` with the other engine whose files are in its folder, or, if there are none, with any engine other
/// than the one in `location`.
fn other_engine(location: &Location) -> Option<Location> {
    let (folder, drivers) = (location.path()?, location.drivers());
    let own = location.facts().name;
    let others = || drivers.local().filter(|driver| driver.facts().name != own);
    let found = drivers.found_in(folder).filter(|driver| driver.facts().name != own);
    found.or_else(|| others().next()).map(|driver| drivers.at_folder(driver, folder))
}

/// Returns advice for the user about a store error. `is_here` is true if the store is embedded.
fn advice(kind: &ErrorKind, is_here: bool, system: Option<io::ErrorKind>) -> Option<&'static str> {
    Some(match (kind, system) {
        // If other processes keep the store lock for too long, a store that was opened through a daemon reports the
        // error `Closed`.
        (ErrorKind::Locked | ErrorKind::Closed, _) => {
            "end the program that has the store open, or wait longer for the store with --lock-timeout 5m"
        }
        (ErrorKind::UnknownFormat { .. }, _) => {
            "use the version of margay that created the store, or a newer version (show yours with margay --version); \
             nothing was changed"
        }
        (ErrorKind::Io, Some(io::ErrorKind::PermissionDenied)) => "run the command with sudo; nothing was changed",
        (ErrorKind::Io, Some(io::ErrorKind::ReadOnlyFilesystem)) => {
            "copy the store's folder to a writable disk, and name the copy with --store; nothing was changed"
        }
        (ErrorKind::NoSpace, _) if is_here => "free some disk space, and run the same command again",
        (ErrorKind::NotSent | ErrorKind::Disconnected { .. } | ErrorKind::Timeout, _) if !is_here => {
            "check etcd at this address with: etcdctl endpoint health; set certificates with ETCD_CA_CERT_FILE, \
             ETCD_CERT_FILE and ETCD_KEY_FILE, and the login with ETCD_USERNAME and ETCD_PASSWORD"
        }
        (ErrorKind::Auth(_), _) => {
            "set certificates with ETCD_CA_CERT_FILE, ETCD_CERT_FILE and ETCD_KEY_FILE, and the login with \
             ETCD_USERNAME and ETCD_PASSWORD"
        }
        (kind, _) if kind.is_transient() => "run the same command again",
        _ => return None,
    })
}

/// Returns the kind of the operating system error that caused a store error, if the store error has such a cause.
fn system_error(error: &kv::Error) -> Option<io::ErrorKind> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(system) = cause.downcast_ref::<io::Error>() {
            return Some(system.kind());
        }
        source = cause.source();
    }
    None
}
