//! The verbs that move the contents of a store to another store.

mod export;
mod host_local;
mod import;
mod migrate;
mod podman;
mod take_over;
mod whereabouts;

use clap::Subcommand;

use export::Export;
pub(crate) use import::{Import, TakeOver};
use migrate::Migrate;

/// Moving what is in a store to another one.
#[derive(Debug, Subcommand)]
pub(crate) enum Moving {
    /// Write all that IPAM has, as it is at one revision, to a file
    #[command(after_help = export::HELP)]
    Export(Export),
    /// Fill an empty store from a file, or with what others have given
    #[command(after_help = import::HELP, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
    Import(Import),
    /// Copy all that IPAM has to another store, and switch to that
    #[command(after_help = migrate::HELP)]
    Migrate(Migrate),
}
