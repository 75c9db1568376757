//! Implements the command `margay ipam show`, which shows how full pools are, who holds an address, borrowed addresses,
//! and forecasts.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;
use clap::Args;
use ipam_core::census::Census;
use ipam_core::quarantine::{QuarantineEntry, QuarantineRow, quarantine_of};
use ipam_core::reservations::Reservations;
use ipam_core::sticky::{STICKY, STICKY_UNTIL};
use ipam_core::timestamps::rfc3339;
use ipam_core::utilization::{BlockUsage, Usage, Utilization};
use ipam_core::{BorrowedAddress, BorrowedAddresses, Holding, Inventory};
use ipam_operator::Operator;
use ipam_operator::forecast::{FillForecast, Forecast, MIN_HISTORY, PoolForecast};
use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;

use super::quarantine::{note, sentence};
use super::settings;
use crate::command::{CommandAnswer, OpenStoreCommand, READ_ALL_TIMEOUT, StoreCommand};
use crate::error::CommandResult;
use crate::output::{Column, Columns, TableRow, format_five_digits, format_share, printable, render, table};
use crate::store::{StoreAccess, StoreUse};

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// Show every block of every pool
    #[arg(long, conflicts_with = "ip")]
    show_blocks: bool,

    /// Show what uses this address
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) ip: Option<IpAddr>,

    /// Show the addresses that nodes have in blocks of other nodes
    #[arg(long, conflicts_with_all = ["ip", "show_blocks"])]
    show_borrowed: bool,

    /// Show the settings that all nodes share
    #[arg(long, conflicts_with_all = ["ip", "show_blocks", "show_borrowed"])]
    show_configuration: bool,

    /// Show when each pool will be full if it keeps filling as in the last week
    #[arg(long, conflicts_with_all = ["ip", "show_blocks", "show_borrowed", "show_configuration"])]
    pub(crate) forecast: bool,
}

#[async_trait(?Send)]
impl OpenStoreCommand for Show {
    fn store_use(&self) -> StoreUse {
        if self.ip.is_some() { StoreUse::Read } else { StoreUse::ReadAll }
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        match self {
            Self { ip: Some(ip), .. } => show_address(operator, *ip, deadline).await,
            Self { show_borrowed: true, .. } => show_borrowed(operator, deadline).await,
            Self { show_configuration: true, .. } => settings::show(operator, deadline).await,
            Self { show_blocks, .. } => {
                let detail = if *show_blocks { UsageDetail::Blocks } else { UsageDetail::Pools };
                let answer = usage_answer(&operator.ipam().utilization(deadline).await?, detail)?;
                let quarantined = quarantine_of(&operator.ipam().inventory(deadline).await?.reservations);
                Ok(answer.notes(note(quarantined.len())))
            }
        }
    }
}

/// Whether the table of pool usage also lists the blocks of each pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UsageDetail {
    Pools,
    /// The table has all pools and the blocks of each pool.
    Blocks,
}

/// Returns the answer that shows how full all pools are. In JSON, the answer always includes the blocks, and numbers
/// are written as strings.
fn usage_answer(utilization: &Utilization, detail: UsageDetail) -> CommandResult<CommandAnswer> {
    let answer = CommandAnswer::new(usage_table(utilization, detail), utilization)?;
    Ok(match (utilization.pools.is_empty(), utilization.orphaned.len(), detail) {
        (true, 0, _) => answer.note("there is no pool yet; make one with: margay pool create NAME CIDR"),
        (_, 0, _) | (_, _, UsageDetail::Blocks) => answer,
        (_, orphans, UsageDetail::Pools) => {
            let blocks = if orphans == 1 { "block lies" } else { "blocks lie" };
            answer.note(format!("{orphans} {blocks} in no pool; see with: margay ipam show --show-blocks"))
        }
    })
}

