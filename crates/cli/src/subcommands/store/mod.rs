//! Implements the commands about a whole store. The subcommands `verify`, `compact`, `upgrade` and `create` of `margay
//! store` are in this file.

mod backup;
mod status;

use std::num::NonZeroU64;
use std::path::Path;

use async_trait::async_trait;
use clap::{Args, Subcommand};
use datastore::maintenance::{self, FORMAT_WITH_LEASES, MvccStore, SpareSpace};
use datastore::{Drivers, OpenStore};
use indicatif::{HumanBytes, HumanCount};
use kv::{ErrorKind, Revision, Store};
use serde::Serialize;

use self::backup::{Backup, Restore};
pub(crate) use self::status::Status;
use crate::command::{CommandAnswer, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::install::{PLUGIN_FOLDERS, PluginProgram};
use crate::store::{StoreAccess, StoreUse};

/// Commands about a store as a whole.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreSubcommand {
    /// Show the store's engine, size and readable revisions, and the process that has the store open
    #[command(after_help = "\
Examples:
  margay store status
  margay store status -o json | jq .history

If the store stays in use for more than 2 seconds, or cannot be opened, only the
facts that are visible from outside are shown; the exit code is then 1.")]
    Status,
    /// Read every row of the store, and check that nothing is damaged or missing
    #[command(after_help = "\
Examples:
  margay store verify
  margay store verify --store redb:///var/lib/margay/ipam.redb

Other processes wait until it is done. Damage is reported with what to do; the exit code is then 1.")]
    Verify,
    /// Write a consistent backup of the store to a file
    #[command(after_help = "\
Examples:
  margay store backup /var/backups/margay-$(date +%F).jsonl
  margay store backup --force /var/backups/margay.jsonl

Containers can be started and stopped meanwhile: the store is released while another process waits for it.
The file is JSON lines with a checksum, and only its owner can read it.
Of an etcd the keys below /calico/ and /margay/ are written.")]
    Backup(Backup),
    /// Create a store from a backup
    #[command(after_help = "\
Examples:
  margay store restore /var/backups/margay.jsonl
  margay store restore /var/backups/margay.jsonl --replace --dry-run
  margay store restore /var/backups/margay.jsonl --store redb:///var/lib/margay/ipam.redb

The backup is checked first. The store is there in full or not at all. Addresses that were assigned
after the backup was made are not in it: restart the containers that are younger.")]
    Restore(Restore),
    /// Delete old revisions, and free unused disk space if the engine can
    #[command(after_help = "\
Examples:
  margay store compact
  margay store compact --keep 1000 --dry-run

The current keys and values are not touched.")]
    Compact(Compact),
    /// Upgrade the store to format 2, which can also store etcd leases
    #[command(after_help = "\
Examples:
  margay store upgrade
  margay store upgrade --dry-run

Versions of margay without the newest format cannot open the store any more, and only a backup leads back. So the
command refuses while a plugin of an older version is in a folder for CNI plugins.")]
    Upgrade(Upgrade),
    /// Create an empty store
    #[command(after_help = "\
Examples:
  margay store create --store redb:///var/lib/margay/ipam.redb
  margay store create --format 2

The first pool makes the store, too, in format 1. Format 2 also
keeps the leases of the etcd API that margay serve --listen serves.")]
    Create(CreateStore),
}

#[derive(Debug, Args)]
pub(crate) struct CreateStore {
    /// Store format: 1 (every margay version can read it) or 2 (also stores leases of the etcd API that margay serves)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    format: u32,
}

#[derive(Serialize)]
struct CreatedJson {
    store: String,
    format: u32,
}

#[async_trait(?Send)]
impl StoreCommand for CreateStore {
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        Some(("create", "start etcd: etcd creates its files at the first start".to_owned()))
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        if self.format >= FORMAT_WITH_LEASES {
            refuse_older_plugins()?;
        }
        if !maintenance::create(at.location, self.format, at.wait).await.map_err(|error| at.explain(error))? {
            return Err(CommandFailure::new(format!("{at} is there already; nothing was changed"))
                .hint("show the store with: margay store status; upgrade its format with: margay store upgrade"));
        }
        let text = format!("Successfully created {at}, format {}", self.format);
        CommandAnswer::new(text, &CreatedJson { store: at.to_string(), format: self.format })
    }
}

#[derive(Debug, Args)]
pub(crate) struct Upgrade {
    /// Dry run: do all checks, but write nothing to the store
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct UpgradedJson {
    from: u32,
    to: u32,
}

#[async_trait(?Send)]
impl StoreCommand for Upgrade {
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        Some(("upgrade", "start a newer etcd on the same files: etcd upgrades its files itself".to_owned()))
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        refuse_older_plugins()?;
        let done = match self.dry_run {
            true => maintenance::preview_upgrade(at.location, at.wait).await,
            false => maintenance::upgrade(at.location, at.wait).await,
        };
        let done = done.map_err(|error| at.explain(error))?;
        let text = if done.from == done.to {
            format!("{at} is already at format {}, the newest", done.to)
        } else {
            format!("Successfully raised {at} from format {} to {}", done.from, done.to)
        };
        let answer = CommandAnswer::new(text, &UpgradedJson { from: done.from, to: done.to })?;
        Ok(if self.dry_run { answer.into_dry_run() } else { answer })
    }
}

