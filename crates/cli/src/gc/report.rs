//! Defines the report of `margay gc`, which is printed as text or as JSON.

use std::fmt::Write;
use std::net::IpAddr;

use datastore::Location;
use ipam_core::endpoints::{EndpointOwner, EndpointToDelete};
use ipam_core::gc::{Allocation, NodeEndpoint};
use serde::Serialize;

use super::scans::MIN_SCAN_INTERVAL;
use crate::command::CommandAnswer;
use crate::error::CommandResult;
use crate::output::{Column, printable, render};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FreeReason {
    EarlierBoot,
    NamespaceGone,
    NotListed,
}

impl FreeReason {
    fn text(self) -> &'static str {
        match self {
            Self::EarlierBoot => "of an earlier boot",
            Self::NamespaceGone => "its namespace is gone",
            Self::NotListed => "not in the list",
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct LeftoverRow {
    address: IpAddr,
    network: String,
    container: String,
    interface: String,
    reason: FreeReason,
    /// The time at which the address was assigned, according to the attributes of the address.
    since: Option<String>,
}

impl LeftoverRow {
    pub(super) fn new(one: &Allocation, reason: FreeReason) -> Self {
        Self {
            address: one.address,
            network: one.network.clone(),
            container: one.container.clone(),
            interface: one.interface.clone(),
            reason,
            since: one.timestamp.clone(),
        }
    }

    fn cells(&self) -> Vec<String> {
        let texts = [&self.network, &self.container, &self.interface].map(|text| printable(text));
        let [network, container, interface] = texts;
        let (reason, since) = (self.reason.text().to_owned(), assignment_time(self.since.as_deref()));
        vec![self.address.to_string(), network, container, interface, reason, since]
    }
}

/// A workload endpoint that is deleted in the same commit as its addresses.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct EndpointRow {
    namespace: String,
    name: String,
    container: String,
}

impl From<&EndpointToDelete> for EndpointRow {
    fn from(endpoint: &EndpointToDelete) -> Self {
        let container = match &endpoint.owner {
            EndpointOwner::Container(container) => container.clone(),
            EndpointOwner::Any => String::new(),
        };
        Self { namespace: endpoint.namespace.clone(), name: endpoint.name.clone(), container }
    }
}

impl From<&NodeEndpoint> for EndpointRow {
    fn from(endpoint: &NodeEndpoint) -> Self {
        let NodeEndpoint { namespace, name, container, .. } = endpoint.clone();
        Self { namespace, name, container }
    }
}

impl EndpointRow {
    fn cells(&self) -> Vec<String> {
        [&self.namespace, &self.name, &self.container].map(|text| printable(text)).into()
    }

    /// Formats endpoints as a table, or as an empty string if there are no endpoints.
    pub(super) fn table(rows: &[Self]) -> String {
        let titles = ["NAMESPACE", "ENDPOINT", "CONTAINER"];
        let cells: Vec<Vec<String>> = rows.iter().map(Self::cells).collect();
        if rows.is_empty() { String::new() } else { render(&titles.map(Column::Text), &cells) }
    }
}

/// The numbers of the node's addresses that are not freed, by reason.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct KeptCounts {
    pub(super) live: usize,
    pub(super) namespace_gone: usize,
    /// The number of addresses that were assigned since the last boot, and whose network namespace may still exist.
    pub(super) of_this_boot: usize,
    pub(super) of_earlier_boots: usize,
    pub(super) of_another_machine: usize,
    /// If `margay gc` runs in a container, the number of addresses that were assigned outside of this container.
    pub(super) outside: usize,
    pub(super) not_margays: usize,
    pub(super) no_workloads: usize,
    #[serde(flatten)]
    pub(super) by_list: Option<KeptByListCounts>,
}

/// For each reason, how many addresses were not freed after a comparison with a runtime's list.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct KeptByListCounts {
    pub(super) listed: usize,
    pub(super) young: usize,
    pub(super) undated: usize,
    pub(super) of_other_networks: usize,
    /// The number of addresses that are in use on this machine but are not in the runtime's list.
    pub(super) live_unlisted: usize,
}

impl KeptCounts {
    /// Formats the numbers of kept addresses as text; an empty text if all numbers are 0.
    fn text(&self) -> String {
        let list = self.by_list.unwrap_or_default();
        let parts = [
            (self.live, "in use"),
            (self.namespace_gone, "whose network namespace is gone (margay gc --netns frees those)"),
            (
                self.of_this_boot,
                "given in this boot, whose network namespace is not recorded or cannot be looked for (margay gc \
                 --attachments frees those that a runtime does not list)",
            ),
            (self.of_earlier_boots, "of an earlier boot (margay gc --boot frees those)"),
            (
                self.of_another_machine,
                "given since this boot began, under another one: another machine's of the same name",
            ),
            (self.outside, "assigned outside of this container (run margay gc where they were assigned)"),
            (self.not_margays, "without Margay's attributes"),
            (self.no_workloads, "of tunnels or other non-workloads"),
            (list.listed, "in the list"),
            (list.young, "given after the list was made, or less than 60 seconds before"),
            (list.undated, "assigned at an unknown time"),
            (list.of_other_networks, "in networks that the list is not about"),
            (list.live_unlisted, "of those in use not in the list"),
        ];
        let parts: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        parts.join(", ")
    }
}