fn usage_table(utilization: &Utilization, detail: UsageDetail) -> String {
    let columns = [
        Column::Text("GROUPING"),
        Column::Text("CIDR"),
        Column::Number("IPS TOTAL"),
        Column::Number("IPS IN USE"),
        Column::Number("IPS RESERVED"),
        Column::Number("IPS FREE"),
    ];
    let blocks = |blocks: &[BlockUsage]| -> Vec<Vec<String>> {
        let shown = if detail == UsageDetail::Blocks { blocks } else { &[] };
        shown.iter().map(|block| usage_row("Block", block.cidr, &block.usage)).collect()
    };
    let mut rows = Vec::new();
    for pool in &utilization.pools {
        let grouping = pool.prefix_length.map_or_else(|| "IP Pool".to_owned(), |length| format!("Pool of /{length}"));
        rows.push(usage_row(&grouping, pool.cidr, &pool.usage));
        rows.extend(blocks(&pool.blocks));
    }
    rows.extend(blocks(&utilization.orphaned));
    render(&columns, &rows)
}

/// Returns a row of the table that shows how full pools are. Numbers in the table about pools are rounded to five
/// digits, while JSON has the exact numbers.
fn usage_row(grouping: &str, cidr: IpNet, usage: &Usage) -> Vec<String> {
    let whole = usage.capacity.to_f64();
    let parts = [usage.in_use, usage.reserved, usage.available].map(|count| format_share(count.to_f64(), whole));
    [grouping.to_owned(), cidr.to_string(), format_five_digits(whole)].into_iter().chain(parts).collect()
}

/// Shows whether an address is assigned, and who holds it. Unlike calicoctl, also finds addresses in disabled pools and
/// outside of all pools.
async fn show_address(operator: &Operator, ip: IpAddr, deadline: Deadline) -> CommandResult<CommandAnswer> {
    let Inventory { pools, reservations } = operator.ipam().inventory(deadline).await?;
    let pool = pools.iter().find(|pool| pool.cidr().contains(&ip));
    let prefix = pool.filter(|pool| pool.prefix_length().is_some()).map(|pool| pool.unit_of(ip));
    let status = status_of(operator.ipam().holding(ip, deadline).await?);
    let reserved_by = reservations
        .iter()
        .filter(|reservation| {
            Reservations::from_documents([*reservation]).0.touches(prefix.unwrap_or_else(|| ip.into()))
        })
        .map(|reservation| reservation.name().to_owned())
        .collect();
    let quarantined = quarantine_of(&reservations).remove(&ip);
    let pool = pool.map(|pool| pool.name().to_owned());
    AddressReport { ip, prefix, pool, reserved_by, quarantined, status }.answer()
}

fn status_of(holding: Holding) -> AddressStatus {
    match holding {
        Holding::Free => AddressStatus::Free,
        Holding::InCooldown(entry) => AddressStatus::CoolingDown { released_at: entry.released_at().map(rfc3339) },
        Holding::Held(entry) => AddressStatus::Held(Holder {
            handle: entry.handle().map(str::to_owned),
            attributes: entry.attributes_with_network(),
            alternate_attributes: entry.alternate_attributes().clone(),
        }),
    }
}

/// All facts that the store has about one address.
#[derive(Clone, Debug)]
struct AddressReport {
    ip: IpAddr,
    /// The assigned prefix that contains the address, if the pool assigns prefixes.
    prefix: Option<IpNet>,
    /// The pool whose range contains the address.
    pool: Option<String>,
    /// The names of the reservations that include the address.
    reserved_by: Vec<String>,
    quarantined: Option<QuarantineEntry>,
    status: AddressStatus,
}

#[derive(Clone, Debug)]
enum AddressStatus {
    Free,
    /// The address was released and is still in cooldown.
    CoolingDown {
        released_at: Option<String>,
    },
    Held(Holder),
}

#[derive(Clone, Debug, Default, Serialize)]
struct Holder {
    handle: Option<String>,
    attributes: BTreeMap<String, String>,
    /// The attributes that are recorded for the second owner of the address. Only the address of a virtual machine can
    /// have a second owner.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    alternate_attributes: BTreeMap<String, String>,
}

