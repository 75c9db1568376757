//! Shows facts about a store, for the command `margay store status`.

use std::cmp::Reverse;
use std::fmt::Write;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use datastore::maintenance::{self, HistoryShare, LockHolder, MvccStore, StorePeek};
use datastore::{ClusterDescription, Location, OpenStore};
use indicatif::{HumanBytes, HumanCount, HumanDuration};
use ipam_core::forwarding::{ForwardingOwner, StoreScope};
use ipam_core::model::{ClusterInformation, keys};
use ipam_core::timestamps::parse_rfc3339;
use kv::{Range, StoreExt, WatchRequest};
use serde::Serialize;

use crate::command::{CommandAnswer, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{printable, rfc3339};
use crate::store::{StoreAccess, StoreUse};
use crate::subcommands::cluster::{forwarding_name, forwarding_text};
use crate::times::utc_and_local;

/// How long the command `store status` waits for the store lock. If the command does not get the store lock, it shows
/// only the facts that can be read without opening the store.
const STATUS_LOCK_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct Status;

#[async_trait(?Send)]
impl StoreCommand for Status {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        if at.location.is_shared() {
            return of_cluster(at).await;
        }
        let peek = maintenance::peek(at.location).await.map_err(|error| at.explain(error))?;
        let mut report = StoreStatus::outside(at.location, peek);
        let failure = match at.with_wait(STATUS_LOCK_TIMEOUT.min(at.wait)).open_files(StoreUse::Read).await {
            Ok(open) => report.inspect(at, open).await.err(),
            Err(failure) => Some(failure),
        };
        let answer = CommandAnswer::new(report.text(), &report)?;
        Ok(match failure {
            Some(failure) => answer.incomplete(failure),
            None => answer,
        })
    }
}

#[derive(Serialize)]
struct StoreStatus {
    store: String,
    engine: Option<String>,
    format: Option<u32>,
    id: Option<String>,
    bytes: u64,
    holder: Option<String>,
    waiting: usize,
    forwarding: &'static str,
    #[serde(skip)]
    forwarding_owner: ForwardingOwner,
    #[serde(flatten)]
    inside: Option<EmbeddedStatus>,
}

/// Facts about an embedded store that only the holder of the store lock can read.
#[derive(Serialize)]
struct EmbeddedStatus {
    keys: u64,
    revision: i64,
    time: Option<String>,
    oldest_revision: i64,
    oldest_time: Option<String>,
    history: HistoryStatus,
}

/// How far back the store's history reaches, and how much history the store is configured to keep.
#[derive(Serialize)]
struct HistoryStatus {
    revisions: u64,
    max_revisions: Option<u64>,
    bytes: u64,
    max_bytes: Option<u64>,
    age_seconds: u64,
    max_age_seconds: Option<u64>,
    min_age_seconds: Option<u64>,
    /// The key prefixes with the largest shares of the store's history, in descending order of their shares.
    largest: Vec<KeyGroup>,
}

/// A group of keys with a common prefix.
#[derive(Serialize)]
struct KeyGroup {
    prefix: String,
    changes: u64,
    bytes: u64,
}

/// The label of the line that names the program that forwards and masquerades on this machine.
const FORWARDING: &str = "Forwarding and NAT";

/// Maximum number of key groups that the command shows.
const MAX_KEY_GROUPS: usize = 3;

/// Returns the prefix by which a key is grouped: the key's first two path segments, such as `/calico/ipam/`, or fewer
/// if the key has fewer segments.
fn prefix(key: &[u8]) -> Vec<u8> {
    let slashes = key.iter().enumerate().skip(1).filter(|(_, byte)| **byte == b'/');
    let end = slashes.take(2).last().map_or(0, |(at, _)| at + 1);
    key.get(..end).unwrap_or_default().to_vec()
}

impl StoreStatus {
    fn outside(location: &Location, peek: StorePeek) -> Self {
        let forwarding_owner = ForwardingOwner::decide(StoreScope::Machine, host::felix_file());
        Self {
            store: location.to_string(),
            engine: peek.engine,
            format: peek.unknown_layout,
            id: peek.id.map(|id| id.to_string()),
            bytes: peek.bytes,
            holder: match peek.holder {
                LockHolder::None => None,
                LockHolder::Process(process) => Some(process),
                LockHolder::Unseen => Some("a process that only root can see".to_owned()),
            },
            waiting: peek.waiting,
            forwarding: forwarding_name(&forwarding_owner),
            forwarding_owner,
            inside: None,
        }
    }

