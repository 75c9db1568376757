//! Reservations.

use ipam_core::Error;
use ipam_core::model::check_name;
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::Deadline;
use serde_json::json;

use super::rehearsal::Run;
use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::reservations::{ReservationRow, listing};

/// Checks the name, for which no store is necessary.
pub(super) fn check(name: &str) -> Result<()> {
    check_name(name).map_err(|reason| Failure::new(format!("'{name}' cannot be a reservation's name: {reason}")))
}

/// Makes a reservation.
pub(super) async fn create(ipam: &Operator, name: &str, cidrs: &[IpNet], deadline: Deadline) -> Result<Answer> {
    ipam.create_reservation(name, cidrs, deadline).await.map_err(|error| match error {
        Error::Exists { .. } => Failure::from(error)
            .hint(format!("to change what it reserves, delete it first: margay reservation delete {name}")),
        _ => error.into(),
    })?;
    let row = ReservationRow { name: name.to_owned(), cidrs: cidrs.iter().map(ToString::to_string).collect() };
    Answer::new(format!("Successfully created reservation {name}: {}", row.cidrs.join(", ")), &row)
}

/// Lists the reservations.
pub(super) async fn list(ipam: &Operator, deadline: Deadline) -> Result<Answer> {
    let reservations = ipam.inventory(deadline).await?.reservations;
    let row = |reservation: &ipam_core::model::IpReservation| ReservationRow {
        name: reservation.name().to_owned(),
        cidrs: reservation.texts(),
    };
    listing(&reservations.iter().map(row).collect::<Vec<_>>())
}

/// Deletes a reservation.
pub(super) async fn delete(ipam: &Operator, name: &str, run: Run, deadline: Deadline) -> Result<Answer> {
    ipam.delete_reservation(name, deadline).await.map_err(|error| match error {
        Error::NotFound { .. } => Failure::from(error).hint("see which there are with: margay reservation list"),
        _ => error.into(),
    })?;
    if run == Run::Dry {
        return Answer::new(format!("Dry run: would delete reservation {name}"), &json!({ "would_delete": name }));
    }
    Answer::new(format!("Successfully deleted reservation {name}"), &json!({ "deleted": name }))
}
