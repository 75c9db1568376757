//! The verbs that move the contents of a store to another store.

mod export;
mod host_local;
mod import;
mod migrate;
mod podman;
mod take_over;
mod whereabouts;

use std::io::Write;

use datastore::Location;

use crate::args::{Cli, Import, Moving, TakeOver};
use crate::error::{Failure, Result};
use crate::output::patiently;
use crate::store::Context;

/// Runs a verb.
pub(crate) fn run(
    cli: &Cli,
    verb: &Moving,
    context: Context<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<()> {
    match verb {
        Moving::Export(args) => crate::execute(cli, context, out, err, async |at| export::run(at, args).await),
        Moving::Import(Import { of: Some(what), .. }) => {
            let (leases, terms) = match what {
                TakeOver::HostLocal { folder, terms } => (host_local::read(folder)?, terms),
                TakeOver::Whereabouts { file, ranges, terms } => (whereabouts::read(file, ranges)?, terms),
                TakeOver::Podman { file, terms } => (podman::read(file, &terms.network)?, terms),
            };
            let verb = async |at: &Location| {
                patiently(&format!("taking over into {at}"), take_over::run(at, leases, terms)).await
            };
            crate::execute(cli, context, out, err, verb)
        }
        Moving::Import(args) => crate::execute(cli, context, out, err, async |at| import::run(at, args).await),
        Moving::Migrate(args) => {
            if cli.store.is_some() {
                return Err(Failure::new("migrate takes both stores as arguments")
                    .hint("leave --store out: margay migrate FROM TO"));
            }
            let (from, to) =
                (context.locate(cli, Some(&args.from))?.location, context.locate(cli, Some(&args.to))?.location);
            let answer = crate::runtime()?.block_on(migrate::run(&from, &to, args))?;
            answer.print(cli.output, out, err)
        }
    }
}
