//! Writes a store to a backup file and restores a store from a backup file, for the commands `margay store backup` and
//! `margay store restore`.
//!
//! A store is restored into a temporary folder beside the store's final folder. When the restored store is complete,
//! the temporary folder is renamed to the store's final folder.

use std::path::PathBuf;

use async_trait::async_trait;
use clap::Args;
use datastore::maintenance::{self, FORMAT_WITH_LEASES, StoreStaging, check_creatable};
use datastore::{Create, Drivers, OpenStore};
use indicatif::{HumanBytes, HumanCount};
use kv::{ErrorKind, MAX_TXN_OPS, Op, Prev, Store, Txn};
use serde::Serialize;

use super::refuse_older_plugins;
use crate::command::{CommandAnswer, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::store::{StoreAccess, StoreUse};
use crate::transfer::{
    BackupHeader, BackupWriter, CheckedBackup, KeyFilter, Overwrite, Row, RowBatch, Sink, Source, WrittenBackup,
    group_by_size, run_blocking, transfer_rows,
};

#[derive(Debug, Args)]
pub(crate) struct Backup {
    /// Backup file to write
    pub(crate) file: PathBuf,

    /// Overwrite an existing file
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Serialize)]
struct BackupJson {
    file: String,
    revision: i64,
    keys: u64,
    bytes: u64,
}

#[async_trait(?Send)]
impl StoreCommand for Backup {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let (path, overwrite) = (self.file.clone(), if self.force { Overwrite::Allowed } else { Overwrite::Never });
        let writer = run_blocking(move || BackupWriter::create(&path, overwrite)).await?;
        let WrittenBackup { revision, keys, bytes, .. } = WrittenBackup::of(at, KeyFilter::All, writer).await?;
        let file = self.file.display().to_string();
        let text = format!(
            "Successfully backed up {at} at revision {revision} to {file}: {} keys, {}",
            HumanCount(keys),
            HumanBytes(bytes)
        );
        CommandAnswer::new(text, &BackupJson { file, revision: revision.get(), keys, bytes })
    }
}

#[derive(Debug, Args)]
pub(crate) struct Restore {
    /// The backup
    pub(crate) file: PathBuf,

    /// Replace an existing store that has keys or is damaged; its folder is moved aside
    #[arg(long)]
    pub(crate) replace: bool,

    /// Dry run: do all checks, but write nothing to the store
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Serialize)]
struct RestoredJson {
    store: String,
    /// The id of the restored store, or `None` in a dry run.
    id: Option<String>,
    keys: u64,
    backup_revision: i64,
    backup_time: String,
    replaced: Option<String>,
}

#[async_trait(?Send)]
impl StoreCommand for Restore {
    fn only_embedded(&self, drivers: &Drivers) -> Option<(&'static str, String)> {
        let instead = format!(
            "restore an etcd cluster with: etcdctl snapshot restore (etcdutl since 3.6); restore Margay's backup to {}",
            drivers.local_names("", "")
        );
        Some(("restore", instead))
    }

    fn progress_text(&self) -> Option<&'static str> {
        Some("restoring")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        // The whole backup file is checked before the restored store is created.
        let file = CheckedBackup::of(&self.file).await?;
        let seen = if self.replace { None } else { Some(newest_of_empty(at).await?) };
        let failed = |error| at.explain(error);
        if self.dry_run {
            check_creatable(at.location).await.map_err(failed)?;
            return restored_answer(at, RestoredStore { file, id: None, aside: None }).map(CommandAnswer::into_dry_run);
        }
        if file.header.leases.is_some() {
            refuse_older_plugins()?;
        }
        let staging = StoreStaging::begin(at.location).await.map_err(failed)?;
        let (staging, held) = staging.hold(at.wait).await.map_err(failed)?;
        if let (Some(seen), Some(held)) = (seen, &held)
            && held.newest_revision().map_err(failed)? > seen
        {
            return Err(not_empty(at, "it was written to meanwhile"));
        }
        let id = fill_new_store(at.other(&staging.location()), &file).await?;
        let aside = staging.finish(held).await.map_err(failed)?.map(|path| path.display().to_string());
        restored_answer(at, RestoredStore { file, id: Some(id), aside })
    }
}

struct RestoredStore {
    file: CheckedBackup,
    id: Option<String>,
    /// The folder to which the former store was moved, if there was a former store.
    aside: Option<String>,
}

