//! Prints an event for each address that is assigned or released, for the command `margay watch`.
//!
//! Event lines are printed after the store is closed, so that a slow reader of stdout blocks no other process.

use std::io::Write;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use datastore::OpenStore;
use ipam_core::model::keys;
use ipam_operator::Operator;
use ipam_operator::events::{BlockEvent, EventRow, of_batch, of_listed};
use ipam_operator::history::{HistoryOf, time_of};
use ipnet::IpNet;
use kv::{Deadline, Range, Revision};
use serde::Serialize;
use tokio::task::block_in_place;

use crate::command::{Format, Invocation, StandaloneCommand, watch_runtime};
use crate::error::{CommandFailure, CommandResult};
use crate::follow::{FollowStart, FollowStop, Follower, HistoryPart};
use crate::hook::{CursorFile, Delivery, DeliveryOutcome, Hook};
use crate::interrupt::{INTERRUPTED, Interrupt};
use crate::output::yaml;
use crate::store::{StoreAccess, StoreUse};
use crate::subcommands::history::DescribeEvent;
use crate::times::parse_duration;
use crate::transfer::read_identity;

pub(crate) const HELP: &str = "\
One line for each address that is assigned or released, and each block that is
claimed or released; with -o json one object a line. It ends with Ctrl-C (130).

With --cursor no event is lost while this command is not running. An event may
come twice, and a \"gap\" says that the store has removed history.

Examples:
  margay watch --node node1 --pool main --for 10m
  margay watch --list -o json | jq -r 'select(.event == \"assigned\") | .address'
  margay watch --exec ./dns-hook --cursor /var/lib/margay/dns.cursor
  margay watch --webhook https://ipam.example/events --webhook-secret hook.key";

/// The arguments of `watch`.
#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// Show only events of this node
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Show only events in this pool
    #[arg(long, value_name = "NAME")]
    pub(crate) pool: Option<String>,

    /// First list the addresses that are in use now, then show changes
    #[arg(long)]
    pub(crate) list: bool,

    /// Exit after this number of lines
    #[arg(long, value_name = "N")]
    pub(crate) count: Option<NonZeroU64>,

    /// Run this program for each event, with the event as JSON on its stdin
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) exec: Option<PathBuf>,

    /// Post each event as JSON to this URL; retry until the status is 2xx
    #[arg(long, value_name = "URL", conflicts_with = "exec")]
    pub(crate) webhook: Option<String>,

    /// Sign webhook requests with the secret in this file
    #[arg(long, value_name = "FILE", requires = "webhook")]
    pub(crate) webhook_secret: Option<PathBuf>,

    /// Retry if the program or request takes longer than this
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "60s")]
    pub(crate) attempt_timeout: Duration,

    /// File that records the last handled event; the next run resumes there
    #[arg(long, value_name = "FILE")]
    pub(crate) cursor: Option<PathBuf>,

    /// Exit after this time, such as 30s or 10m
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) time: Option<Duration>,
}

/// Time limit of reading the CIDR of a pool from the store.
const POOL_READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two polls for store changes.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl StandaloneCommand for Watch {
    /// Watches the store until a signal arrives or until the time or number of events in the arguments is reached.
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let location = invocation.choose()?.location;
        let interrupt = Interrupt::listen()?;
        let at = invocation.store_at(&location);
        watch_runtime()?.block_on(watch(self, at, &interrupt, invocation))
    }
}