/// Fails if a plugin folder of this machine has a Margay plugin that cannot read the newest store format.
fn refuse_older_plugins() -> CommandResult<()> {
    for folder in PLUGIN_FOLDERS {
        for name in ["margay-ipam", "margay-cni", "calico-ipam", "calico"] {
            let file = Path::new(folder).join(name);
            if file.is_file() && PluginProgram::reads_format(&file, FORMAT_WITH_LEASES) == Some(false) {
                return Err(CommandFailure::new(format!(
                    "{} is of a version that cannot read the newest format",
                    file.display()
                ))
                .hint("install this version's plugin first, with make install or the package; nothing was changed"));
            }
        }
    }
    Ok(())
}

#[derive(Serialize)]
struct VerifiedJson {
    whole: bool,
    keys: u64,
    log_rows: u64,
    value_bytes: u64,
}

pub(crate) struct Verify;

#[async_trait(?Send)]
impl StoreCommand for Verify {
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        let instead =
            "compare the members of the cluster with: etcdctl endpoint hashkv --cluster; etcd checks its files itself";
        Some(("verify", instead.to_owned()))
    }

    fn progress_text(&self) -> Option<&'static str> {
        Some("verifying")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let open = at.open_files(StoreUse::Read).await?;
        let verified = at.run_and_close(open, async |open: &OpenStore| match open.embedded() {
            Some(embedded) => embedded.verify().await.map_err(|error| at.explain(error)),
            None => Err(CommandFailure::new(format!("{at} cannot be verified"))),
        });
        let verified = verified.await?;
        let text = format!(
            "{at} is whole: {} keys, {} changes in its history, {} of values",
            HumanCount(verified.live),
            HumanCount(verified.log_rows),
            HumanBytes(verified.value_bytes)
        );
        let json = VerifiedJson {
            whole: true,
            keys: verified.live,
            log_rows: verified.log_rows,
            value_bytes: verified.value_bytes,
        };
        CommandAnswer::new(text, &json)
    }
}

#[derive(Debug, Args)]
pub(crate) struct Compact {
    /// Number of revisions to keep, including the newest
    #[arg(long, value_name = "N", default_value = "1")]
    keep: NonZeroU64,

    /// Show what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct CompactedJson {
    before: HistoryExtent,
    after: HistoryExtent,
}

#[derive(Serialize)]
struct HistoryExtent {
    oldest_revision: i64,
    /// The length of the store's log in bytes, or `None` after a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    log_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

#[async_trait(?Send)]
impl StoreCommand for Compact {
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        let instead = "use etcd's --auto-compaction-retention, etcdctl compact and etcdctl defrag: all clients of \
                       etcd share its history";
        Some(("compact", instead.to_owned()))
    }

    fn progress_text(&self) -> Option<&'static str> {
        Some("compacting")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let failed = |error| at.explain(error);
        let keep = i64::try_from(self.keep.get()).unwrap_or(i64::MAX);
        let open = at.open_files(StoreUse::Release).await?;
        let done = at.run_and_close(open, async |open: &OpenStore| {
            let Some(embedded) = open.embedded() else {
                return Err(CommandFailure::new(format!("{at} has no history to give up")));
            };
            let revision = embedded.status().revision;
            let before = history_extent(at, embedded).await?;
            let mark = Revision::new(revision.get().saturating_sub(keep - 1).max(1));
            if self.dry_run {
                return Ok((revision, mark, before, None));
            }
            match embedded.compact(mark).await {
                Ok(()) => {}
                // The store's history up to `mark` is already compacted.
                Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => {}
                Err(error) => return Err(failed(error)),
            }
            Ok((revision, mark, before, Some(history_extent(at, embedded).await?)))
        });
        let (revision, mark, before, after) = done.await?;
        let Some(mut after) = after else { return would_compact(at, before, mark, revision) };
        let room = maintenance::shrink(at.location, at.wait).await.map_err(failed)?;
        after.bytes = Some(maintenance::peek(at.location).await.map_err(failed)?.bytes);
        let text = format!(
            "Successfully compacted {at}\n\
             oldest revision: {} -> {}, the newest is {revision}\n\
             log:             {} -> {}\n\
             on disk:         {} -> {}",
            before.oldest_revision,
            after.oldest_revision,
            human_size(before.log_bytes),
            human_size(after.log_bytes),
            human_size(before.bytes),
            human_size(after.bytes),
        );
        let answer = CommandAnswer::new(text, &CompactedJson { before, after })?;
        Ok(match room {
            SpareSpace::GivenBack => answer,
            SpareSpace::Kept => answer.note(
                "this engine keeps the room in its files and uses it again; a backup that is restored with --replace is as \
                 small as can be",
            ),
        })
    }
}

fn human_size(bytes: Option<u64>) -> HumanBytes {
    HumanBytes(bytes.unwrap_or_default())
}

async fn history_extent(at: StoreAccess<'_>, embedded: &MvccStore) -> CommandResult<HistoryExtent> {
    let failed = |error| at.explain(error);
    let oldest_revision = embedded.oldest().await.map_err(failed)?.revision.get();
    let bytes = Some(maintenance::peek(at.location).await.map_err(failed)?.bytes);
    Ok(HistoryExtent { oldest_revision, log_bytes: Some(embedded.status().log_bytes), bytes })
}

/// Returns the answer of a dry run of `store compact`. The number of bytes that a compaction frees is known only after
/// the compaction.
fn would_compact(
    at: StoreAccess<'_>,
    before: HistoryExtent,
    mark: Revision,
    newest: Revision,
) -> CommandResult<CommandAnswer> {
    let oldest_revision = before.oldest_revision.max(mark.get());
    let text = format!(
        "Successfully compacted {at}\noldest revision: {} -> {oldest_revision}, the newest is {newest}",
        before.oldest_revision
    );
    let after = HistoryExtent { oldest_revision, log_bytes: None, bytes: None };
    Ok(CommandAnswer::new(text, &CompactedJson { before, after })?.into_dry_run())
}
