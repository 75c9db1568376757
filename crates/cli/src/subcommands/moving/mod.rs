//! Copies the contents of a store to another store or to a file. The file `moving/mod.rs` implements `margay export`
//! and `margay import`.

mod migrate;
mod take_over;
mod whereabouts;

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use clap::{Args, Subcommand};
use indicatif::HumanBytes;
use ipam_operator::moving::{DocumentCounts, ImportLock, ImportState, MoveKind};
use serde::Serialize;

use self::migrate::{Migrate, remove};
use self::take_over::{FromHostLocal, FromPodman};
use self::whereabouts::FromWhereabouts;
use crate::command::{CommandAnswer, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::store::StoreAccess;
use crate::transfer::{
    BackupWriter, Differences, FillMode, ImportPlan, KeyFilter, Overwrite, Source, Target, TargetFiller, WrittenBackup,
    run_blocking,
};

/// Commands that move the contents of a store.
#[derive(Debug, Subcommand)]
pub(crate) enum MovingSubcommand {
    /// Write a snapshot of all IPAM data to a file
    #[command(after_help = EXPORT_HELP)]
    Export(Export),
    /// Fill an empty store from a file or another plugin's records
    #[command(after_help = IMPORT_HELP, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
    Import(Import),
    /// Copy all IPAM data to another store, then switch to it
    #[command(after_help = migrate::HELP)]
    Migrate(Migrate),
}

const EXPORT_HELP: &str = "\
Examples:
  margay export /var/backups/ipam.jsonl
  margay export - --store redb:///var/lib/margay/ipam.redb | gzip > ipam.jsonl.gz

Containers can be started and stopped meanwhile. The file has blocks, handles,
affinities, settings, pools, reservations and nodes, as they were at one
revision; of a cluster nothing else, where `margay store backup` writes all
that is Calico's. It is of the same form: `margay store restore` takes it, too.";

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// Export file to write, or - for stdout
    file: PathBuf,

    /// Overwrite an existing file
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct ExportJson {
    file: String,
    revision: i64,
    bytes: u64,
    #[serde(flatten)]
    tally: DocumentCounts,
}

#[async_trait(?Send)]
impl StoreCommand for Export {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let to_stdout = self.file == Path::new("-");
        let (path, overwrite) = (self.file.clone(), if self.force { Overwrite::Allowed } else { Overwrite::Never });
        let writer = if to_stdout {
            BackupWriter::stdout()?
        } else {
            run_blocking(move || BackupWriter::create(&path, overwrite)).await?
        };
        let WrittenBackup { revision, tally, bytes, .. } = WrittenBackup::of(at, KeyFilter::Ipam, writer).await?;
        let file = if to_stdout { "stdout".to_owned() } else { self.file.display().to_string() };
        let text =
            format!("Successfully exported {at} at revision {revision} to {file}: {tally}, {}", HumanBytes(bytes));
        let answer = CommandAnswer::new(text, &ExportJson { file, revision: revision.get(), bytes, tally })?;
        Ok(if to_stdout { answer.on_stderr() } else { answer })
    }
}

const IMPORT_HELP: &str = "\
Examples:
  margay import ipam.jsonl --store etcd://10.0.0.1:2379
  margay import ipam.jsonl --as-node worker-7
  margay import host-local /var/lib/cni/networks/lab --network lab --dry-run

The file is one of `margay export` or `margay store backup`, and is checked
first. The store must have no pools and no addresses; nodes that it has stay as
they are. Until all is there and was read back, every plugin is refused. If the
import is interrupted, give the same command again: it continues.";

#[derive(Debug, Args)]
pub(crate) struct Import {
    #[command(subcommand)]
    pub(crate) of: Option<TakeOverSubcommand>,

    /// File that margay export or margay store backup has written
    #[arg(required = true)]
    pub(crate) file: Option<PathBuf>,

    /// Rename the node given by --from-node (or the file's only node) to NAME in all imported blocks and addresses
    #[arg(long, value_name = "NAME")]
    pub(crate) as_node: Option<String>,

    /// Node in the file to rename; --as-node gives the new name
    #[arg(long, value_name = "OLD", requires = "as_node")]
    from_node: Option<String>,

    /// Show what would be imported, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Delete the data that an unfinished import has written
    #[arg(long)]
    pub(crate) abort: bool,
}

/// Sources of addresses that another plugin has assigned.
#[derive(Debug, Subcommand)]
pub(crate) enum TakeOverSubcommand {
    /// Take over the addresses that host-local assigned in one network
    #[command(after_help = take_over::HOST_LOCAL_HELP)]
    HostLocal(FromHostLocal),
    /// Take over the addresses that podman's containers have in one network
    #[command(after_help = take_over::PODMAN_HELP)]
    Podman(FromPodman),
    /// Take over the addresses that the whereabouts plugin assigned in one network
    #[command(after_help = whereabouts::HELP)]
    Whereabouts(FromWhereabouts),
}

#[derive(Serialize)]
struct ImportJson {
    file: String,
    store: String,
    dry_run: bool,
    /// The number of keys that this run of `margay import` has written. Keys that an earlier, interrupted run wrote are
    /// not counted if this run continued that import.
    written: u64,
    /// The number of documents, such as nodes, that the store had before the import and that the import did not change.
    kept: u64,
    /// The number of keys in the backup file that are not keys of IPAM documents.
    left_out: u64,
    #[serde(flatten)]
    tally: DocumentCounts,
}

