//! Addresses that workloads keep.

use ipam_core::sticky::Until;
use ipam_operator::{KeptAddress, Operator};
use kv::Deadline;
use serde::Serialize;
use serde_json::json;

use crate::answer::Answer;
use crate::args::{ListKept, Pin, Unpin};
use crate::error::Result;
use crate::output::{Column, printable, render};

/// An address as `-o json` shows it.
#[derive(Debug, Serialize)]
struct Row<'a> {
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

impl<'a> From<&'a KeptAddress> for Row<'a> {
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

/// Pins an address.
pub(super) async fn pin(ipam: &Operator, what: &Pin, deadline: Deadline) -> Result<Answer> {
    let kept = ipam.pin(what.ip, &what.name, what.network.as_deref(), deadline).await?;
    let (ip, name) = (kept.address, printable(&kept.workload));
    let answer = Answer::new(format!("Successfully pinned {ip} to {name}"), &Row::from(&kept))?;
    Ok(match &kept.handle {
        Some(handle) => {
            answer.note(format!("{ip} is in use by {}; it waits for {name} after its release", printable(handle)))
        }
        None => answer,
    })
}

/// Unpins an address. The answer is what was recorded.
pub(super) async fn unpin(ipam: &Operator, what: &Unpin, deadline: Deadline) -> Result<Answer> {
    let kept = ipam.unpin(what.ip, deadline).await?;
    let text = format!("Successfully unpinned {} from {}", kept.address, printable(&kept.workload));
    Answer::new(text, &Row::from(&kept))
}

/// Lists the addresses that workloads keep.
pub(super) async fn list(ipam: &Operator, what: &ListKept, deadline: Deadline) -> Result<Answer> {
    let mut kept = ipam.kept_addresses(deadline).await?;
    kept.retain(|one| one.is_pinned || !what.pinned);
    let columns = ["ADDRESS", "WORKLOAD", "STATE", "PINNED", "NETWORK", "NODE"].map(Column::Text);
    let text = |text: &Option<String>| text.as_deref().map_or_else(|| "-".to_owned(), printable);
    let row = |one: &KeptAddress| {
        let state = match one.until {
            None => "in use".to_owned(),
            Some(Until::Forever) => "waits".to_owned(),
            Some(until) => format!("waits until {}", until.text()),
        };
        let pinned = if one.is_pinned { "yes" } else { "no" };
        vec![
            one.address.to_string(),
            printable(&one.workload),
            state,
            pinned.to_owned(),
            text(&one.network),
            text(&one.node),
        ]
    };
    let rows: Vec<Vec<String>> = kept.iter().map(row).collect();
    let addresses: Vec<Row<'_>> = kept.iter().map(Row::from).collect();
    Answer::new(render(&columns, &rows), &json!({ "addresses": addresses }))
}
