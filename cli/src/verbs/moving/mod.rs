//! The verbs that move the contents of a store to another store.

mod export;
mod host_local;
mod import;
mod migrate;
mod podman;
mod take_over;
mod whereabouts;

use std::io::Write;

use datastore::{Environment, Location, for_operator};

use crate::args::{Cli, Import, Moving, TakeOver};
use crate::error::{Failure, Result};
use crate::output::patiently;
use crate::store;

/// Runs a verb.
pub(crate) fn run(
    cli: &Cli,
    verb: &Moving,
    env: &Environment<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<()> {
    match verb {
        Moving::Export(args) => crate::execute(cli, env, out, err, async |at| export::run(at, args).await),
        Moving::Import(Import { of: Some(what), .. }) => {
            let (leases, terms) = match what {
                TakeOver::HostLocal { folder, terms } => (host_local::read(folder)?, terms),
                TakeOver::Whereabouts { file, ranges, terms } => (whereabouts::read(file, ranges)?, terms),
                TakeOver::Podman { file, terms } => (podman::read(file, &terms.network)?, terms),
            };
            let verb = async |at: &Location| {
                patiently(&format!("taking over into {at}"), take_over::run(at, leases, terms)).await
            };
            crate::execute(cli, env, out, err, verb)
        }
        Moving::Import(args) => crate::execute(cli, env, out, err, async |at| import::run(at, args).await),
        Moving::Migrate(args) => {
            if cli.store.is_some() {
                return Err(Failure::new("migrate takes both stores as arguments")
                    .hint("leave --store out: margay migrate FROM TO"));
            }
            let (from, to) = (location(cli, env, &args.from)?, location(cli, env, &args.to)?);
            let answer = crate::runtime()?.block_on(migrate::run(&from, &to, args))?;
            answer.print(cli.output, out, err)
        }
    }
}

/// A store by its URL, with the credentials for it.
fn location(cli: &Cli, env: &Environment<'_>, url: &str) -> Result<Location> {
    Ok(for_operator(Some(url), store::config_file(cli), env, &cli.cni_conf_dir)?.location)
}