fn restored_answer(at: StoreAccess<'_>, done: RestoredStore) -> CommandResult<CommandAnswer> {
    let RestoredStore { file, id, aside } = done;
    let (path, keys) = (file.path(), file.keys);
    let BackupHeader { revision, time, engine, .. } = file.header;
    let text = format!(
        "Successfully restored {at} from {path}: {} keys of revision {revision} of a {engine} store, read at {time}",
        HumanCount(keys)
    );
    let json = RestoredJson {
        store: at.to_string(),
        id,
        keys,
        backup_revision: revision,
        backup_time: time.clone(),
        replaced: aside.clone(),
    };
    let mut answer = CommandAnswer::new(text, &json)?;
    if let Some(aside) = aside {
        answer = answer.note(format!("what was there is in {aside} now: remove it when you do not need it"));
    }
    Ok(answer.note(format!(
        "addresses that were assigned after {time} are free in this store and will be assigned again: start anew \
         every container that is younger"
    )))
}

/// Returns the newest revision of a store that has no keys, or 1 if the store does not exist. Fails if the store has
/// keys.
async fn newest_of_empty(at: StoreAccess<'_>) -> CommandResult<u64> {
    let open = match datastore::open(at.location, &Create::Never.with_wait(at.wait)).await {
        Ok(open) => open,
        // If the creation of the store was interrupted, the store may already have revision 1.
        Err(error) if *error.kind() == ErrorKind::Missing => return Ok(1),
        Err(error) => return Err(at.explain(error)),
    };
    let status = open.embedded().map(maintenance::MvccStore::status);
    open.close().await.map_err(|error| at.explain(error))?;
    match status {
        Some(status) if status.live == 0 => Ok(u64::try_from(status.revision.get()).unwrap_or_default().max(1)),
        Some(status) => Err(not_empty(at, &format!("it has {} keys", HumanCount(status.live)))),
        None => Err(CommandFailure::new(format!("{at} cannot be restored"))),
    }
}

fn not_empty(at: StoreAccess<'_>, why: &str) -> CommandFailure {
    CommandFailure::new(format!("there is a store at {at} already: {why}"))
        .hint("use --replace to move the existing store aside and restore the backup in its place; nothing was changed")
}

/// Creates a store from a backup file, and returns the id of the new store.
async fn fill_new_store(at: StoreAccess<'_>, file: &CheckedBackup) -> CommandResult<String> {
    if file.header.leases.is_some() {
        maintenance::create(at.location, FORMAT_WITH_LEASES, at.wait).await.map_err(|error| at.explain(error))?;
    }
    let open = at.open_files(StoreUse::Make).await?;
    at.run_and_close(open, async |open: &OpenStore| {
        let Some(embedded) = open.embedded() else {
            return Err(CommandFailure::new(format!("{at} cannot be restored")));
        };
        let mut source = Source::File(Box::new(file.rows(None).await?));
        let pumped = transfer_rows(&mut source, &mut NewStore { at, embedded, path: file.path() }).await;
        pumped.map_err(|stop| stop.of_a_file(file))?;
        Ok(embedded.id().to_string())
    })
    .await
}

/// A sink that writes to a new store, which other processes cannot reach yet.
struct NewStore<'s> {
    at: StoreAccess<'s>,
    embedded: &'s maintenance::MvccStore,
    /// The backup file's path, which error messages show.
    path: String,
}

impl Sink for NewStore<'_> {
    async fn begin(&mut self, header: BackupHeader) -> CommandResult<()> {
        for lease in header.leases.into_iter().flatten() {
            let damaged = || CommandFailure::new(format!("{} is damaged: it has a lease that cannot be", self.path));
            let lease = lease.read().ok_or_else(|| damaged().hint("use another backup; nothing was changed"))?;
            self.embedded.grant(lease).await.map_err(|error| self.at.explain(error))?;
        }
        Ok(())
    }

    async fn take(&mut self, part: RowBatch) -> CommandResult<()> {
        // Only one transaction is committed at a time, because sled would need gigabytes of memory for larger commits.
        for rows in group_by_size(part.rows, MAX_TXN_OPS, |row| row.key.as_bytes().len() + row.value.len()) {
            let put = |Row { key, value, lease }| Op::Put { key, value, prev: Prev::Omit, lease };
            let txn = Txn::new().with_success(rows.into_iter().map(put));
            self.embedded.txn(txn).await.map_err(|error| self.at.explain(error))?;
        }
        Ok(())
    }
}
