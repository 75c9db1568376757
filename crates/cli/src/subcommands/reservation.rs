//! Creates, lists and deletes reservations of addresses, for the command `margay reservation`.

use async_trait::async_trait;
use clap::{Args, Subcommand};
use ipam_core::Error;
use ipam_core::model::{IpReservation, check_name};
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;
use serde_json::json;

use super::pool::cidr_or_address;
use crate::command::{CommandAnswer, OpenStoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, Columns, TableRow};
use crate::store::StoreUse;

#[derive(Debug, Subcommand)]
pub(crate) enum ReservationSubcommand {
    /// Reserve addresses, so that they are never assigned
    #[command(after_help = "\
Examples:
  margay reservation create routers 10.65.0.1 10.65.0.2
  margay reservation create dhcp 10.70.0.128/25 --dry-run

An address that is in use stays in use; it is only not handed out again.")]
    Create(ReservationCreate),
    /// List the reservations
    #[command(
        visible_alias = "ls",
        after_help = "Examples:\n  margay reservation list\n  margay reservation list -o json"
    )]
    List,
    /// Delete a reservation, so that its addresses can be assigned again
    #[command(visible_alias = "rm", after_help = "Examples:\n  margay reservation delete routers --dry-run")]
    Delete(ReservationDelete),
}

#[derive(Debug, Args)]
pub(crate) struct ReservationCreate {
    /// The reservation's name: lower-case letters, digits, '-' and '.'
    pub(crate) name: String,

    /// Addresses and CIDRs to reserve
    #[arg(required = true, value_name = "CIDR", value_parser = cidr_or_address)]
    pub(crate) cidrs: Vec<IpNet>,

    /// Dry run: do all checks, but create nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReservationDelete {
    /// The reservation's name
    pub(crate) name: String,

    /// Dry run: do all checks, but delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// A reservation in the output of `reservation list`.
#[derive(Clone, Debug, Serialize)]
struct ReservationRow {
    name: String,
    /// The reserved address ranges, as written in the reservation document.
    cidrs: Vec<String>,
}

impl TableRow for ReservationRow {
    fn columns() -> Columns<Self> {
        vec![(Column::Text("NAME"), |row| row.name.clone()), (Column::Text("CIDRS"), |row| row.cidrs.join("\n"))]
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for ReservationCreate {
    fn store_use(&self) -> StoreUse {
        StoreUse::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    fn check(&self) -> CommandResult<()> {
        let name = &self.name;
        check_name(name)
            .map_err(|reason| CommandFailure::new(format!("'{name}' cannot be a reservation's name: {reason}")))
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let Self { name, cidrs, .. } = self;
        operator.ipam().create_reservation(name, cidrs, deadline).await.map_err(|error| match error {
            Error::Exists { .. } => CommandFailure::from(error)
                .hint(format!("delete the existing reservation first: margay reservation delete {name}")),
            _ => error.into(),
        })?;
        let row = ReservationRow { name: name.clone(), cidrs: cidrs.iter().map(ToString::to_string).collect() };
        CommandAnswer::new(format!("Successfully created reservation {name}: {}", row.cidrs.join(", ")), &row)
    }
}

pub(crate) struct ListReservations;

#[async_trait(?Send)]
impl OpenStoreCommand for ListReservations {
    fn store_use(&self) -> StoreUse {
        StoreUse::Read
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let row = |reservation: &IpReservation| ReservationRow {
            name: reservation.name().to_owned(),
            cidrs: reservation.texts(),
        };
        let rows: Vec<_> = operator.ipam().inventory(deadline).await?.reservations.iter().map(row).collect();
        CommandAnswer::rows("reservations", &rows)
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for ReservationDelete {
    fn store_use(&self) -> StoreUse {
        StoreUse::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let name = &self.name;
        operator.ipam().delete_reservation(name, deadline).await.map_err(|error| match error {
            Error::NotFound { .. } => {
                CommandFailure::from(error).hint("list the reservations with: margay reservation list")
            }
            _ => error.into(),
        })?;
        match self.dry_run {
            true => CommandAnswer::new(
                format!("Dry run: would delete reservation {name}"),
                &json!({ "would_delete": name }),
            ),
            false => {
                CommandAnswer::new(format!("Successfully deleted reservation {name}"), &json!({ "deleted": name }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Format;

    #[test]
    fn reservation_list_prints_table() {
        let row = ReservationRow { name: "infra".into(), cidrs: vec!["10.0.0.0/30".into(), "10.0.0.255".into()] };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        CommandAnswer::rows("reservations", &[row]).unwrap().print(Format::Table, &mut out, &mut err).unwrap();
        let expected = "\
+-------+-------------+
| NAME  | CIDRS       |
+-------+-------------+
| infra | 10.0.0.0/30 |
|       | 10.0.0.255  |
+-------+-------------+
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
