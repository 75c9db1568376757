//! Shows the past events of an address, a handle, a container or a node, for the command `margay ipam history`. This
//! module also formats events as text for the commands `margay ipam history` and `margay watch`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::SystemTime;

use async_trait::async_trait;
use clap::Args;
use ipam_core::timestamps::rfc3339;
use ipam_operator::events::{AddressHolder, EventRow, of_batch, of_listed};
use ipam_operator::history::{HistoryOf, time_of};
use kv::{Batch, Kv, Range, Revision};
use serde::Serialize;
use time::OffsetDateTime;

use crate::command::{CommandAnswer, StoreCommand};
use crate::error::CommandResult;
use crate::follow::{FollowStart, Follower, HistoryPart};
use crate::output::{Column, Columns, TableRow, printable, table};
use crate::store::StoreAccess;
use crate::times::{SinceTime, utc_and_local};

pub(crate) const HELP: &str = "\
The first line says how far back the store can be read; what is older is gone. On etcd no times are kept: those
shown are what the nodes recorded, and a release has none.

Examples:
  margay ipam history 10.65.0.5
  margay ipam history mynet.0a1b2c
  margay ipam history node1 --since 2h
  margay ipam history 10.65.0.5 --since 2026-11-21T10:00:00Z -o json";

/// The arguments of `ipam history`.
#[derive(Debug, Args)]
pub(crate) struct ShowHistory {
    /// Address, handle, container ID or node whose history is shown
    #[arg(value_name = "ADDRESS|HANDLE|NODE")]
    pub(crate) subject: String,

    /// Leave out events before this time, or older than this duration: 90s, 15m, 2h, 3d
    #[arg(long, value_name = "TIME|DURATION")]
    pub(crate) since: Option<SinceTime>,
}

#[derive(Debug, Serialize)]
struct HistoryReport {
    subject: String,
    store: String,
    /// The oldest revision that the store has not compacted.
    oldest_revision: i64,
    oldest_time: Option<String>,
    /// The newest revision of the store up to which events were read.
    newest_revision: i64,
    /// The ranges of revisions that the store compacted while they were being read.
    given_up: Vec<HistoryGap>,
    events: Vec<EventRow>,
}

#[derive(Debug, Serialize)]
struct HistoryGap {
    after_revision: i64,
    up_to_revision: i64,
}

#[async_trait(?Send)]
impl StoreCommand for ShowHistory {
    fn progress_text(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let subject = HistoryOf::from(self.subject.as_str());
        let mut report = HistoryReport {
            subject: self.subject.clone(),
            store: at.to_string(),
            oldest_revision: 0,
            oldest_time: None,
            newest_revision: 0,
            given_up: Vec::new(),
            events: Vec::new(),
        };
        for range in subject.ranges() {
            if report.events.is_empty() {
                report.read(at, &subject, range).await?;
            }
        }
        if let Some(since) = self.since {
            report.drop_before(since.time(OffsetDateTime::now_utc()));
        }
        report.answer()
    }
}

impl HistoryReport {
    /// Reads those events that concern the `subject`, from a range of keys.
    async fn read(&mut self, at: StoreAccess<'_>, subject: &HistoryOf, range: Range) -> CommandResult<()> {
        let follower = Follower::new(at, range.clone(), FollowStart::Oldest).await;
        let is_served = follower.is_served();
        match self.read_with(follower, subject).await {
            // Reading the history may have failed because the store's daemon has ended, so the history is read again
            // without the daemon.
            Err(_) if is_served => {
                self.events.clear();
                self.given_up.clear();
                self.read_with(Follower::new(at, range, FollowStart::Oldest).await, subject).await
            }
            done => done,
        }
    }

    async fn read_with(&mut self, mut follower: Follower<'_>, subject: &HistoryOf) -> CommandResult<()> {
        let read = loop {
            match follower.read().await {
                Ok(parts) => {
                    if parts.into_iter().any(|part| self.add_part(subject, part)) {
                        break Ok(());
                    }
                }
                Err(stop) => break Err(stop.into()),
            }
        };
        let closed = follower.close().await;
        read.and(closed)
    }