    async fn inspect(&mut self, at: StoreAccess<'_>, open: OpenStore) -> CommandResult<()> {
        if let Some(store) = open.embedded() {
            self.format = Some(store.status().format);
        }
        let inside = match open.embedded() {
            Some(store) => Some(EmbeddedStatus::of(store).await),
            None => None,
        };
        let closed = open.close().await;
        self.inside = inside.transpose().map_err(|error| at.explain(error))?;
        closed.map_err(|error| at.explain(error))
    }

    fn text(&self) -> String {
        let unknown = || "unknown".to_owned();
        let mut text = String::new();
        let mut line =
            |name: &str, value: String| _ = writeln!(text, "{:<10} {}", format!("{name}:"), printable(&value));
        line("Store", self.store.clone());
        let format = self.format.map_or_else(unknown, |format| format.to_string());
        line("Engine", format!("{}, format {format}", self.engine.clone().unwrap_or_else(unknown)));
        line("Id", self.id.clone().unwrap_or_else(unknown));
        line("On disk", HumanBytes(self.bytes).to_string());
        if let Some(inside) = &self.inside {
            inside.lines(&mut line);
        }
        line("In use by", self.holder.clone().unwrap_or_else(|| "nobody".to_owned()));
        line("Waiting", self.waiting.to_string());
        line(FORWARDING, forwarding_text(&self.forwarding_owner));
        text
    }
}

impl EmbeddedStatus {
    async fn of(store: &MvccStore) -> kv::Result<Self> {
        let (status, oldest, bounds) = (store.status(), store.oldest().await?, store.retention());
        let first = match oldest.time {
            // The oldest state of the store may be the empty state, which has no time. If the oldest state has no time,
            // the time of the first change counts as the start of the history.
            None => {
                let first =
                    store.changes(WatchRequest::new(Range::All, oldest.revision)).await?.batches.into_iter().next();
                first.and_then(|batch| batch.time)
            }
            time => time,
        };
        let age = first.and_then(|time| SystemTime::now().duration_since(time).ok()).unwrap_or_default();
        let revisions = status.revision.get() - oldest.revision.get() + 1;
        let mut largest: Vec<_> = store.history_shares(prefix).await?.into_iter().collect();
        largest.sort_by_key(|(_, share)| Reverse(share.bytes));
        largest.truncate(MAX_KEY_GROUPS);
        let group = |(prefix, HistoryShare { changes, bytes }): (Vec<u8>, _)| KeyGroup {
            prefix: String::from_utf8_lossy(&prefix).into_owned(),
            changes,
            bytes,
        };
        Ok(Self {
            keys: status.live,
            revision: status.revision.get(),
            time: status.time.map(rfc3339),
            oldest_revision: oldest.revision.get(),
            oldest_time: oldest.time.map(rfc3339),
            history: HistoryStatus {
                revisions: u64::try_from(revisions).unwrap_or_default(),
                max_revisions: bounds.revisions,
                bytes: status.log_bytes,
                max_bytes: bounds.bytes,
                age_seconds: age.as_secs(),
                max_age_seconds: bounds.age.map(|age| age.as_secs()),
                min_age_seconds: bounds.min_age.map(|age| age.as_secs()),
                largest: largest.into_iter().map(group).collect(),
            },
        })
    }

    fn lines(&self, line: &mut impl FnMut(&str, String)) {
        let at = |revision: i64, time: &Option<String>| match time {
            Some(time) => match parse_rfc3339(time).map(utc_and_local) {
                Some([utc, local]) => format!("revision {revision}, {utc} ({local})"),
                None => format!("revision {revision}, {time}"),
            },
            None => format!("revision {revision}"),
        };
        line("Keys", HumanCount(self.keys).to_string());
        line("Newest", at(self.revision, &self.time));
        line("Oldest", at(self.oldest_revision, &self.oldest_time));
        let of = |used: String, most: Option<String>| match most {
            Some(most) => format!("{used} of {most}"),
            None => used,
        };
        let &HistoryStatus { revisions, max_revisions, bytes, max_bytes, age_seconds, max_age_seconds, .. } =
            &self.history;
        let revisions = of(HumanCount(revisions).to_string(), max_revisions.map(|most| HumanCount(most).to_string()));
        let bytes = of(HumanBytes(bytes).to_string(), max_bytes.map(|most| HumanBytes(most).to_string()));
        let span = |seconds| HumanDuration(Duration::from_secs(seconds)).to_string();
        let age = of(span(age_seconds), max_age_seconds.map(span));
        let kept = self
            .history
            .min_age_seconds
            .map_or_else(String::new, |kept| format!("; nothing younger than {} goes for its number", span(kept)));
        line("History", format!("{revisions} revisions; {bytes}; {age}{kept}"));
        let groups = self.history.largest.iter().map(|group| {
            let keys = if group.prefix.is_empty() { "other keys" } else { &group.prefix };
            let changes = if group.changes == 1 { "change" } else { "changes" };
            format!("{keys} {} in {} {changes}", HumanBytes(group.bytes), HumanCount(group.changes))
        });
        let groups: Vec<_> = groups.collect();
        if !groups.is_empty() {
            line("Largest", groups.join("; "));
        }
    }
}

