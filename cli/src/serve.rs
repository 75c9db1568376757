//! `margay serve`: the daemon of a store.

use std::fs;
use std::io::Write;
use std::path::Path;

use ::serve::api;
use ::serve::life::{self, Options};
use datastore::care::Retention;
use datastore::{Environment, Location, served};

use crate::args::{Cli, Serve};
use crate::error::{Failure, Result};
use crate::store;

/// Serves a store until a signal ends the process.
pub(crate) fn run(
    cli: &Cli,
    args: &Serve,
    env: &Environment<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<()> {
    let location = match &args.folder {
        Some(folder) if cli.store.is_none() => in_folder(folder)?,
        _ => store::choose(cli, env, err)?.location,
    };
    if args.name {
        let name = served::instance(&location);
        let name = name.ok_or_else(|| Failure::new(format!("{location} has no daemon")))?;
        writeln!(out, "{name}")?;
        return Ok(());
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    // The work is reads and commits, which are short. Each further thread would have a heap of its own: with eight
    // callers and watches that was 30 MiB more.
    let runtime = builder.worker_threads(2).max_blocking_threads(4).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("cannot start: {error}")))?;
    let defaults = Retention::WITH_CLIENTS;
    let bounds = Retention {
        revisions: args.history_revisions.or(defaults.revisions),
        age: args.history_age.or(defaults.age),
        bytes: args.history_mib.map(|mib| mib << 20).or(defaults.bytes),
        min_age: args.history_min_age.or(defaults.min_age),
    };
    let is_bounded =
        args.history_revisions.or(args.history_mib).is_some() || args.history_age.or(args.history_min_age).is_some();
    if is_bounded && location.path().is_none() {
        return Err(Failure::new(format!(
            "the options --history-... take a store on sled or redb; {location} is none"
        )));
    }
    let options = Options {
        location,
        http: args.http.clone(),
        hosts: args.host.clone(),
        api: api::Options {
            listen: args.listen.clone(),
            advertise: args.advertise.clone(),
            cert: args.cert_file.clone(),
            key: args.key_file.clone(),
            client_ca: args.client_ca_file.clone(),
            insecure_loopback: args.insecure_loopback,
            watch_progress_interval: args.watch_progress_interval,
        },
        history: if is_bounded || !args.listen.is_empty() { Some(bounds) } else { None },
        history_required: is_bounded,
        node: host::node_name(""),
        boot: host::boot_id().as_deref().and_then(host::short_boot),
    };
    let served = runtime.block_on(life::run(options, |said| _ = writeln!(err, "{said}")));
    runtime.shutdown_background();
    served.map_err(|refusal| Failure::new(refusal.to_string()))
}

/// The store in a folder. A folder without a store is for redb if its name ends in `.redb`, otherwise for sled.
fn in_folder(folder: &Path) -> Result<Location> {
    if !folder.is_absolute() {
        return Err(Failure::new(format!("{} is not an absolute path", folder.display())));
    }
    let identity = fs::read_to_string(folder.join("store.id")).unwrap_or_default();
    let says = |engine: &str| identity.split_whitespace().any(|word| word == engine);
    let is_redb = says("redb") || (!says("sled") && folder.extension().is_some_and(|extension| extension == "redb"));
    Ok(if is_redb { Location::Redb(folder.to_owned()) } else { Location::Sled(folder.to_owned()) })
}