async fn watch(
    args: &Watch,
    at: StoreAccess<'_>,
    interrupt: &Interrupt,
    invocation: &mut Invocation<'_>,
) -> CommandResult<u8> {
    let pool = match &args.pool {
        Some(name) => Some(read_pool_network(at, name).await?),
        None => None,
    };
    let left = args.count.map_or(u64::MAX, NonZeroU64::get);
    let hook = match (&args.exec, &args.webhook) {
        (Some(program), _) => Some(Hook::program(program, args.attempt_timeout)?),
        (_, Some(url)) => Some(Hook::webhook(url, args.webhook_secret.as_deref(), args.attempt_timeout)?),
        _ if args.cursor.is_some() => {
            return Err(CommandFailure::new("--cursor needs --exec or --webhook")
                .hint("add --exec or --webhook: a cursor records which events a program or webhook has handled"));
        }
        _ => None,
    };
    let cursor = match &args.cursor {
        Some(path) => Some(CursorFile::load(path, &read_store_id(at).await?)?),
        None => None,
    };
    let start = match cursor.as_ref().map(CursorFile::revision) {
        Some(Some(revision)) => FollowStart::After(revision),
        Some(None) => FollowStart::Newest,
        None if args.list => FollowStart::Newest,
        None => FollowStart::Next,
    };
    let node = args.node.clone().map(HistoryOf::Node);
    let mut printer = EventPrinter {
        node,
        pool,
        format: invocation.options.output,
        left,
        begins_with_state: start == FollowStart::Newest,
        finishes_list: false,
        ends_list: false,
        hook,
        cursor,
        deliveries: Vec::new(),
        handled: None,
        out: invocation.out,
        err: invocation.err,
    };
    let mut follower = Follower::new(at, Range::Prefix(keys::ipam_prefix()), start).await;
    let until = args.time.map(|time| Instant::now() + time);
    let done = follow(&mut follower, &mut printer, at, interrupt, until).await;
    let closed = follower.close().await;
    let finished = printer.cursor.as_mut().map_or(Ok(()), CursorFile::finish);
    let code = done?;
    closed?;
    finished?;
    Ok(code)
}

async fn follow(
    follower: &mut Follower<'_>,
    printer: &mut EventPrinter<'_>,
    at: StoreAccess<'_>,
    interrupt: &Interrupt,
    until: Option<Instant>,
) -> CommandResult<u8> {
    // The addresses in use at the start are printed even if the time limit of the watch has already passed.
    let (mut is_current, mut may_end) = (false, false);
    loop {
        if interrupt.came() {
            return Ok(INTERRUPTED);
        }
        if may_end && until.is_some_and(|until| Instant::now() >= until) {
            return Ok(0);
        }
        if is_current && !follower.is_worth_reading().await? {
            tokio::time::sleep(POLL_INTERVAL).await;
            continue;
        }
        for part in follower.read().await.map_err(|stop| printer.record_stop(stop))? {
            is_current = matches!(part, HistoryPart::Reached(_));
            may_end |= matches!(part, HistoryPart::Reached(_) | HistoryPart::Interrupted(_));
            if matches!(part, HistoryPart::Interrupted(_)) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            printer.print_part(at, part)?;
            match printer.deliver(follower, interrupt, until)? {
                DeliveryOutcome::Done => {}
                DeliveryOutcome::Interrupted => return Ok(INTERRUPTED),
                DeliveryOutcome::Late => {
                    return Err(CommandFailure::new("the time is over, and not all events were handled")
                        .hint("add --cursor FILE, so that the next run resumes after the last handled event"));
                }
            }
            if printer.left == 0 && !printer.finishes_list {
                return Ok(0);
            }
        }
    }
}

/// Reads the id of a store, for the cursor file.
async fn read_store_id(at: StoreAccess<'_>) -> CommandResult<String> {
    let open = at.open(StoreUse::Read).await?;
    at.run_and_close(open, async |open: &OpenStore| Ok(read_identity(at, open).await?.id)).await
}

async fn read_pool_network(at: StoreAccess<'_>, name: &str) -> CommandResult<IpNet> {
    let read =
        async |operator: &Operator| Ok(operator.ipam().inventory(Deadline::after(POOL_READ_TIMEOUT)).await?.pools);
    let pools = at.with_operator(StoreUse::Read, read).await?;
    let pool = pools.iter().find(|pool| pool.name() == name).map(|pool| pool.cidr());
    pool.ok_or_else(|| {
        CommandFailure::new(format!("there is no pool {name}")).hint("list the pools with: margay pool list")
    })
}