impl AddressReport {
    /// Returns the answer in calicoctl's words, with notes about facts that calicoctl does not report.
    fn answer(&self) -> CommandResult<CommandAnswer> {
        let mut answer = CommandAnswer::new(self.text(), &self.json())?;
        if self.pool.is_none() {
            answer = answer.note(format!("{} is in no pool", self.ip));
        }
        if let AddressStatus::Held(Holder { handle: None, attributes, .. }) = &self.status
            && let (Some(name), Some(until)) = (attributes.get(STICKY), attributes.get(STICKY_UNTIL))
        {
            answer = answer.note(format!(
                "{} has no holder: it waits for {}, until: {}",
                self.ip,
                printable(name),
                printable(until)
            ));
        }
        for name in &self.reserved_by {
            answer = answer.note(format!("{} is reserved by reservation {}", self.ip, printable(name)));
        }
        if let Some(why) = &self.quarantined {
            let text = sentence(&QuarantineRow { address: self.ip, why: why.clone() });
            answer = answer.note(format!("{text}; to end it: margay ipam quarantine release {}", self.ip));
        }
        Ok(answer)
    }

    fn text(&self) -> String {
        let (kind, name) = match self.prefix {
            Some(prefix) => ("Prefix", prefix.to_string()),
            None => ("IP", self.ip.to_string()),
        };
        match &self.status {
            AddressStatus::Free => format!("{name} is not assigned"),
            AddressStatus::CoolingDown { released_at } => format!(
                "{name} is not assigned: it was released at {} and is in cooldown",
                released_at.as_deref().unwrap_or("an unknown time")
            ),
            AddressStatus::Held(holder) => format!("{kind} {name} is in use\n{}", holder.text()),
        }
    }

    fn json(&self) -> AddressJson<'_> {
        let (holder, cooling_down_since) = match &self.status {
            AddressStatus::Free => (None, None),
            AddressStatus::CoolingDown { released_at } => (None, released_at.as_deref()),
            AddressStatus::Held(holder) => (Some(holder), None),
        };
        AddressJson {
            ip: self.ip,
            prefix: self.prefix.map(|prefix| prefix.to_string()),
            in_use: holder.is_some(),
            pool: self.pool.as_deref(),
            reserved_by: &self.reserved_by,
            quarantined: self.quarantined.as_ref(),
            cooling_down_since,
            holder,
        }
    }
}

#[derive(Serialize)]
struct AddressJson<'a> {
    ip: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix: Option<String>,
    in_use: bool,
    pool: Option<&'a str>,
    reserved_by: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantined: Option<&'a QuarantineEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cooling_down_since: Option<&'a str>,
    #[serde(flatten)]
    holder: Option<&'a Holder>,
}

impl Holder {
    fn text(&self) -> String {
        let handle = self.handle.as_deref().map_or("<none>".into(), printable);
        let mut text = format!("Handle ID: {handle}\n");
        if self.attributes.is_empty() {
            text.push_str("No Active Owner attributes defined\n");
        } else {
            text.push_str("Active Owner Attributes:\n");
            append_attributes(&mut text, &self.attributes);
        }
        if !self.alternate_attributes.is_empty() {
            text.push_str("Alternate Owner Attributes:\n");
            append_attributes(&mut text, &self.alternate_attributes);
        }
        text
    }
}

fn append_attributes(text: &mut String, attributes: &BTreeMap<String, String>) {
    for (name, value) in attributes {
        _ = writeln!(text, "  {}: {}", printable(name), printable(value));
    }
}

/// Shows which nodes have borrowed addresses from the blocks of other nodes.
async fn show_borrowed(operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
    borrowed_answer(&operator.ipam().borrowed(deadline).await?)
}