    /// Adds a part of the store's history to the report. Returns true if `part` was the last part of the history.
    fn add_part(&mut self, subject: &HistoryOf, part: HistoryPart) -> bool {
        match part {
            HistoryPart::Begins(oldest, time) => {
                self.oldest_revision = oldest.get();
                self.oldest_time = time.map(|time| rfc3339(time.into()));
            }
            HistoryPart::Listed(at, kvs) => self.add_listed(subject, at, &kvs),
            HistoryPart::Happened(batches) => batches.iter().for_each(|batch| self.add_changes(subject, batch)),
            HistoryPart::GivenUp(after, up_to) => {
                self.given_up.push(HistoryGap { after_revision: after.get(), up_to_revision: up_to.get() });
            }
            HistoryPart::Interrupted(_) => {}
            HistoryPart::Reached(newest) => {
                self.newest_revision = newest.get();
                return true;
            }
        }
        false
    }

    fn add_listed(&mut self, subject: &HistoryOf, at: Revision, kvs: &[Kv]) {
        for kv in kvs {
            let reported = of_listed(&kv.key, kv.value.as_bytes()).unwrap_or_default();
            let concerned = reported.iter().filter(|block_event| subject.concerns(block_event));
            self.events.extend(concerned.map(|block_event| EventRow::listed(at, block_event)));
        }
    }

    fn add_changes(&mut self, subject: &HistoryOf, batch: &Batch) {
        let reported = of_batch(batch);
        let concerned = reported.block_events.iter().filter(|block_event| subject.concerns(block_event));
        let time = |time: Option<SystemTime>, block_event: &ipam_operator::events::BlockEvent| {
            time_of(time, &block_event.what)
        };
        self.events.extend(
            concerned.map(|block_event| EventRow::happened(batch.revision, time(batch.time, block_event), block_event)),
        );
    }

    /// Removes all events before the time `since`, except the last event of each address and block that was in use at
    /// that time. An event without a time is removed only if a later event has a time before `since`.
    fn drop_before(&mut self, since: OffsetDateTime) {
        let is_older = |row: &EventRow| row.time.is_some_and(|time| time < since);
        let from = self.events.iter().rposition(is_older).map_or(0, |last| last + 1);
        let newer = self.events.split_off(from);
        let mut standing: BTreeMap<String, EventRow> = BTreeMap::new();
        for row in self.events.drain(..) {
            standing.insert(row.place(), row);
        }
        self.events.extend(standing.into_values().filter(EventRow::is_standing));
        self.events.sort_by_key(|row| row.revision);
        self.events.extend(newer);
    }

    fn answer(&self) -> CommandResult<CommandAnswer> {
        let mut answer = CommandAnswer::new(self.text(), self)?;
        for HistoryGap { after_revision, up_to_revision } in &self.given_up {
            answer = answer.note(format!(
                "what happened after revision {after_revision}, up to revision {up_to_revision}, was given up by the \
                 store while it was read; it goes on with what there was then"
            ));
        }
        Ok(answer)
    }

    fn text(&self) -> String {
        let time = self.oldest_time.as_ref().map(|time| format!(", of {time}")).unwrap_or_default();
        let mut text = format!("the store can be read back to revision {}{time}\n", self.oldest_revision);
        if self.events.is_empty() {
            _ = writeln!(text, "since then nothing is known of {}", printable(&self.subject));
            return text;
        }
        text + &table(&self.events)
    }
}

impl TableRow for EventRow {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("REVISION"), |row| row.revision.to_string()),
            (Column::Text("TIME (UTC)"), |row| times(row).0),
            (Column::Text("LOCAL TIME"), |row| times(row).1),
            (Column::Text("EVENT"), |row| row.event.to_owned()),
            (Column::Text("ADDRESS"), |row| row.address.map(|_| row.place()).unwrap_or_default()),
            (Column::Text("WHO"), EventRow::who),
            (Column::Text("NODE"), EventRow::node),
            (Column::Text("BLOCK"), |row| row.block.to_string()),
        ]
    }
}

/// Returns the time of an event in UTC and in this machine's time zone.
fn times(row: &EventRow) -> (String, String) {
    row.time.map_or_else(|| ("unknown".to_owned(), String::new()), |time| utc_and_local(time).into())
}

/// Describes an event of an address or a block as text.
pub(crate) trait DescribeEvent {
    /// True if, after the event, the address has a holder or the block has an owner.
    fn is_standing(&self) -> bool;
    /// Returns the holder of the address, or the owner of the block. If the event changed the holder or owner, the text
    /// also has the former holder or owner.
    fn who(&self) -> String;
    fn node(&self) -> String;
    /// Returns the address of the event, or the block if the event concerns no single address.
    fn place(&self) -> String;
    /// Returns a description of the event in one line.
    fn line(&self) -> String;
}

impl DescribeEvent for EventRow {
    fn is_standing(&self) -> bool {
        ["assigned", "held", "renewed", "moved", "claimed", "owned"].contains(&self.event)
    }