/// Prints the events that the arguments of `margay watch` select, or passes these events to the hook.
struct EventPrinter<'a> {
    node: Option<HistoryOf>,
    pool: Option<IpNet>,
    format: Format,
    /// The number of event lines that may still be printed.
    left: u64,
    /// True if the watch starts with a list of the addresses in use.
    begins_with_state: bool,
    /// True while the list of addresses in use is not complete. The revision in the cursor file is not changed before
    /// the list of addresses in use is complete.
    finishes_list: bool,
    /// True if the list of addresses in use is complete, but the cursor file has not been written since.
    ends_list: bool,
    hook: Option<Hook>,
    cursor: Option<CursorFile>,
    /// Events that have not yet been delivered through the hook.
    deliveries: Vec<Delivery>,
    /// The revision up to which all events are handled once the hook has delivered `deliveries`.
    handled: Option<Revision>,
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
}

/// An event that reports that the store compacted a part of its history before the watch could read it.
#[derive(Serialize)]
struct GapEvent {
    event: &'static str,
    after_revision: i64,
    up_to_revision: i64,
}

impl GapEvent {
    fn new(after: Revision, up_to: Revision) -> Self {
        Self { event: "gap", after_revision: after.get(), up_to_revision: up_to.get() }
    }
}

impl EventPrinter<'_> {
    fn print_part(&mut self, store: StoreAccess<'_>, part: HistoryPart) -> CommandResult<()> {
        match part {
            HistoryPart::Begins(at, _) => {
                self.note(&format!("watching {store} from revision {at} on"));
                if self.begins_with_state && self.hook.is_some() {
                    // The receiver may still have an outdated list of addresses in use from an earlier watch.
                    self.queue_gap(Revision::UNSET, at)?;
                }
            }
            HistoryPart::Listed(at, kvs) => {
                self.finishes_list = self.cursor.is_some();
                let reported = kvs.iter().filter_map(|kv| of_listed(&kv.key, kv.value.as_bytes())).flatten();
                reported
                    .map(|one| (one, at))
                    .try_for_each(|(one, at)| self.print_event(&one, || EventRow::listed(at, &one)))?;
            }
            HistoryPart::Happened(batches) => {
                for batch in batches {
                    if self.left == 0 {
                        break;
                    }
                    let (reported, at) = (of_batch(&batch), batch.revision);
                    let row = |one: &BlockEvent| EventRow::happened(at, time_of(batch.time, &one.what), one);
                    reported.block_events.iter().try_for_each(|one| self.print_event(one, || row(one)))?;
                    if let Some(last) = self.deliveries.last_mut() {
                        last.completes = Some(at);
                    }
                    self.handled = Some(at);
                }
            }
            HistoryPart::GivenUp(after, up_to) => self.report_gap(after, up_to)?,
            HistoryPart::Interrupted(why) => self.note(&format!("{why}; going on as soon as it can be reached")),
            HistoryPart::Reached(at) => {
                self.handled = Some(at);
                self.ends_list |= std::mem::take(&mut self.finishes_list);
            }
        }
        self.out.flush()?;
        Ok(())
    }

    fn deliver(
        &mut self,
        follower: &mut Follower<'_>,
        interrupt: &Interrupt,
        until: Option<Instant>,
    ) -> CommandResult<DeliveryOutcome> {
        let Some(hook) = &self.hook else { return Ok(DeliveryOutcome::Done) };
        let (handled, deliveries) = (self.handled.take(), std::mem::take(&mut self.deliveries));
        let must_save = std::mem::take(&mut self.ends_list) || !deliveries.is_empty();
        for delivery in deliveries {
            let failed = |note: &str| {
                _ = writeln!(self.err, "note: {note}");
                follower.pause();
            };
            // `block_in_place` lets another thread read the watch while the hook runs. A store cancels a watch that is
            // not read, and the watch's later events are then lost.
            match block_in_place(|| hook.deliver(&delivery, interrupt, until, failed)) {
                DeliveryOutcome::Done => {}
                ended => return Ok(ended),
            }
            if let (Some(cursor), Some(at)) = (&mut self.cursor, delivery.completes) {
                cursor.save(at)?;
            }
        }
        match (&mut self.cursor, handled) {
            (Some(cursor), Some(at)) if must_save => cursor.save(at)?,
            (Some(cursor), Some(at)) => cursor.reach(at)?,
            _ => {}
        }
        Ok(DeliveryOutcome::Done)
    }

    /// Prints an event if the arguments of the command select it.
    fn print_event(&mut self, block_event: &BlockEvent, row: impl FnOnce() -> EventRow) -> CommandResult<()> {
        let is_wanted = self.node.as_ref().is_none_or(|node| node.concerns(block_event))
            && self.pool.is_none_or(|pool| pool.contains(&block_event.block.network()));
        // With a cursor file, `--count` lets the watch finish the current revision or list, because the cursor file can
        // only record complete ones.
        if !is_wanted || (self.left == 0 && self.cursor.is_none()) {
            return Ok(());
        }
        self.left = self.left.saturating_sub(1);
        let row = row();
        if self.hook.is_some() {
            let address = row.address.map_or_else(|| row.block.to_string(), |address| address.to_string());
            return self.queue(&row, format!("{} {address} at revision {}", row.event, row.revision));
        }
        match self.format {
            Format::Table | Format::Wide => Ok(writeln!(self.out, "{}", row.line())?),
            Format::Json | Format::Yaml => self.print_document(&row),
        }
    }

    /// Reports that a part of the store's history is missing. A gap in the watched history is reported as a note on
    /// stderr, and in JSON and YAML also as an event.
    fn report_gap(&mut self, after: Revision, up_to: Revision) -> CommandResult<()> {
        self.note(&format!(
            "what happened after revision {after}, up to revision {up_to}, was given up by the store before it was \
             read; what is in use at revision {up_to} follows"
        ));
        match self.format {
            _ if self.hook.is_some() => self.queue_gap(after, up_to),
            Format::Table | Format::Wide => Ok(()),
            Format::Json | Format::Yaml => self.print_document(&GapEvent::new(after, up_to)),
        }
    }

    fn queue_gap(&mut self, after: Revision, up_to: Revision) -> CommandResult<()> {
        self.queue(&GapEvent::new(after, up_to), format!("a gap up to revision {up_to}"))
    }

    /// If the watch cannot continue at the cursor because the store was replaced or reset, records the reason in the
    /// cursor file.
    fn record_stop(&mut self, stop: FollowStop) -> CommandFailure {
        if let (FollowStop::OtherStore(why), Some(cursor)) = (&stop, &mut self.cursor)
            && let Err(unwritten) = cursor.refuse(why.message())
        {
            self.note(unwritten.message());
        }
        stop.into()
    }

    /// Queues an event that the hook is to deliver.
    fn queue(&mut self, event: &impl Serialize, name: String) -> CommandResult<()> {
        let json = serde_json::to_string(event).map_err(|error| CommandFailure::new(format!("JSON: {error}")))?;
        self.deliveries.push(Delivery { json, name, completes: None });
        Ok(())
    }

    /// Prints an event as a line of JSON or as a YAML document.
    fn print_document(&mut self, what: &impl Serialize) -> CommandResult<()> {
        let failed = |error| CommandFailure::new(format!("JSON: {error}"));
        match self.format {
            Format::Yaml => Ok(write!(self.out, "---\n{}", yaml(&serde_json::to_value(what).map_err(failed)?))?),
            _ => Ok(writeln!(self.out, "{}", serde_json::to_string(what).map_err(failed)?)?),
        }
    }

    fn note(&mut self, text: &str) {
        _ = writeln!(self.err, "note: {text}");
    }
}
