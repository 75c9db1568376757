//! `margay serve`: the daemon of a store.

use std::io::Write;
use std::path::Path;

use ::serve::api;
use ::serve::life::{self, Options};
use datastore::care::Retention;
use datastore::{Location, served};

use crate::args::{Cli, Serve};
use crate::error::{Failure, Result};
use crate::store::{self, Context};

/// Serves a store until a signal ends the process.
pub(crate) fn run(
    cli: &Cli,
    args: &Serve,
    context: Context<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<()> {
    let location = match &args.folder {
        Some(folder) if cli.store.is_none() => in_folder(context, folder)?,
        _ => store::choose(cli, context, err)?.location,
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
            "the options --history-... take a store on {}; {location} is none",
            context.drivers.local_names("", "")
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

/// The store in a folder.
fn in_folder(context: Context<'_>, folder: &Path) -> Result<Location> {
    if !folder.is_absolute() {
        return Err(Failure::new(format!("{} is not an absolute path", folder.display())));
    }
    context.drivers.in_folder(folder).map_err(|error| context.explain(&error))
}
