//! The store that a command works on.

use std::cell::Cell;
use std::io::{self, Write};
use std::time::Duration;

use datastore::{
    Chosen, ConfigFile, Create, DEFAULT_CONFIG_FILE, Environment, Location, OpenStore, Source, care, for_operator,
};
use kv::ErrorKind;

use crate::args::Cli;
use crate::error::{Failure, Result};

/// The longest wait for the store lock, by default. Plugins hold it for milliseconds.
const WAIT: Duration = Duration::from_secs(30);

thread_local! {
    /// The longest wait for the store lock in this thread: a command runs on one thread.
    static CHOSEN: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Sets the longest wait for the store lock in this thread; `None` for the default.
pub(crate) fn set_wait(wait: Option<Duration>) {
    CHOSEN.set(wait);
}

/// The longest wait for the store lock.
pub(crate) fn wait() -> Duration {
    CHOSEN.get().unwrap_or(WAIT)
}

/// The file in which Calico's operators configure the datastore.
pub(crate) fn config_file(cli: &Cli) -> ConfigFile<'_> {
    cli.config.as_deref().map_or(ConfigFile::IfThere(DEFAULT_CONFIG_FILE.as_ref()), ConfigFile::Given)
}

/// Chooses the store, and prints it on `err` unless its URL was given.
pub(crate) fn choose(cli: &Cli, env: &Environment<'_>, err: &mut dyn Write) -> Result<Chosen> {
    let chosen = for_operator(cli.store.as_deref(), config_file(cli), env, &cli.cni_conf_dir)?;
    for problem in &chosen.unreadable {
        _ = writeln!(err, "warning: skipped {problem}");
    }
    if chosen.source != Source::Url {
        _ = writeln!(err, "store: {} ({})", chosen.location, chosen.source);
    }
    Ok(chosen)
}

/// The use that a command makes of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// It needs an existing store.
    Existing,
    /// It makes the store if there is none.
    Make,
    /// It releases addresses or history, and may use the ballast for that on a full disk.
    Release,
}

/// Reaches the store, through its daemon if there is one. A store that does not exist yet has no daemon.
pub(crate) async fn open(location: &Location, what_for: Use) -> Result<OpenStore> {
    let opened = match what_for {
        Use::Existing => datastore::reach(location, Create::Never, wait()).await,
        Use::Make => datastore::reach(location, Create::IfMissing, wait()).await,
        Use::Release => datastore::reach_to_release(location, wait()).await,
    };
    opened.map_err(|error| explain(location, error))
}

/// Opens the store's own files; its daemon hands the store over for that.
pub(crate) async fn open_files(location: &Location, what_for: Use) -> Result<OpenStore> {
    let opened = match what_for {
        Use::Existing => datastore::open(location, Create::Never, wait()).await,
        Use::Make => datastore::open(location, Create::IfMissing, wait()).await,
        Use::Release => datastore::open_to_release(location, wait()).await,
    };
    opened.map_err(|error| explain(location, error))
}

/// True if another process waits for the store lock.
pub(crate) async fn somebody_waits(location: &Location) -> Result<bool> {
    Ok(care::waiting(location).await.map_err(|error| explain(location, error))? > 0)
}

/// The failure for an error of a store, with advice.
pub(crate) fn explain(location: &Location, error: kv::Error) -> Failure {
    let is_here = location.path().is_some();
    let hint = match error.kind() {
        ErrorKind::Missing if is_here => {
            return Failure::new(format!("there is no store at {location}")).hint(format!(
                "if this is the right place, make one with: margay --store {location} pool create NAME CIDR"
            ));
        }
        ErrorKind::Corrupt | ErrorKind::RevisionRegressed if is_here => format!(
            "to put a backup in its place, and keep the damaged store beside it: margay --store {location} store \
             restore FILE --replace"
        ),
        ErrorKind::Unsupported if is_here => {
            format!("--store names another one: {}, if that is its engine, or another folder", other_engine(location))
        }
        kind => match advice(kind, is_here, system_error(&error)) {
            Some(advice) => advice.to_owned(),
            None => return Failure::from(error),
        },
    };
    Failure::from(error).hint(hint)
}

/// The same folder as a store of the other engine.
fn other_engine(location: &Location) -> Location {
    match location {
        Location::Redb(path) => Location::Sled(path.clone()),
        Location::Sled(path) => Location::Redb(path.clone()),
        other => other.clone(),
    }
}

/// The advice for an error of a store; `is_here` is true for a store on this machine.
fn advice(kind: &ErrorKind, is_here: bool, system: Option<io::ErrorKind>) -> Option<&'static str> {
    Some(match (kind, system) {
        (ErrorKind::Locked, _) => {
            "some other command or program has the store open; end it, or try again, longer with --lock-timeout 5m"
        }
        (ErrorKind::UnknownFormat { .. }, _) => {
            "nothing was changed; use the margay that made the store, or a later one; this one is told by: margay --version"
        }
        (ErrorKind::Io, Some(io::ErrorKind::PermissionDenied)) => "nothing was changed; try it with sudo",
        (ErrorKind::Io, Some(io::ErrorKind::ReadOnlyFilesystem)) => {
            "nothing was changed; a copy of the folder on a disk that can be written to can be read with --store"
        }
        (ErrorKind::NoSpace, _) if is_here => "free some space, and give the same command again",
        (ErrorKind::NotSent | ErrorKind::Disconnected { .. } | ErrorKind::Timeout, _) => {
            "see whether etcd is well, and is reached at this address: etcdctl endpoint health; certificates and login come \
             from ETCD_CA_CERT_FILE, ETCD_CERT_FILE and ETCD_KEY_FILE, ETCD_USERNAME and ETCD_PASSWORD"
        }
        (ErrorKind::Auth(_), _) => {
            "certificates and login come from ETCD_CA_CERT_FILE, ETCD_CERT_FILE and ETCD_KEY_FILE, ETCD_USERNAME and \
             ETCD_PASSWORD"
        }
        (kind, _) if kind.is_transient() => "give the same command again",
        _ => return None,
    })
}

/// The kind of the operating system's error, if that is the cause.
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
