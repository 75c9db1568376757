//! Pins, unpins and lists sticky addresses, for the commands `margay ipam pin`, `margay ipam unpin` and `margay ipam
//! list`.

use std::net::IpAddr;

use async_trait::async_trait;
use clap::Args;
use ipam_core::sticky::WaitEnd;
use ipam_operator::{KeptAddress, Operator};
use kv::Deadline;
use serde::Serialize;
use serde_json::json;

use crate::command::{CommandAnswer, OpenStoreCommand};
use crate::error::CommandResult;
use crate::output::{Column, Columns, TableRow, printable, table};
use crate::store::StoreUse;

pub(crate) const PIN_HELP: &str = "\
Examples:
  margay ipam pin 10.65.0.5 shop/web-0
  margay ipam pin 10.65.0.5 printer --network lan
  margay ipam pin 10.65.0.5 shop/web-0 --dry-run

NAME is what ipam.sticky of the network makes of the workload: NAMESPACE/POD, the container's name, or the value of a label
or an annotation. An address in use stays with its holder, and waits for the workload after its release, in the same network.
A pin holds until margay ipam unpin.";
pub(crate) const UNPIN_HELP: &str = "\
Examples:
  margay ipam unpin 10.65.0.5
  margay ipam unpin 10.65.0.5 --dry-run

A container that has the address keeps it. An address that waits for its workload is free afterwards.";
pub(crate) const LIST_HELP: &str = "\
Examples:
  margay ipam list
  margay ipam list --pinned
  margay ipam list -o json | jq -r '.addresses[] | select(.until) | .ip'";

/// The arguments of `ipam pin`.
#[derive(Debug, Args)]
pub(crate) struct Pin {
    /// The sticky address, IPv4 or IPv6
    #[arg(value_name = "ADDRESS")]
    pub(crate) ip: IpAddr,

    /// The name of the workload
    #[arg(value_name = "NAME")]
    pub(crate) name: String,

    /// Reserve the address only in this network [default: the address's current network; any network if the address is
    /// free]
    #[arg(long, value_name = "NETWORK")]
    pub(crate) network: Option<String>,

    /// Show what would be done, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The arguments of `ipam unpin`.
#[derive(Debug, Args)]
pub(crate) struct Unpin {
    /// The address to unpin, IPv4 or IPv6
    #[arg(value_name = "ADDRESS")]
    pub(crate) ip: IpAddr,

    /// Show what would be done, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The arguments of `ipam list`.
#[derive(Debug, Args)]
pub(crate) struct ListStickyAddresses {
    /// List only pinned addresses
    #[arg(long)]
    pub(crate) pinned: bool,
}

/// A sticky address in the output of `ipam list`.
#[derive(Debug, Serialize)]
struct StickyAddressRow<'a> {
    ip: IpAddr,
    workload: &'a str,
    pinned: bool,
    /// Until when the released address is kept for its workload: a time, or `forever`; null while the address is in
    /// use.
    until: Option<String>,
    handle: Option<&'a str>,
    network: Option<&'a str>,
    interface: Option<&'a str>,
    node: Option<&'a str>,
}

impl<'a> From<&'a KeptAddress> for StickyAddressRow<'a> {
    fn from(kept: &'a KeptAddress) -> Self {
        Self {
            ip: kept.address,
            workload: &kept.workload,
            pinned: kept.is_pinned,
            until: kept.until.map(WaitEnd::text),
            handle: kept.handle.as_deref(),
            network: kept.network.as_deref(),
            interface: kept.interface.as_deref(),
            node: kept.node.as_deref(),
        }
    }
}

impl TableRow for StickyAddressRow<'_> {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("ADDRESS"), |row| row.ip.to_string()),
            (Column::Text("WORKLOAD"), |row| printable(row.workload)),
            (Column::Text("STATE"), |row| match &row.until {
                None => "in use".to_owned(),
                Some(until) if *until == WaitEnd::Forever.text() => "waits".to_owned(),
                Some(until) => format!("waits until {until}"),
            }),
            (Column::Text("PINNED"), |row| if row.pinned { "yes" } else { "no" }.to_owned()),
            (Column::Text("NETWORK"), |row| printable(row.network.unwrap_or("-"))),
            (Column::Text("NODE"), |row| printable(row.node.unwrap_or("-"))),
        ]
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for Pin {
    fn store_use(&self) -> StoreUse {
        StoreUse::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let kept = operator.pin(self.ip, &self.name, self.network.as_deref(), deadline).await?;
        let (ip, name) = (kept.address, printable(&kept.workload));
        let answer = CommandAnswer::new(format!("Successfully pinned {ip} to {name}"), &StickyAddressRow::from(&kept))?;
        Ok(answer.notes(
            kept.handle.as_deref().map(|handle| {
                format!("{ip} is in use by {}; it waits for {name} after its release", printable(handle))
            }),
        ))
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for Unpin {
    fn store_use(&self) -> StoreUse {
        StoreUse::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    /// Ends the pinning of an address to a workload. The answer of `unpin` shows the address as the store recorded it
    /// before the command.
    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let kept = operator.unpin(self.ip, deadline).await?;
        let text = format!("Successfully unpinned {} from {}", kept.address, printable(&kept.workload));
        CommandAnswer::new(text, &StickyAddressRow::from(&kept))
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for ListStickyAddresses {
    fn store_use(&self) -> StoreUse {
        StoreUse::ReadAll
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let mut kept = operator.kept_addresses(deadline).await?;
        kept.retain(|one| one.is_pinned || !self.pinned);
        let rows: Vec<StickyAddressRow<'_>> = kept.iter().map(StickyAddressRow::from).collect();
        CommandAnswer::new(table(&rows), &json!({ "addresses": rows }))
    }
}