impl TableRow for BorrowedAddress {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("IP"), |row| row.ip.to_string()),
            (Column::Text("BORROWING-NODE"), |row| printable(&row.node)),
            (Column::Text("BLOCK"), |row| row.block.to_string()),
            (Column::Text("BLOCK OWNER"), |row| printable(&row.block_owner)),
            (Column::Text("TYPE"), |row| printable(&row.kind)),
            (Column::Text("ALLOCATED-TO"), |row| printable(&row.allocated_to)),
        ]
    }
}

fn borrowed_answer(borrowed: &BorrowedAddresses) -> CommandResult<CommandAnswer> {
    let answer = CommandAnswer::new(table(&borrowed.addresses), borrowed)?;
    Ok(match borrowed.without_node {
        0 => answer,
        count => answer.note(format!(
            "found {count} IP allocations without an explicit node association. Unable to determine if they are borrowed."
        )),
    })
}

/// Maximum time that a forecast shows as a number; a pool that will be full later gets no number.
const MAX_FORECAST: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

pub(crate) struct ShowForecast;

#[async_trait(?Send)]
impl StoreCommand for ShowForecast {
    fn progress_text(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let census = at
            .with_operator(StoreUse::ReadAll, async |operator| {
                Ok(operator.ipam().census(Deadline::after(READ_ALL_TIMEOUT)).await?)
            })
            .await?;
        let forecast = forecast_census(at, &census).await?;
        let answer = CommandAnswer::new(table(&forecast.pools), &forecast)?;
        if forecast.pools.is_empty() {
            return Ok(answer.note("there is no pool yet; make one with: margay pool create NAME CIDR"));
        }
        // If the store's history is too short for a forecast, the answer needs no note, because the table shows that
        // the forecast is unknown.
        match forecast.history_seconds < MIN_HISTORY.as_secs() {
            true => Ok(answer),
            false => Ok(answer.note(format!("from {} of history", span(forecast.history_seconds)))),
        }
    }
}

/// Forecasts when each counted pool will be full. The history is read through a watch, so an embedded store stays open
/// during the forecast.
pub(super) async fn forecast_census(at: StoreAccess<'_>, census: &Census) -> CommandResult<Forecast> {
    at.with_operator(StoreUse::Read, async |operator| {
        Ok(operator.forecast(census, Deadline::after(READ_ALL_TIMEOUT)).await?)
    })
    .await
}

impl TableRow for PoolForecast {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("POOL"), |pool| pool.name.clone()),
            (Column::Text("CIDR"), |pool| pool.cidr.to_string()),
            (Column::Number("IPS FREE"), |pool| format_five_digits(pool.free.to_f64())),
            (Column::Number("MORE PER DAY"), |pool| forecast_words(pool.ahead).0),
            (Column::Text("FULL IN"), |pool| forecast_words(pool.ahead).1),
        ]
    }
}

/// Describes how fast a pool fills up, and when it will be full.
fn forecast_words(ahead: FillForecast) -> (String, String) {
    match ahead {
        FillForecast::Full => (String::new(), "full".to_owned()),
        FillForecast::Filling { days, per_day } => {
            let time = Duration::try_from_secs_f64(days * 86_400.0).ok().filter(|time| *time < MAX_FORECAST);
            let full_in = time.map_or_else(|| "over 10 years".to_owned(), |time| span(time.as_secs()));
            (format!("{per_day:.1}"), full_in)
        }
        FillForecast::Steady => (String::new(), "not filling".to_owned()),
        FillForecast::Short => (String::new(), "unknown: less than 10 minutes of history".to_owned()),
        FillForecast::Unknown => (String::new(), "unknown: the store keeps no times".to_owned()),
    }
}