    fn who(&self) -> String {
        match (&self.holder, &self.from, &self.owner, &self.former_owner, self.state) {
            (Some(to), Some(from), ..) => format!("{}, before {}", text(to), text(from)),
            (Some(holder), ..) => text(holder),
            (None, _, Some(owner), _, Some(state)) => format!("{} {state}", printable(owner)),
            (None, _, Some(owner), Some(former), None) => format!("{}, before {}", printable(owner), printable(former)),
            (None, _, Some(owner), ..) => printable(owner),
            _ => String::new(),
        }
    }

    fn node(&self) -> String {
        self.holder.as_ref().and_then(|holder| holder.node.as_deref()).map(printable).unwrap_or_default()
    }

    fn place(&self) -> String {
        match (self.address, self.prefix_length) {
            (Some(address), Some(length)) => format!("{address}/{length}"),
            (Some(address), None) => address.to_string(),
            (None, _) => self.block.to_string(),
        }
    }

    fn line(&self) -> String {
        let time = self.time.map_or_else(|| format!("revision {}", self.revision), rfc3339);
        let (place, who, node) = (self.place(), self.who(), self.node());
        let node = if node.is_empty() { node } else { format!("  on {node}") };
        format!("{time:<20}  {:<8}  {place:<18}  {who}{node}", self.event).trim_end().to_owned()
    }
}

fn text(holder: &AddressHolder) -> String {
    let handle = holder.handle.as_deref().unwrap_or("no handle");
    let interface = holder.interface.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
    let pod = match (&holder.namespace, &holder.pod) {
        (Some(namespace), Some(pod)) => format!(" (pod {namespace}/{pod})"),
        (None, Some(pod)) => format!(" (pod {pod})"),
        _ => String::new(),
    };
    printable(&format!("{handle}{interface}{pod}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ipam_core::model::{Attribute, Block, Owner};
    use ipam_operator::events::BlockEvent;
    use kv::Revision;
    use serde_json::json;
    use time::macros::datetime;

    use super::*;

    fn block_events(pod: &str) -> Vec<BlockEvent> {
        let attributes = [
            ("node", "node1"),
            ("margay.io/net", "net"),
            ("margay.io/ifname", "eth0"),
            ("namespace", "shop"),
            ("pod", pod),
        ];
        let attributes: BTreeMap<_, _> = attributes.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let at = datetime!(2026-11-21 10:00 UTC);
        let cidr = "10.0.0.0/30".parse().unwrap();
        let mut block = Block::new(cidr, Some(&Owner::host("node1")), at, None).unwrap();
        block.assign_specific("10.0.0.1".parse().unwrap(), &Attribute::new(Some("net.c1"), attributes)).unwrap();
        ipam_operator::events::of_block(cidr, None, Some(&block))
    }

    #[test]
    fn history_shows_assignment_and_claim_as_line_and_json() {
        let found = block_events("web");
        let at = datetime!(2026-11-21 10:00:00.7 UTC);
        let rows: Vec<EventRow> = found.iter().map(|one| EventRow::happened(Revision::new(7), Some(at), one)).collect();
        assert_eq!(rows[0].line(), "2026-11-21T10:00:00Z  claimed   10.0.0.0/30         host:node1");
        let line = "2026-11-21T10:00:00Z  assigned  10.0.0.1            net.c1 eth0 (pod shop/web)  on node1";
        assert_eq!(rows[1].line(), line);
        let expected = json!({
            "revision": 7, "time": "2026-11-21T10:00:00Z", "event": "assigned", "address": "10.0.0.1",
            "block": "10.0.0.0/30", "handle": "net.c1", "node": "node1", "network": "net", "container": "c1",
            "interface": "eth0", "namespace": "shop", "pod": "web",
        });
        assert_eq!(serde_json::to_value(&rows[1]).unwrap(), expected);
        let expected =
            json!({"revision": 7, "time": null, "event": "owned", "block": "10.0.0.0/30", "owner": "host:node1"});
        let mut listed = serde_json::to_value(EventRow::listed(Revision::new(7), &found[0])).unwrap();
        assert_eq!(listed["time"].take(), json!("2026-11-21T10:00:00Z"), "as the block records it");
        assert_eq!(listed, expected);
    }

    #[test]
    fn history_escapes_stored_text_for_terminal() {
        let row = EventRow::listed(Revision::new(7), &block_events("\u{1b}[2J")[1]);
        assert_eq!(
            row.line(),
            "revision 7            held      10.0.0.1            net.c1 eth0 (pod shop/\\u{1b}[2J)  on node1"
        );
    }
}
