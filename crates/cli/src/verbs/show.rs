//! `margay ipam show`.

use std::net::IpAddr;

use async_trait::async_trait;
use clap::Args;
use ipam_core::quarantine::quarantine_of;
use ipam_operator::Operator;
use kv::Deadline;

use super::{address, borrowed, settings};
use crate::answer::Answer;
use crate::command::OnOpenStore;
use crate::error::Result;
use crate::quarantine::note;
use crate::store::Need;
use crate::usage::{self, Detail};

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// Show every block of every pool
    #[arg(long, conflicts_with = "ip")]
    pub(crate) show_blocks: bool,

    /// Show who has this address
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) ip: Option<IpAddr>,

    /// Show the addresses that nodes have of blocks that are not theirs
    #[arg(long, conflicts_with_all = ["ip", "show_blocks"])]
    pub(crate) show_borrowed: bool,

    /// Show the settings that all nodes share
    #[arg(long, conflicts_with_all = ["ip", "show_blocks", "show_borrowed"])]
    pub(crate) show_configuration: bool,

    /// Show when each pool will be full, if it goes on filling as in the last week
    #[arg(long, conflicts_with_all = ["ip", "show_blocks", "show_borrowed", "show_configuration"])]
    pub(crate) forecast: bool,
}

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