#[derive(Debug, Default, Serialize)]
pub(super) struct StoreReport {
    pub(super) store: String,
    pub(super) node: String,
    /// True if the store does not exist.
    pub(super) missing: bool,
    /// True if the store could not be read, or an address could not be freed.
    pub(super) failed: bool,
    pub(super) candidates: Vec<LeftoverRow>,
    /// Unused addresses that may be freed only after a later scan.
    pub(super) waiting: Vec<LeftoverRow>,
    /// The workload endpoints that are deleted in the same commits as the addresses in `candidates`.
    pub(super) endpoints: Vec<EndpointRow>,
    pub(super) freed: Vec<IpAddr>,
    pub(super) deleted_endpoints: Vec<EndpointRow>,
    /// Addresses that were not freed, because they were assigned again or released after they were read.
    pub(super) changed: Vec<IpAddr>,
    pub(super) left: KeptCounts,
}

impl StoreReport {
    pub(super) fn of(location: &Location) -> Self {
        Self { store: location.to_string(), ..Self::default() }
    }
}

#[derive(Debug, Default, Serialize)]
pub(super) struct GcReport {
    pub(super) applied: bool,
    pub(super) stores: Vec<StoreReport>,
}

impl GcReport {
    /// Returns the answer of a run that found no store to process, with the reason `why`.
    pub(super) fn answer_because(&self, why: String) -> CommandResult<CommandAnswer> {
        CommandAnswer::new(why, self)
    }

    pub(super) fn answer(&mut self) -> CommandResult<CommandAnswer> {
        for store in &mut self.stores {
            store.candidates.sort_by_key(|row| row.address);
            store.waiting.sort_by_key(|row| row.address);
            store.freed.sort_unstable();
            store.endpoints.sort_unstable();
            store.deleted_endpoints.sort_unstable();
        }
        let mut text = String::new();
        for store in &self.stores {
            if self.stores.len() > 1 {
                _ = writeln!(text, "{}:", store.store);
            }
            self.write_store(store, &mut text);
        }
        CommandAnswer::new(text, self)
    }

    fn write_store(&self, store: &StoreReport, text: &mut String) {
        if store.missing {
            _ = writeln!(text, "there is no store at {}, so there is nothing to free", store.store);
            return;
        }
        if store.failed && store.freed.is_empty() {
            _ = writeln!(text, "the store at {} was not gone through", store.store);
            return;
        }
        let titles = ["ADDRESS", "NETWORK", "CONTAINER", "INTERFACE", "REASON", "SINCE (UTC)"];
        if !store.candidates.is_empty() {
            let rows: Vec<Vec<String>> = store.candidates.iter().map(LeftoverRow::cells).collect();
            *text += &render(&titles.map(Column::Text), &rows);
        }
        *text += &EndpointRow::table(&store.endpoints);
        let count = store.candidates.len();
        let and = |verb: &str, count: usize| match count {
            0 => String::new(),
            _ => format!(" and {verb} {}", count_endpoints(count)),
        };
        _ = match (count, self.applied) {
            (0, _) => writeln!(text, "nothing to free for node {}", printable(&store.node)),
            (_, true) => {
                let deleted = and("deleted", store.deleted_endpoints.len());
                writeln!(text, "freed {}{deleted}", count_addresses(store.freed.len()))
            }
            (_, false) => {
                let delete = and("delete", store.endpoints.len());
                writeln!(text, "would free {}{delete}; do it with --apply", count_addresses(count))
            }
        };
        if !store.changed.is_empty() {
            _ = writeln!(text, "left {}, assigned again or released meanwhile", count_addresses(store.changed.len()));
        }
        if !store.waiting.is_empty() {
            let (count, apart) = (count_addresses(store.waiting.len()), MIN_SCAN_INTERVAL.as_secs());
            _ = writeln!(text, "{count} seen unused now; run again after {apart} s, or use --wait");
        }
        let left = store.left.text();
        if !left.is_empty() {
            _ = writeln!(text, "left: {left}");
        }
    }
}

/// Formats the recorded assignment time of an address for a table.
pub(super) fn assignment_time(recorded: Option<&str>) -> String {
    let text = recorded.map_or("unknown", |text| text.split('.').next().unwrap_or(text));
    printable(text.trim_end_matches(" +0000 UTC"))
}

pub(super) fn count_addresses(count: usize) -> String {
    if count == 1 { "1 address".to_owned() } else { format!("{count} addresses") }
}

pub(super) fn count_endpoints(count: usize) -> String {
    if count == 1 { "1 workload endpoint".to_owned() } else { format!("{count} workload endpoints") }
}