#[async_trait(?Send)]
impl StoreCommand for Import {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let Some(file) = &self.file else { return Err(CommandFailure::new("say which file is to be imported")) };
        if self.abort {
            return remove(at, MoveKind::Import, self.dry_run).await;
        }
        // The whole backup file is checked before any of its keys is written to the store.
        let plan = ImportPlan::of(file, self.as_node.clone(), self.from_node.clone()).await?;
        if self.dry_run {
            return import_dry_run(at, &plan).await;
        }
        let mut target = Target::make(at).await?;
        let filled = import_into(at, &plan, &mut target).await;
        let closed = target.close().await;
        let walked = filled?;
        closed?;
        import_answer(at, &plan, &walked)
    }
}

/// Reports the documents that an import would write, or fails if the import itself would fail.
async fn import_dry_run(at: StoreAccess<'_>, plan: &ImportPlan) -> CommandResult<CommandAnswer> {
    let mut target = Target::inspect(at).await?;
    let possible = match target.mark() {
        Some(mark) => require_same(at, mark, plan),
        None => imported_already(plan, &mut target).await.map(drop),
    };
    target.close().await?;
    possible?;
    let text = format!("Would import {} into {at}: {}", plan.file.path(), plan.tally);
    CommandAnswer::new(text, &import_json(at, plan, &Differences::default(), true))
}

async fn import_into(at: StoreAccess<'_>, plan: &ImportPlan, target: &mut Target<'_>) -> CommandResult<Differences> {
    match target.mark() {
        Some(mark) => require_same(at, mark, plan)?,
        None => {
            if let Some(found) = imported_already(plan, target).await? {
                return Ok(found);
            }
            let mark = ImportLock {
                way: MoveKind::Import,
                from: plan.file.path(),
                to: at.to_string(),
                source: plan.source(),
                state: ImportState::Copying,
                revision: plan.file.header.revision,
            };
            target.begin(mark).await?;
        }
    }
    let written = compare_or_fill(plan, target, FillMode::Fill).await?;
    if !written.are_unchanged_in(target).await? {
        // The comparison with the backup file ignores the store's own documents about the cluster, such as nodes.
        let compared = compare_or_fill(plan, target, FillMode::Verify).await?;
        compared.require_none(&at, "delete the imported data with --abort, and import again")?;
    }
    target.unmark().await?;
    Ok(written)
}

/// Succeeds if an earlier run has already removed the import lock and the store has all keys of the backup file.
/// Returns `None` if the store has no IPAM documents. Fails if a store without an import lock has some IPAM documents,
/// but not all keys of the backup file.
async fn imported_already(plan: &ImportPlan, target: &mut Target<'_>) -> CommandResult<Option<Differences>> {
    let Err(refusal) = target.require_empty().await else { return Ok(None) };
    let found = compare_or_fill(plan, target, FillMode::DryRun).await?;
    if found.total() == 0 { Ok(Some(found)) } else { Err(refusal) }
}

async fn compare_or_fill(plan: &ImportPlan, target: &mut Target<'_>, work: FillMode) -> CommandResult<Differences> {
    let mut source = Source::File(Box::new(plan.rows().await?));
    let filled = TargetFiller::run(&mut source, target, work, Some(plan.tally.keys)).await;
    filled.map_err(|stop| stop.of_a_file(&plan.file))
}

/// Fails if another import or a migration has begun to fill the store.
fn require_same(at: StoreAccess<'_>, mark: &ImportLock, plan: &ImportPlan) -> CommandResult<()> {
    if mark.way == MoveKind::Import && mark.source == plan.source() && mark.state == ImportState::Copying {
        return Ok(());
    }
    Err(CommandFailure::new(format!("{at} is being filled from {} already", mark.from))
        .hint(format!("continue the unfinished migration or import with: {}", mark.command())))
}

fn import_json(at: StoreAccess<'_>, plan: &ImportPlan, walked: &Differences, dry_run: bool) -> ImportJson {
    ImportJson {
        file: plan.file.path(),
        store: at.to_string(),
        dry_run,
        written: walked.missing,
        kept: walked.kept,
        left_out: plan.left_out,
        tally: plan.tally.clone(),
    }
}

fn import_answer(at: StoreAccess<'_>, plan: &ImportPlan, walked: &Differences) -> CommandResult<CommandAnswer> {
    let header = &plan.file.header;
    let text = format!(
        "Successfully imported {} into {at}: {}. All of it was read back and is equal",
        plan.file.path(),
        plan.tally
    );
    let mut answer = CommandAnswer::new(text, &import_json(at, plan, walked, false))?.note(format!(
        "this is revision {} of a {} store, read at {}: addresses that were assigned after that are free in this store \
         and will be assigned again",
        header.revision, header.engine, header.time
    ));
    if walked.kept > 0 {
        answer =
            answer.note(format!("{} nodes or the like that the store had already stayed as they are", walked.kept));
    }
    if plan.left_out > 0 {
        answer = answer.note(format!("{} keys of the file are not IPAM's and were left out", plan.left_out));
    }
    Ok(answer)
}
