//! The store that a command works on.

use std::cell::Cell;
use std::io::{self, Write};
use std::time::Duration;

use datastore::{
    Chosen, ConfigError, ConfigFile, Create, DEFAULT_CONFIG_FILE, Drivers, Environment, Location, OpenOptions,
    OpenStore, Purpose, Sharing, Source, care, for_operator,
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

/// The inputs of a command apart from its arguments: the stores that the program is made with, and the environment.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) drivers: &'a Drivers,
    pub(crate) env: &'a Environment<'a>,
}

impl Context<'_> {
    /// The store at a URL, with the credentials for it; without a URL the one that the configuration names.
    pub(crate) fn locate(self, cli: &Cli, url: Option<&str>) -> Result<Chosen> {
        let chosen = for_operator(self.drivers, url, config_file(cli), self.env, &cli.cni_conf_dir);
        chosen.map_err(|error| self.explain(&error))
    }

    /// The failure for a configuration that leads to no store.
    pub(crate) fn explain(self, error: &ConfigError) -> Failure {
        Failure::new(error).hint(self.drivers.advice(error))
    }
}

/// The file in which Calico's operators configure the datastore.
fn config_file(cli: &Cli) -> ConfigFile<'_> {
    cli.config.as_deref().map_or(ConfigFile::IfThere(DEFAULT_CONFIG_FILE.as_ref()), ConfigFile::Given)
}

/// Chooses the store, and prints it on `err` unless its URL was given.
pub(crate) fn choose(cli: &Cli, context: Context<'_>, err: &mut dyn Write) -> Result<Chosen> {
    let chosen = context.locate(cli, cli.store.as_deref())?;
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
    let opened = datastore::open(location, &options(what_for).with_sharing(Sharing::Served)).await;
    opened.map_err(|error| explain(location, error))
}

/// Opens the store's own files; its daemon hands the store over for that.
pub(crate) async fn open_files(location: &Location, what_for: Use) -> Result<OpenStore> {
    let opened = datastore::open(location, &options(what_for)).await;
    opened.map_err(|error| explain(location, error))
}

/// The options with which a store is opened for a use.
fn options(what_for: Use) -> OpenOptions {
    match what_for {
        Use::Existing => Create::Never.with_wait(wait()),
        Use::Make => Create::IfMissing.with_wait(wait()),
        Use::Release => Create::Never.with_wait(wait()).with_purpose(Purpose::Release),
    }
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
        ErrorKind::Unsupported if is_here => match other_engine(location) {
            Some(other) => format!("--store names another one: {other}, if that is its engine, or another folder"),
            None => "--store names another folder".to_owned(),
        },
        kind => match advice(kind, is_here, system_error(&error)) {
            Some(advice) => advice.to_owned(),
            None => return Failure::from(error),
        },
    };
    Failure::from(error).hint(hint)
}

/// The folder of a location as the store of another engine: of the engine whose files are there, else of any other.
fn other_engine(location: &Location) -> Option<Location> {
    let (folder, drivers) = (location.path()?, location.drivers());
    let own = location.facts().name;
    let others = || drivers.local().filter(|driver| driver.facts().name != own);
    let found = drivers.found_in(folder).filter(|driver| driver.facts().name != own);
    found.or_else(|| others().next()).map(|driver| drivers.at_folder(driver, folder))
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
