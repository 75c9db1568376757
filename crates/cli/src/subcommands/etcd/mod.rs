//! Shows how full an etcd cluster is and which program compacts its history, and compacts the history, for the command
//! `margay etcd`.

mod plan;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use clap::{Args, Subcommand};
use datastore::{
    ClusterDescription, ClusterProblemKind, ClusterStore, DEFAULT_QUOTA_BYTES, Location, MAX_QUOTA_PERCENT_IN_USE,
    MemberReport, MemberRole, OpenStore,
};
use indicatif::{HumanBytes, HumanDuration};
use ipam_core::samples::{Samples, oldest_revision};
use ipam_core::timestamps::rfc3339;
use ipam_operator::compaction::{
    self, COMPACTION_KEY, CompactionMark, CompactionOutcome, MemberSize, compact_older, time_after,
};
use ipam_operator::inspect::Finding;
use kv::{Revision, Store, StoreExt};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

pub(crate) use self::plan::EtcdPlan;
use crate::command::{CommandAnswer, Format, Invocation, StandaloneCommand, StoreCommand, runtime};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, Columns, TableRow, printable, table};
use crate::private_file::{read_private, write_private};
use crate::store::{StoreAccess, StoreUse};
use crate::times::parse_duration;

pub(crate) const HELP: &str = "\
An etcd keeps every change until its history is compacted, and refuses all
changes when its quota is used up.

Examples:
  margay etcd status
  margay etcd compact --keep 10m
  margay etcd plan --nodes 100 --pods-per-node 30 --churn 20";

/// Parses a duration of at least one second.
fn parse_nonzero_duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).and_then(|interval| match interval.is_zero() {
        true => Err("at least 1s".to_owned()),
        false => Ok(interval),
    })
}

/// The role of a member that has not answered.
const NO_ANSWER: &str = "no answer";

/// Commands about an etcd cluster.
#[derive(Debug, Subcommand)]
pub(crate) enum EtcdSubcommand {
    /// Show each member's database size and quota, the age of the oldest history, and which program compacts it
    #[command(after_help = "\
Examples:
  margay etcd status
  margay etcd status --watch 10s
  margay etcd status -o json | jq '.members[] | {endpoint, percent}'

etcd before 3.6 tells its quota only among its metrics; where these are not served to clients, pass --quota.")]
    Status(EtcdStatus),
    /// Delete history older than --keep, unless another program already deletes it
    #[command(after_help = "\
Examples:
  margay etcd compact
  margay etcd compact --keep 0s

Run it from a timer (margay-compact.timer does), on as many nodes as you like: each run notes the newest revision
number, and a later run deletes the history before it. The nodes, kube-apiserver and Calico's kube-controllers share
one key, so that only one of them compacts. --keep 0s deletes the whole history at once, also if another program
compacts. The members' files do not shrink: etcd uses the space again, and only etcdctl defrag --cluster gives it back
to the disk.")]
    Compact(EtcdCompact),
    /// Estimate the database size of an etcd cluster from the number of nodes and pods and the rate of changes
    #[command(after_help = plan::HELP)]
    Plan(EtcdPlan),
}

#[derive(Debug, Args)]
pub(crate) struct EtcdStatus {
    /// Repeat the status at this interval, until interrupted
    #[arg(long, value_name = "TIME", value_parser = parse_nonzero_duration)]
    watch: Option<Duration>,

    /// Database quota of each member in bytes [default: as the member reports, else 2147483648]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1 << 20..))]
    quota: Option<u64>,

    /// Folder in which `margay etcd` saves revision numbers and database sizes for its next run
    #[arg(long, hide = true, value_name = "DIR", default_value = "/run/margay")]
    notes: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct EtcdCompact {
    /// Keep all history younger than TIME
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
    keep: Duration,

    /// Compact every etcd cluster that the CNI configuration names; do nothing if there is none
    #[arg(long)]
    all_stores: bool,

    /// Folder in which `margay etcd` saves revision numbers and database sizes for its next run
    #[arg(long, hide = true, value_name = "DIR", default_value = "/run/margay")]
    notes: PathBuf,
}

/// Facts about a cluster that `margay etcd` saves on this machine for its next run.
#[derive(Default, Serialize, Deserialize)]
struct EtcdNotes {
    compaction: Option<CompactionMark>,
    /// The oldest readable revision after the last compaction by this machine.
    compacted_to: Option<i64>,
    size: Option<SizeSample>,
}

/// The size of a cluster's database at one point in time.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct SizeSample {
    /// The time of the measurement, in seconds since 1970.
    at: u64,
    bytes_in_use: u64,
    oldest_revision: i64,
}