#[derive(Serialize)]
struct ClusterStatus {
    store: String,
    engine: &'static str,
    id: String,
    endpoints: Vec<String>,
    version: String,
    revision: i64,
    keys: u64,
    bytes: u64,
    bytes_in_use: u64,
    quota_bytes: Option<u64>,
    forwarding: &'static str,
    problems: Vec<String>,
}

async fn of_cluster(at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
    let failed = |error| at.explain(error);
    let open = at.with_wait(STATUS_LOCK_TIMEOUT).open_files(StoreUse::Read).await?;
    let read = at.run_and_close(open, async |open: &OpenStore| {
        let Some(reporter) = open.cluster() else {
            return Err(CommandFailure::new(format!("{at} is no cluster")));
        };
        let description = reporter.about().await.map_err(failed)?;
        let mut count = 0;
        for prefix in crate::transfer::CLUSTER_PREFIXES {
            count += open.store().count(Range::prefix(prefix)).await.map_err(failed)?;
        }
        let cluster = open.store().get(keys::cluster_information()).await.map_err(failed)?;
        Ok((description, count, cluster))
    });
    let (description, keys, information) = read.await?;
    let information = information.map(|kv| ClusterInformation::decode_or_empty(kv.value.as_bytes()));
    let owner = ForwardingOwner::decide(StoreScope::Cluster(information.as_ref()), host::felix_file());
    let ClusterDescription {
        cluster,
        endpoints,
        version,
        revision,
        db_bytes,
        db_bytes_in_use,
        db_quota_bytes,
        problems,
        ..
    } = description;
    let cluster = ClusterStatus {
        store: at.to_string(),
        engine: at.location.facts().name,
        id: format!("{cluster:x}"),
        endpoints,
        version,
        revision: revision.get(),
        keys,
        bytes: db_bytes,
        bytes_in_use: db_bytes_in_use,
        quota_bytes: db_quota_bytes,
        forwarding: forwarding_name(&owner),
        problems: problems.iter().map(ToString::to_string).collect(),
    };
    let mut text = String::new();
    let mut line = |name: &str, value: String| _ = writeln!(text, "{:<10} {}", format!("{name}:"), printable(&value));
    line("Store", cluster.store.clone());
    line("Engine", format!("{} {}", cluster.engine, cluster.version));
    line("Cluster", cluster.id.clone());
    line("Endpoints", cluster.endpoints.join(", "));
    let quota = cluster.quota_bytes.map_or_else(String::new, |quota| format!(", quota {}", HumanBytes(quota)));
    let (bytes, in_use) = (HumanBytes(cluster.bytes), HumanBytes(cluster.bytes_in_use));
    line("On disk", format!("{bytes}, {in_use} of them in use{quota}"));
    line("Keys", format!("{} below {}", HumanCount(cluster.keys), crate::transfer::CLUSTER_PREFIXES.join(" and ")));
    line("Newest", format!("revision {}", cluster.revision));
    line(FORWARDING, forwarding_text(&owner));
    for problem in &cluster.problems {
        line("Problem", problem.clone());
    }
    CommandAnswer::new(text, &cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_groups_keys_by_outer_folders() {
        for (key, group) in [
            ("/calico/ipam/v2/assignment/ipv4/block/10.65.0.0-28", "/calico/ipam/"),
            ("/bench/00000001", "/bench/"),
            ("locks/a/b/c", "locks/a/"),
            ("/", ""),
            ("key", ""),
        ] {
            assert_eq!(String::from_utf8(prefix(key.as_bytes())).unwrap(), group, "{key}");
        }
    }
}
