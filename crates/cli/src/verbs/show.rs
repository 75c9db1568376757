//! `margay ipam show`.

use async_trait::async_trait;
use ipam_core::quarantine::quarantine_of;
use ipam_operator::Operator;
use kv::Deadline;

use super::{address, borrowed, settings};
use crate::answer::Answer;
use crate::args::Show;
use crate::command::OnOpenStore;
use crate::error::Result;
use crate::quarantine::note;
use crate::store::Need;
use crate::usage::{self, Detail};

#[async_trait(?Send)]
impl OnOpenStore for Show {
    fn need(&self) -> Need {
        if self.ip.is_some() { Need::Read } else { Need::ReadAll }
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        match self {
            Self { ip: Some(ip), .. } => address::show(operator, *ip, deadline).await,
            Self { show_borrowed: true, .. } => borrowed::show(operator, deadline).await,
            Self { show_configuration: true, .. } => settings::show(operator, deadline).await,
            Self { show_blocks, .. } => {
                let detail = if *show_blocks { Detail::Blocks } else { Detail::Pools };
                let answer = usage::answer(&operator.ipam().utilization(deadline).await?, detail)?;
                let quarantined = quarantine_of(&operator.ipam().inventory(deadline).await?.reservations);
                Ok(answer.notes(note(quarantined.len())))
            }
        }
    }
}