impl EtcdNotes {
    fn path(folder: &Path, cluster: u64) -> PathBuf {
        folder.join(format!("etcd-{cluster:016x}.json"))
    }

    /// Reads the notes about a cluster; they are empty if there are none.
    fn read(path: &Path) -> Self {
        read_private(path).unwrap_or_default()
    }
}

/// Returns the findings of `margay ipam check` about the sizes of a cluster's members and about its history.
pub(crate) async fn find_in_cluster(at: StoreAccess<'_>, newest: Revision) -> CommandResult<Vec<Finding>> {
    with_cluster(at, async |store, cluster| {
        let size_of = |report: MemberReport| {
            // The advice of the finding names the next steps.
            let problems = report.description.iter().flat_map(|about| &about.problems);
            let problems = problems.map(|problem| problem.text.clone()).collect();
            let row = MemberRow::of(report, None);
            MemberSize {
                endpoint: row.endpoint,
                bytes: row.bytes.unwrap_or_default(),
                bytes_in_use: row.bytes_in_use.unwrap_or_default(),
                quota_bytes: row.quota_bytes,
                problems,
            }
        };
        let sizes: Vec<MemberSize> = cluster.members().await?.into_iter().map(size_of).collect();
        let now = OffsetDateTime::now_utc();
        compaction::find_in_cluster(store, newest, &sizes, MAX_QUOTA_PERCENT_IN_USE, now).await
    })
    .await
}

/// Adds the sizes of a cluster's members to the metrics. The metrics omit members that do not answer.
pub(crate) async fn sample_members(at: StoreAccess<'_>, samples: &mut Samples) -> CommandResult<()> {
    let reports = with_cluster(at, async |_, cluster| cluster.members().await).await?;
    for row in reports.into_iter().map(|report| MemberRow::of(report, None)).filter(|row| row.role != NO_ANSWER) {
        let (bytes, in_use) = (row.bytes.unwrap_or_default(), row.bytes_in_use.unwrap_or_default());
        samples.of_member(&row.endpoint, bytes, in_use, row.quota_bytes, row.problems.len());
    }
    Ok(())
}

/// Opens a cluster, calls `work` with the open store, and closes the store. Explains a store error of `work` to the user.
async fn with_cluster<T>(
    at: StoreAccess<'_>,
    work: impl AsyncFnOnce(&dyn Store, &dyn ClusterStore) -> kv::Result<T>,
) -> CommandResult<T> {
    run_on_cluster(at, async |store, cluster| work(store, cluster).await.map_err(|error| at.explain(error))).await
}

/// Opens a cluster, calls `work` with the open store, and closes the store.
async fn run_on_cluster<T>(
    at: StoreAccess<'_>,
    work: impl AsyncFnOnce(&dyn Store, &dyn ClusterStore) -> CommandResult<T>,
) -> CommandResult<T> {
    check_cluster(at.location)?;
    let open = at.open_files(StoreUse::Read).await?;
    at.run_and_close(open, async |open: &OpenStore| {
        let Some(cluster) = open.cluster() else { return Err(CommandFailure::new(format!("{at} is no cluster"))) };
        work(&*open.store(), &*cluster).await
    })
    .await
}

fn check_cluster(location: &Location) -> CommandResult<()> {
    if location.is_shared() {
        return Ok(());
    }
    Err(CommandFailure::new(format!("{location} is not a cluster")).hint(
        "an embedded store deletes old history itself; `margay store status` shows its size, and \
         `margay store compact` deletes old revisions at once",
    ))
}

impl StandaloneCommand for EtcdCompact {
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        if !self.all_stores {
            return invocation.run_on_store(self);
        }
        let stores = invocation.choose_all()?;
        let mut failed = 0;
        for chosen in stores.iter().filter(|chosen| chosen.location.is_shared()) {
            let at = invocation.store_at(&chosen.location);
            let answer = runtime()?.block_on(StoreCommand::run(self, at));
            if let Err(failure) = answer.and_then(|answer| invocation.print(answer)) {
                // An unreachable cluster must not keep the other clusters from being compacted.
                failure.print(invocation.err);
                failed = 1;
            }
        }
        Ok(failed)
    }
}

