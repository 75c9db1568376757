//! The store that a command works on.

use std::io::Write;
use std::time::Duration;

use datastore::{
    Chosen, ConfigFile, Create, DEFAULT_CONFIG_FILE, Environment, Location, OpenStore, Source, care, for_operator,
};
use kv::ErrorKind;

use crate::args::Cli;
use crate::error::{Failure, Result};

/// How long a command waits for its turn on an embedded store. Plugins hold it for milliseconds.
pub(crate) const WAIT: Duration = Duration::from_secs(30);

/// The file in which Calico's operators say where the datastore is.
pub(crate) fn config_file(cli: &Cli) -> ConfigFile<'_> {
    cli.config.as_deref().map_or(ConfigFile::IfThere(DEFAULT_CONFIG_FILE.as_ref()), ConfigFile::Given)
}

/// Chooses the store, and says which one it is unless it was given.
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

/// What a command does with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// It works on what is there.
    Existing,
    /// It makes the store if there is none.
    Make,
    /// It gives back, and may use for that what a full disk has left for it.
    Release,
}

/// Opens the store.
pub(crate) async fn open(location: &Location, what_for: Use) -> Result<OpenStore> {
    let opened = match what_for {
        Use::Existing => datastore::open(location, Create::Never, WAIT).await,
        Use::Make => datastore::open(location, Create::IfMissing, WAIT).await,
        Use::Release => datastore::open_to_release(location, WAIT).await,
    };
    opened.map_err(|error| explain(location, error))
}

/// True if another process waits for its turn at an embedded store.
pub(crate) async fn somebody_waits(location: &Location) -> Result<bool> {
    Ok(care::waiting(location).await.map_err(|error| explain(location, error))? > 0)
}

/// Why a store could not be opened, and what to do.
pub(crate) fn explain(location: &Location, error: kv::Error) -> Failure {
    match error.kind() {
        ErrorKind::Missing if location.path().is_some() => Failure::new(format!("there is no store at {location}"))
            .hint(format!(
                "if this is the right place, make one with: margay --store {location} pool create NAME CIDR"
            )),
        ErrorKind::Locked => {
            Failure::from(error).hint("some other command or program has the store open; end it, or try again")
        }
        ErrorKind::Corrupt | ErrorKind::RevisionRegressed if location.path().is_some() => {
            Failure::from(error).hint(format!(
                "to put a backup in its place, and keep the damaged store beside it: margay --store {location} store \
             restore FILE --replace"
            ))
        }
        ErrorKind::NotSent | ErrorKind::Disconnected { .. } | ErrorKind::Timeout | ErrorKind::Auth(_) => {
            Failure::from(error).hint(
                "certificates and login come from ETCD_CA_CERT_FILE, ETCD_CERT_FILE and ETCD_KEY_FILE, \
                 ETCD_USERNAME and ETCD_PASSWORD",
            )
        }
        _ => Failure::from(error),
    }
}
