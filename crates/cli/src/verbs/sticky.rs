//! Addresses that workloads keep.

use async_trait::async_trait;
use ipam_core::sticky::Until;
use ipam_operator::{KeptAddress, Operator};
use kv::Deadline;
use serde::Serialize;
use serde_json::json;

use crate::answer::Answer;
use crate::args::{ListKept, Pin, Unpin};
use crate::command::OnOpenStore;
use crate::error::Result;
use crate::output::{Column, Columns, Row, printable, table};
use crate::store::Need;

/// An address as a row.
#[derive(Debug, Serialize)]
struct KeptRow<'a> {
    ip: std::net::IpAddr,
    workload: &'a str,
    pinned: bool,
    /// Until when it waits: a time, or `forever`; null while it is in use.
    until: Option<String>,
    handle: Option<&'a str>,
    network: Option<&'a str>,
    interface: Option<&'a str>,
    node: Option<&'a str>,
}

impl<'a> From<&'a KeptAddress> for KeptRow<'a> {
    fn from(kept: &'a KeptAddress) -> Self {
        Self {
            ip: kept.address,
            workload: &kept.workload,
            pinned: kept.is_pinned,
            until: kept.until.map(Until::text),
            handle: kept.handle.as_deref(),
            network: kept.network.as_deref(),
            interface: kept.interface.as_deref(),
            node: kept.node.as_deref(),
        }
    }
}

impl Row for KeptRow<'_> {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("ADDRESS"), |row| row.ip.to_string()),
            (Column::Text("WORKLOAD"), |row| printable(row.workload)),
            (Column::Text("STATE"), |row| match &row.until {
                None => "in use".to_owned(),
                Some(until) if *until == Until::Forever.text() => "waits".to_owned(),
                Some(until) => format!("waits until {until}"),
            }),
            (Column::Text("PINNED"), |row| if row.pinned { "yes" } else { "no" }.to_owned()),
            (Column::Text("NETWORK"), |row| printable(row.network.unwrap_or("-"))),
            (Column::Text("NODE"), |row| printable(row.node.unwrap_or("-"))),
        ]
    }
}

#[async_trait(?Send)]
impl OnOpenStore for Pin {
    fn need(&self) -> Need {
        Need::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let kept = operator.pin(self.ip, &self.name, self.network.as_deref(), deadline).await?;
        let (ip, name) = (kept.address, printable(&kept.workload));
        let answer = Answer::new(format!("Successfully pinned {ip} to {name}"), &KeptRow::from(&kept))?;
        Ok(answer.notes(
            kept.handle.as_deref().map(|handle| {
                format!("{ip} is in use by {}; it waits for {name} after its release", printable(handle))
            }),
        ))
    }
}

#[async_trait(?Send)]
impl OnOpenStore for Unpin {
    fn need(&self) -> Need {
        Need::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    /// The answer is what was recorded.
    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let kept = operator.unpin(self.ip, deadline).await?;
        let text = format!("Successfully unpinned {} from {}", kept.address, printable(&kept.workload));
        Answer::new(text, &KeptRow::from(&kept))
    }
}

#[async_trait(?Send)]
impl OnOpenStore for ListKept {
    fn need(&self) -> Need {
        Need::ReadAll
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let mut kept = operator.kept_addresses(deadline).await?;
        kept.retain(|one| one.is_pinned || !self.pinned);
        let rows: Vec<KeptRow<'_>> = kept.iter().map(KeptRow::from).collect();
        Answer::new(table(&rows), &json!({ "addresses": rows }))
    }
}