#[async_trait(?Send)]
impl StoreCommand for EtcdCompact {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let compacted = run_on_cluster(at, async |store, cluster| {
            let about = cluster.about().await.map_err(|error| at.explain(error))?;
            let path = EtcdNotes::path(&self.notes, about.cluster);
            let mut notes = EtcdNotes::read(&path);
            // Nothing is deleted unless the revision for the next run can be recorded. Only `--keep 0s` needs no record.
            let is_writable = write_private(&path, &notes);
            is_writable.or_else(|error| if self.keep.is_zero() { Ok(()) } else { Err(error) }).map_err(|error| {
                let folder = self.notes.display();
                CommandFailure::new(format!("cannot record the newest revision number in {folder}: {error}")).hint(
                    "run the command as root, so that it can record the newest revision number in a file; a later run \
                     compacts up to that number",
                )
            })?;
            let compacted = compact_older(store, notes.compaction.take(), self.keep, SystemTime::now()).await;
            let (outcome, mark) = compacted.map_err(|error| at.explain(error))?;
            notes.compaction = Some(mark);
            if let CompactionOutcome::Compacted { oldest } = outcome {
                notes.compacted_to = Some(oldest.get());
            }
            // If the folder is not writable now, the next run only starts with a new record.
            _ = write_private(&path, &notes);
            Ok((about, outcome))
        });
        let (about, outcome) = compacted.await?;
        let keep = self.keep.as_secs();
        let (outcome, revision, text) = match outcome {
            CompactionOutcome::Compacted { oldest } => (
                "compacted",
                Some(oldest),
                format!("Successfully compacted {at}: the history before revision {oldest} is deleted"),
            ),
            CompactionOutcome::Noted { newest } => (
                "noted",
                Some(newest),
                format!("Noted revision {newest} of {at}: a run after {keep} s or more deletes the history before it"),
            ),
            CompactionOutcome::TooEarly { noted_seconds_ago: ago } => (
                "too-early",
                None,
                format!(
                    "Nothing to do: the newest revision number of {at} was noted {ago} s ago, and {keep} s are kept"
                ),
            ),
            CompactionOutcome::OtherCompactor => (
                "other-compactor",
                None,
                format!("Nothing to do: another program compacts {at} (it has written the key {COMPACTION_KEY})"),
            ),
            CompactionOutcome::OtherCompaction => (
                "other-compaction",
                None,
                format!("Nothing to do: etcd itself (--auto-compaction-retention) or a person has compacted {at}"),
            ),
            CompactionOutcome::NothingToDo => {
                ("nothing-to-do", None, format!("Nothing to do: {at} has no history that is older than {keep} s"))
            }
        };
        let revision = revision.map(Revision::get);
        let answer =
            CommandAnswer::new(text, &CompactionJson { store: at.to_string(), keep_seconds: keep, outcome, revision })?;
        Ok(match about.problems.iter().any(|problem| problem.kind == ClusterProblemKind::NoSpace) {
            true => answer.note("etcd still refuses changes: run etcdctl defrag --cluster, then etcdctl alarm disarm"),
            false => answer,
        })
    }
}

#[derive(Serialize)]
struct CompactionJson {
    store: String,
    keep_seconds: u64,
    outcome: &'static str,
    /// The oldest revision that is readable after this run; if the run has compacted nothing, the revision to which a
    /// later run will compact.
    revision: Option<i64>,
}

impl StandaloneCommand for EtcdStatus {
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        loop {
            invocation.run_on_store(&OneStatus(self))?;
            let Some(interval) = self.watch else { return Ok(0) };
            writeln!(invocation.out, "{}", if invocation.options.output == Format::Yaml { "---" } else { "" })?;
            thread::sleep(interval);
        }
    }
}

struct OneStatus<'a>(&'a EtcdStatus);

#[derive(Serialize)]
struct ClusterReport {
    store: String,
    cluster: String,
    members: Vec<MemberRow>,
    revision: i64,
    oldest_revision: i64,
    /// A time at which the oldest readable revision already existed; `None` if no such time is known.
    oldest_time: Option<String>,
    compacted_by: CompactedBy,
    /// The growth of the bytes in use since an earlier run of `etcd status`; `None` if history was deleted since that
    /// run.
    growth_bytes_per_hour: Option<u64>,
}

/// The program that compacted the cluster's history last.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum CompactedBy {
    /// No program has compacted the history: all revisions are readable.
    Nobody,
    /// A program that writes [`COMPACTION_KEY`] when it compacts: kube-apiserver, Calico's kube-controllers or Margay.
    KeyHolder,
    /// `margay etcd compact` on this machine has compacted the history without writing [`COMPACTION_KEY`], because etcd
    /// refused all puts when its quota was used up.
    Margay,
    /// History was compacted by etcd itself (`--auto-compaction-retention`), by hand with etcdctl, or by `margay etcd
    /// compact` on another machine while etcd refused all puts.
    EtcdOrPerson,
}

