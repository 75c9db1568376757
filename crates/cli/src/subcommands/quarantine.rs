//! Lists quarantined addresses, and ends the quarantine of addresses, for the command `margay ipam quarantine`. This
//! module also describes quarantined addresses for other commands.

use std::net::IpAddr;

use async_trait::async_trait;
use clap::{Args, Subcommand};
use ipam_core::Error;
use ipam_core::quarantine::{QuarantineEntry, QuarantineRow, quarantine_of, quarantine_rows};
use ipam_operator::Operator;
use kv::Deadline;

use crate::command::{CommandAnswer, OpenStoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, Columns, TableRow, printable};
use crate::store::StoreUse;

pub(crate) const HELP: &str = "\
Examples:
  margay ipam quarantine list
  margay ipam quarantine release 10.65.0.5";

#[derive(Debug, Subcommand)]
pub(crate) enum QuarantineSubcommand {
    /// List the quarantined addresses with the time and the reason
    #[command(
        visible_alias = "ls",
        after_help = "Examples:\n  margay ipam quarantine list\n  margay ipam quarantine list -o json"
    )]
    List,
    /// Release an address from quarantine, so that it can be assigned again
    #[command(after_help = "\
Examples:
  margay ipam quarantine release 10.65.0.5
  margay ipam quarantine release 10.65.0.5 --dry-run

A network with a probe asks the wire once more before it hands the address out.")]
    Release(QuarantineRelease),
}

#[derive(Debug, Args)]
pub(crate) struct QuarantineRelease {
    /// The address
    address: IpAddr,

    /// Show what would be released, and release nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) struct ListQuarantine;

#[async_trait(?Send)]
impl OpenStoreCommand for ListQuarantine {
    fn store_use(&self) -> StoreUse {
        StoreUse::Read
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        CommandAnswer::rows(
            "quarantined",
            &quarantine_rows(quarantine_of(&operator.ipam().inventory(deadline).await?.reservations)),
        )
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for QuarantineRelease {
    fn store_use(&self) -> StoreUse {
        StoreUse::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let ip = self.address;
        let taken = operator.release_quarantined(ip, deadline).await.map_err(|error| match error {
            Error::Invalid(_) => {
                CommandFailure::from(error).hint("list the quarantined addresses with: margay ipam quarantine list")
            }
            _ => error.into(),
        })?;
        CommandAnswer::new(
            format!("Successfully released {ip} from quarantine"),
            &QuarantineRow { address: ip, why: taken },
        )
    }
}

impl TableRow for QuarantineRow {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("ADDRESS"), |row| row.address.to_string()),
            (Column::Text("SINCE"), |row| printable(&row.why.since)),
            (Column::Text("REASON"), |row| printable(&row.why.reason)),
            (Column::Text("NODE"), |row| printable(&row.why.node)),
        ]
    }
}

/// Describes in one sentence why an address is in quarantine.
pub(crate) fn sentence(row: &QuarantineRow) -> String {
    let QuarantineEntry { since, reason, node } = &row.why;
    printable(&format!("{} is in quarantine since {since}: {reason} (node {node})", row.address))
}

/// Returns a note about the number of quarantined addresses, for commands that report on the whole store.
pub(crate) fn note(count: usize) -> Option<String> {
    let addresses = if count == 1 { "address is" } else { "addresses are" };
    (count > 0).then(|| format!("{count} {addresses} in quarantine; see with: margay ipam quarantine list"))
}