/// Formats a time span as a whole number, rounded down, in the largest unit for which this number is at least 2.
fn span(seconds: u64) -> String {
    let units = [(86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")];
    let (size, name) = units.into_iter().find(|(size, _)| seconds >= 2 * size).unwrap_or((1, "second"));
    format!("{} {name}s", seconds / size)
}

#[cfg(test)]
mod tests {
    use ipam_core::net::Count;
    use ipam_core::utilization::PoolUsage;
    use serde_json::{Value, json, to_value};

    use super::*;
    use crate::command::Format;

    fn usage(capacity: u128, in_use: u128, reserved: u128, available: u128) -> Usage {
        let [capacity, in_use, reserved, available] = [capacity, in_use, reserved, available].map(Count::new);
        Usage { capacity, in_use, reserved, available }
    }

    fn utilization() -> Utilization {
        let block = |cidr: &str, usage| BlockUsage { cidr: cidr.parse().unwrap(), usage };
        Utilization {
            pools: vec![
                PoolUsage {
                    name: "main".into(),
                    cidr: "10.65.0.0/24".parse().unwrap(),
                    prefix_length: None,
                    usage: usage(256, 233, 4, 20),
                    blocks: vec![block("10.65.0.0/28", usage(16, 13, 4, 0))],
                },
                PoolUsage {
                    name: "wide".into(),
                    cidr: "fd00::/16".parse().unwrap(),
                    prefix_length: None,
                    usage: usage(1 << 112, 1, 0, (1 << 112) - 1),
                    blocks: vec![],
                },
            ],
            orphaned: vec![block("10.99.0.0/30", usage(4, 4, 0, 0))],
        }
    }

    fn printed(report: &Utilization, detail: UsageDetail, format: Format) -> (String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        usage_answer(report, detail).unwrap().print(format, &mut out, &mut err).unwrap();
        (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    #[test]
    fn show_table_lists_pools() {
        let expected = "\
+----------+--------------+------------+------------+--------------+-------------------+
| GROUPING | CIDR         | IPS TOTAL  | IPS IN USE | IPS RESERVED | IPS FREE          |
+----------+--------------+------------+------------+--------------+-------------------+
| IP Pool  | 10.65.0.0/24 |        256 |  233 (91%) |       4 (2%) |           20 (8%) |
| IP Pool  | fd00::/16    | 5.1923e+33 |     1 (0%) |       0 (0%) | 5.1923e+33 (100%) |
+----------+--------------+------------+------------+--------------+-------------------+
";
        let note = "note: 1 block lies in no pool; see with: margay ipam show --show-blocks\n";
        assert_eq!(printed(&utilization(), UsageDetail::Pools, Format::Table), (expected.to_owned(), note.to_owned()));
    }

    #[test]
    fn show_blocks_follow_their_pool_and_orphans_come_last() {
        let (table, _) = printed(&utilization(), UsageDetail::Blocks, Format::Table);
        let first: Vec<&str> =
            table.lines().filter_map(|line| line.strip_prefix("| ")?.split('|').next().map(str::trim)).collect();
        assert_eq!(first, ["GROUPING", "IP Pool", "Block", "IP Pool", "Block"]);
        assert!(table.contains("10.99.0.0/30"), "{table}");
    }

    #[test]
    fn show_json_is_exact_and_has_blocks() {
        let (text, _) = printed(&utilization(), UsageDetail::Pools, Format::Json);
        let found: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({
            "pools": [
                {
                    "name": "main", "cidr": "10.65.0.0/24",
                    "capacity": "256", "in_use": "233", "reserved": "4", "available": "20",
                    "blocks": [
                        {"cidr": "10.65.0.0/28", "capacity": "16", "in_use": "13", "reserved": "4", "available": "0"}
                    ],
                },
                {
                    "name": "wide", "cidr": "fd00::/16",
                    "capacity": "5192296858534827628530496329220096", "in_use": "1", "reserved": "0",
                    "available": "5192296858534827628530496329220095",
                    "blocks": [],
                },
            ],
            "orphaned": [
                {"cidr": "10.99.0.0/30", "capacity": "4", "in_use": "4", "reserved": "0", "available": "0"}
            ],
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn show_says_what_to_do_when_store_is_empty() {
        let (table, notes) = printed(&Utilization::default(), UsageDetail::Pools, Format::Table);
        assert!(table.contains("GROUPING"));
        assert_eq!(notes, "note: there is no pool yet; make one with: margay pool create NAME CIDR\n");
        let (text, _) = printed(&Utilization::default(), UsageDetail::Pools, Format::Json);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({"pools": [], "orphaned": []}));
    }

    fn report(status: AddressStatus) -> AddressReport {
        let ip = "10.65.0.5".parse().unwrap();
        AddressReport { ip, prefix: None, pool: Some("main".into()), reserved_by: vec![], quarantined: None, status }
    }

    #[test]
    fn show_texts_match_calicoctl() {
        assert_eq!(report(AddressStatus::Free).text(), "10.65.0.5 is not assigned");
        let attributes: BTreeMap<_, _> =
            [("pod", "web"), ("node", "node1")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let holder = Holder { handle: Some("net1.c1".into()), attributes, ..Holder::default() };
        assert_eq!(
            report(AddressStatus::Held(holder)).text(),
            "IP 10.65.0.5 is in use\nHandle ID: net1.c1\nActive Owner Attributes:\n  node: node1\n  pod: web\n"
        );
        assert_eq!(
            report(AddressStatus::Held(Holder::default())).text(),
            "IP 10.65.0.5 is in use\nHandle ID: <none>\nNo Active Owner attributes defined\n"
        );
    }

    #[test]
    fn show_json_has_holder_beside_address() {
        let base = json!({"ip": "10.65.0.5", "in_use": false, "pool": "main", "reserved_by": []});
        assert_eq!(to_value(report(AddressStatus::Free).json()).unwrap(), base);
        let held = report(AddressStatus::Held(Holder { handle: Some("h".into()), ..Holder::default() }));
        let held = to_value(held.json()).unwrap();
        assert_eq!(held["in_use"], true);
        assert_eq!((&held["handle"], &held["attributes"]), (&json!("h"), &json!({})));
        let at = "2026-11-21T10:00:00Z";
        let cooling = to_value(report(AddressStatus::CoolingDown { released_at: Some(at.into()) }).json()).unwrap();
        assert_eq!((&cooling["in_use"], &cooling["cooling_down_since"]), (&json!(false), &json!(at)));
    }

    #[test]
    fn show_table_matches_calicoctl() {
        let address = BorrowedAddress {
            ip: "10.0.0.2".parse().unwrap(),
            node: "b".into(),
            block: "10.0.0.0/28".parse().unwrap(),
            block_owner: "a".into(),
            kind: "pod".into(),
            allocated_to: "default/web".into(),
        };
        let borrowed = BorrowedAddresses { addresses: vec![address], without_node: 2 };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        borrowed_answer(&borrowed).unwrap().print(Format::Table, &mut out, &mut err).unwrap();
        let expected = "\
+----------+----------------+-------------+-------------+------+--------------+
| IP       | BORROWING-NODE | BLOCK       | BLOCK OWNER | TYPE | ALLOCATED-TO |
+----------+----------------+-------------+-------------+------+--------------+
| 10.0.0.2 | b              | 10.0.0.0/28 | a           | pod  | default/web  |
+----------+----------------+-------------+-------------+------+--------------+
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        assert!(String::from_utf8(err).unwrap().starts_with("note: found 2 IP allocations without an explicit node"));
    }

    #[test]
    fn forecast_span_has_largest_fitting_unit() {
        let spans =
            [(0, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (86_400, "24 hours"), (604_800, "7 days")];
        for (seconds, expected) in spans {
            assert_eq!(span(seconds), expected);
        }
    }

    #[test]
    fn forecast_has_words_for_each_future() {
        let words = |ahead| {
            let (per_day, full_in) = forecast_words(ahead);
            format!("{per_day}|{full_in}")
        };
        assert_eq!(words(FillForecast::Filling { days: 3.5, per_day: 20.04 }), "20.0|3 days");
        assert_eq!(words(FillForecast::Filling { days: 4000.0, per_day: 0.01 }), "0.0|over 10 years");
        assert_eq!(
            (words(FillForecast::Full), words(FillForecast::Steady)),
            ("|full".to_owned(), "|not filling".to_owned())
        );
    }
}