impl CompactedBy {
    /// Returns who has compacted the history before the revision `oldest`. `key` is the revision in [`COMPACTION_KEY`],
    /// and `noted` the revision to which this machine has compacted last.
    fn find(oldest: Revision, key: Option<i64>, noted: Option<i64>) -> Self {
        match oldest.get() {
            ..=1 => Self::Nobody,
            oldest if key == Some(oldest) => Self::KeyHolder,
            oldest if noted == Some(oldest) => Self::Margay,
            _ => Self::EtcdOrPerson,
        }
    }
}

#[derive(Serialize)]
struct MemberRow {
    endpoint: String,
    role: &'static str,
    version: String,
    /// `None` if the member has not answered.
    bytes: Option<u64>,
    bytes_in_use: Option<u64>,
    quota_bytes: u64,
    /// True if `quota_bytes` is etcd's default quota, because neither the member nor the user has given a quota.
    quota_is_assumed: bool,
    percent: Option<u64>,
    problems: Vec<String>,
}

impl MemberRow {
    fn of(report: MemberReport, quota: Option<u64>) -> Self {
        let (description, problems) = match report.description {
            Ok(description) => (Some(description), Vec::new()),
            Err(error) => (None, vec![error.to_string()]),
        };
        let reported = description.as_ref().and_then(|about| about.db_quota_bytes);
        let quota_bytes = quota.or(reported).unwrap_or(DEFAULT_QUOTA_BYTES).max(1);
        let bytes = description.as_ref().map(|about| about.db_bytes);
        Self {
            endpoint: report.endpoint,
            role: description.as_ref().map_or(NO_ANSWER, |about| match about.role {
                MemberRole::Leader => "leader",
                MemberRole::Follower => "follower",
                MemberRole::Learner => "learner",
                MemberRole::Leaderless => "no leader",
            }),
            version: description.as_ref().map_or_else(String::new, |about| about.version.clone()),
            bytes,
            bytes_in_use: description.as_ref().map(|about| about.db_bytes_in_use),
            quota_bytes,
            quota_is_assumed: description.is_some() && quota.or(reported).is_none(),
            percent: bytes.map(|bytes| bytes.saturating_mul(100) / quota_bytes),
            problems: description
                .as_ref()
                .map_or(problems, |about| about.problems.iter().map(ToString::to_string).collect()),
        }
    }
}

impl TableRow for MemberRow {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("MEMBER"), |row| printable(&row.endpoint)),
            (Column::Text("ROLE"), |row| row.role.to_owned()),
            (Column::Text("VERSION"), |row| printable(&row.version)),
            (Column::Number("SIZE"), |row| {
                row.bytes.map_or_else(|| "-".to_owned(), |bytes| HumanBytes(bytes).to_string())
            }),
            (Column::Number("IN USE"), |row| {
                row.bytes_in_use.map_or_else(|| "-".to_owned(), |bytes| HumanBytes(bytes).to_string())
            }),
            (Column::Number("QUOTA"), |row| HumanBytes(row.quota_bytes).to_string()),
            (Column::Number("FILLED"), |row| {
                row.percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent} %"))
            }),
        ]
    }
}

#[async_trait(?Send)]
impl StoreCommand for OneStatus<'_> {
    fn progress_text(&self) -> Option<&'static str> {
        Some("asking")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let Self(args) = self;
        let report = with_cluster(at, async |store, cluster| {
            let reports = cluster.members().await?;
            // The members' answers describe the cluster, too.
            let about = match reports.iter().find_map(|report| report.description.as_ref().ok()) {
                Some(about) => about.clone(),
                None => cluster.about().await?,
            };
            let oldest = oldest_revision(store, about.revision).await?;
            let key = match store.get(COMPACTION_KEY).await {
                // The user's role may lack the right to read the key, which only says who compacts.
                Err(error) if matches!(error.kind(), kv::ErrorKind::Auth(_)) => None,
                key => key?,
            };
            let compacted_to =
                key.as_ref().and_then(|kv| std::str::from_utf8(kv.value.as_bytes()).ok()?.parse::<i64>().ok());
            let oldest_time = time_after(store, oldest).await?;
            let members: Vec<MemberRow> = reports.into_iter().map(|report| MemberRow::of(report, args.quota)).collect();
            Ok((members, about, oldest, compacted_to, oldest_time))
        });
        let (members, about, oldest, compacted_to, oldest_time) = report.await?;
        let noted = EtcdNotes::read(&EtcdNotes::path(&args.notes, about.cluster)).compacted_to;
        let compacted_by = CompactedBy::find(oldest, compacted_to, noted);
        let growth_bytes_per_hour = note_size(&args.notes, &about, oldest);
        let report = ClusterReport {
            store: at.to_string(),
            cluster: format!("{:x}", about.cluster),
            members,
            revision: about.revision.get(),
            oldest_revision: oldest.get(),
            oldest_time: oldest_time.map(rfc3339),
            compacted_by,
            growth_bytes_per_hour,
        };
        let answer = CommandAnswer::new(report.text(oldest_time), &report)?;
        Ok(match report.members.iter().all(|member| member.problems.is_empty()) {
            true => answer,
            false => answer.incomplete(CommandFailure::new("the cluster has a problem")),
        })
    }
}

