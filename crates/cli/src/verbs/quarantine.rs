//! `margay ipam quarantine`.

use std::net::IpAddr;

use ipam_core::Error;
use ipam_core::quarantine::quarantine_of;
use ipam_operator::Operator;
use kv::Deadline;

use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::quarantine::{QuarantineRow, listing, rows};

/// Lists what is in quarantine.
pub(super) async fn list(ipam: &Operator, deadline: Deadline) -> Result<Answer> {
    listing(&rows(quarantine_of(&ipam.inventory(deadline).await?.reservations)))
}

/// Ends the quarantine of an address.
pub(super) async fn release(ipam: &Operator, ip: IpAddr, deadline: Deadline) -> Result<Answer> {
    let taken = ipam.release_quarantined(ip, deadline).await.map_err(|error| match error {
        Error::Invalid(_) => Failure::from(error).hint("see what is with: margay ipam quarantine list"),
        _ => error.into(),
    })?;
    Answer::new(format!("Successfully released {ip} from quarantine"), &QuarantineRow::new(ip, taken))
}
