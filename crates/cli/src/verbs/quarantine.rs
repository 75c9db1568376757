//! `margay ipam quarantine`.

use async_trait::async_trait;
use ipam_core::Error;
use ipam_core::quarantine::quarantine_of;
use ipam_operator::Operator;
use kv::Deadline;

use crate::answer::Answer;
use crate::args::QuarantineRelease;
use crate::command::OnOpenStore;
use crate::error::{Failure, Result};
use crate::quarantine::{QuarantineRow, rows};
use crate::store::Need;

/// The addresses in quarantine.
pub(super) struct List;

#[async_trait(?Send)]
impl OnOpenStore for List {
    fn need(&self) -> Need {
        Need::Read
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        Answer::rows("quarantined", &rows(quarantine_of(&operator.ipam().inventory(deadline).await?.reservations)))
    }
}

#[async_trait(?Send)]
impl OnOpenStore for QuarantineRelease {
    fn need(&self) -> Need {
        Need::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let ip = self.address;
        let taken = operator.release_quarantined(ip, deadline).await.map_err(|error| match error {
            Error::Invalid(_) => Failure::from(error).hint("see what is with: margay ipam quarantine list"),
            _ => error.into(),
        })?;
        Answer::new(format!("Successfully released {ip} from quarantine"), &QuarantineRow::new(ip, taken))
    }
}