/// Returns how fast the database has grown since an earlier run, in bytes per hour, and saves the current size for
/// later runs. Returns `None` unless a size was saved at least a minute ago and no history has been deleted since then.
fn note_size(folder: &Path, about: &ClusterDescription, oldest: Revision) -> Option<u64> {
    const MIN_SECONDS: u64 = 60;
    let path = EtcdNotes::path(folder, about.cluster);
    let mut notes = EtcdNotes::read(&path);
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let now = SizeSample { at, bytes_in_use: about.db_bytes_in_use, oldest_revision: oldest.get() };
    let before = notes.size;
    let is_recent = before.is_some_and(|before| {
        before.oldest_revision == now.oldest_revision && at.saturating_sub(before.at) < MIN_SECONDS
    });
    if !is_recent {
        notes.size = Some(now);
    }
    // If the current user cannot write the file with the cluster's size, only the growth of the database is missing in
    // later runs.
    _ = write_private(&path, &notes);
    let before = before.filter(|before| before.oldest_revision == now.oldest_revision)?;
    let seconds = now.at.checked_sub(before.at).filter(|seconds| *seconds >= MIN_SECONDS)?;
    let grown = now.bytes_in_use.saturating_sub(before.bytes_in_use);
    Some(grown.saturating_mul(3600) / seconds)
}

impl ClusterReport {
    fn text(&self, oldest_time: Option<OffsetDateTime>) -> String {
        let mut text = table(&self.members);
        text.push('\n');
        let mut line =
            |name: &str, value: String| _ = writeln!(text, "{:<10} {}", format!("{name}:"), printable(&value));
        let revisions = self.revision - self.oldest_revision;
        let age = oldest_time.map_or_else(
            || ", of unknown age".to_owned(),
            |time| {
                let age = Duration::try_from(OffsetDateTime::now_utc() - time).unwrap_or_default();
                format!(", at least {} old", HumanDuration(age))
            },
        );
        line("History", format!("{revisions} revisions before revision {}{age}", self.revision));
        line(
            "Compacted",
            match self.compacted_by {
                CompactedBy::Nobody => "never: if no other program will, enable margay-compact.timer".to_owned(),
                CompactedBy::KeyHolder => format!(
                    "to revision {}, by a program that writes {COMPACTION_KEY} (kube-apiserver, kube-controllers, margay)",
                    self.oldest_revision
                ),
                CompactedBy::Margay => {
                    format!("to revision {}, by margay etcd compact on this machine", self.oldest_revision)
                }
                CompactedBy::EtcdOrPerson => format!(
                    "to revision {}, by etcd itself, by a person, or by margay etcd compact while the quota was used up",
                    self.oldest_revision
                ),
            },
        );
        if let Some(growth) = self.growth_bytes_per_hour {
            line("Growth", format!("{} per hour since the last call", HumanBytes(growth)));
        }
        if self.members.iter().any(|member| member.quota_is_assumed) {
            line("Quota", "assumed, because a member does not report its quota: pass --quota BYTES".to_owned());
        }
        // Each member reports the alarms of all members.
        let mut problems: Vec<(&str, Vec<&str>)> = Vec::new();
        for member in &self.members {
            for problem in &member.problems {
                match problems.iter_mut().find(|(text, _)| text == problem) {
                    Some((_, endpoints)) => endpoints.push(&member.endpoint),
                    None => problems.push((problem, vec![&member.endpoint])),
                }
            }
        }
        for (problem, endpoints) in problems {
            line("Problem", format!("{}: {problem}", endpoints.join(", ")));
        }
        text
    }
}
