//! Copies all IPAM documents of a store to another store, for the command `margay migrate`.

use clap::Args;
use datastore::OpenStore;
use ipam_operator::moving::{DocumentCounts, ImportLock, ImportState, MoveKind};
use kv::Revision;
use serde::Serialize;

use crate::command::{CommandAnswer, Invocation, StandaloneCommand, runtime};
use crate::error::{CommandFailure, CommandResult};
use crate::store::{StoreAccess, StoreUse};
use crate::transfer::{
    Differences, FillMode, KeyFilter, Source, StoreIdentity, Target, TargetFiller, TransferStop, read_identity,
    retry_at_one_revision,
};

pub(crate) const HELP: &str = "\
Examples:
  margay migrate sled:///var/lib/margay/ipam.sled etcd://10.0.0.1:2379
  margay migrate sled:///var/lib/margay/ipam.sled etcd://10.0.0.1:2379 --finish

1. Without --finish all is copied and compared. Plugins continue to use FROM; on
   TO they are refused. A repeated run brings TO up to date.
2. Stop the runtime, so that nothing changes any more, and run it once more.
3. --finish compares once more, refuses if anything differs, and opens TO.
4. Name TO in the network's configuration and start the runtime.

FROM is never written to. Calico's own programs do not notice that TO must not
be used yet. The login and the certificates are the same for both.";

#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// URL of the store to copy
    #[arg(value_name = "FROM")]
    pub(crate) from: String,

    /// URL of the store to copy to
    #[arg(value_name = "TO")]
    pub(crate) to: String,

    /// Finish the migration: if both stores have the same content, let plugins use the target store
    #[arg(long, conflicts_with = "abort")]
    pub(crate) finish: bool,

    /// Cancel the migration: delete the copied data from the target store, so that the store can be used for something
    /// else
    #[arg(long)]
    pub(crate) abort: bool,

    /// Show what would be done, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Serialize)]
struct MigrationJson {
    from: String,
    to: String,
    dry_run: bool,
    finished: bool,
    revision: i64,
    new: u64,
    changed: u64,
    gone: u64,
    kept: u64,
    #[serde(flatten)]
    tally: DocumentCounts,
}

#[derive(Serialize)]
struct RemovedJson {
    store: String,
    dry_run: bool,
    removed: u64,
}

/// The source and the target of a migration.
struct MigrationStores<'l> {
    from: StoreAccess<'l>,
    to: StoreAccess<'l>,
    source: StoreIdentity,
}

impl StandaloneCommand for Migrate {
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        if invocation.options.store.is_some() {
            return Err(CommandFailure::new("migrate takes both stores as arguments")
                .hint("leave out --store, and name both stores as arguments: margay migrate FROM TO"));
        }
        let (from, to) = (invocation.locate(Some(&self.from))?.location, invocation.locate(Some(&self.to))?.location);
        let answer = runtime()?.block_on(migrate(invocation.store_at(&from), invocation.store_at(&to), self))?;
        invocation.print(answer)?;
        Ok(0)
    }
}

async fn migrate(from: StoreAccess<'_>, to: StoreAccess<'_>, args: &Migrate) -> CommandResult<CommandAnswer> {
    if args.abort {
        return remove(to, MoveKind::Migrate, args.dry_run).await;
    }
    let stores = MigrationStores { from, to, source: read_source_identity(from).await? };
    let makes = !args.finish && !args.dry_run;
    let mut target = if makes { Target::make(to).await? } else { Target::inspect(to).await? };
    let done = match (args.finish, args.dry_run) {
        (true, dry_run) => stores.finish(&mut target, dry_run).await,
        (false, true) => stores.dry_run(&mut target).await,
        (false, false) => stores.copy(&mut target).await,
    };
    let closed = target.close().await;
    let answer = done?;
    closed?;
    Ok(answer)
}

async fn read_source_identity(from: StoreAccess<'_>) -> CommandResult<StoreIdentity> {
    let open = from.open_files(StoreUse::Read).await?;
    from.run_and_close(open, async |open: &OpenStore| read_identity(from, open).await).await
}

impl MigrationStores<'_> {
    /// Copies the documents of the source store at one revision to the target store, then reads the target store back
    /// and compares it with the source store.
    async fn copy(&self, target: &mut Target<'_>) -> CommandResult<CommandAnswer> {
        self.require_fillable(target).await?;
        match target.mark() {
            None => target.begin(self.mark(ImportState::Copying, 0)).await?,
            Some(mark) if mark.state == ImportState::Copied => {
                target.remark(self.mark(ImportState::Copying, mark.revision)).await?;
            }
            Some(_) => {}
        }
        retry_at_one_revision(self.from, async || {
            let (revision, written) = self.compare_or_fill(target, Revision::UNSET, FillMode::Update).await?;
            if !written.are_unchanged_in(target).await? {
                // The comparison with the source ignores the target store's own documents about the cluster, such as
                // nodes.
                let (_, compared) = self.compare_or_fill(target, revision, FillMode::Verify).await?;
                compared
                    .require_none(&self.to, "stop the programs that use the second store, and run the command again")?;
            }
            target.remark(self.mark(ImportState::Copied, revision.get())).await?;
            Ok(self.copied(revision, &written)?)
        })
        .await
    }

    fn copied(&self, revision: Revision, written: &Differences) -> CommandResult<CommandAnswer> {
        let Self { from, to, .. } = self;
        let text = format!(
            "Successfully copied {from} at revision {} to {to}: {}; {}. All of it was read back and is equal",
            revision.get(),
            written.tally,
            changes(written)
        );
        Ok(CommandAnswer::new(text, &self.json(revision, written, false, false))?.note(format!(
            "{to} refuses every plugin until: margay migrate {from} {to} --finish; stop the runtime before, and give the \
             same command once more to bring it up to date"
        )))
    }

    async fn dry_run(&self, target: &mut Target<'_>) -> CommandResult<CommandAnswer> {
        self.require_fillable(target).await?;
        if target.mark().is_none() {
            target.require_empty().await?;
        }
        let (revision, walked) = self.compare_newest(target).await?;
        let Self { from, to, .. } = self;
        let text =
            format!("Would copy {from} at revision {} to {to}: {}; {}", revision.get(), walked.tally, changes(&walked));
        CommandAnswer::new(text, &self.json(revision, &walked, true, false))
    }

    /// Allows plugins to use the target store, if it equals the source store.
    async fn finish(&self, target: &mut Target<'_>, dry_run: bool) -> CommandResult<CommandAnswer> {
        let Self { from, to, .. } = self;
        let Some(mark) = target.mark() else { return self.finished_already(target, dry_run).await };
        self.require_same(mark)?;
        if mark.state != ImportState::Copied {
            return Err(CommandFailure::new(format!("not all of {from} is in {to} yet"))
                .hint(format!("continue the migration with: {}", mark.command())));
        }
        let copied = mark.revision;
        let (revision, walked) = self.compare_newest(target).await?;
        if walked.total() > 0 {
            let count = walked.total();
            let differ = if count == 1 { "1 document differs".to_owned() } else { format!("{count} documents differ") };
            return Err(CommandFailure::new(format!(
                "{from} and {to} are not equal: {differ} since revision {copied} was copied:{}",
                walked.list_keys()
            ))
            .hint(format!(
                "stop the container runtime, and copy the latest changes with: margay migrate {from} {to}"
            )));
        }
        let json = self.json(revision, &walked, dry_run, !dry_run);
        if dry_run {
            return CommandAnswer::new(
                format!("Would open {to} for use: it is equal to {from}, {}", walked.tally),
                &json,
            );
        }
        let held = self.lock_source(revision).await?;
        let opened = target.unmark().await;
        if let Some(held) = held {
            held.close().await.map_err(|error| from.explain(error))?;
        }
        opened?;
        let text = format!("Successfully moved {from} at revision {} to {to}: {}", revision.get(), walked.tally);
        Ok(CommandAnswer::new(text, &json)?.note(format!(
            "name {to} in the network's configuration before the runtime starts again; {from} is as it was, and must not be \
             used any more"
        )))
    }

    /// Succeeds if an earlier run has already removed the import lock and the two stores are equal. Fails if the target
    /// store has no import lock and differs from the source store.
    async fn finished_already(&self, target: &mut Target<'_>, dry_run: bool) -> CommandResult<CommandAnswer> {
        let Self { from, to, .. } = self;
        let (revision, walked) = self.compare_newest(target).await?;
        if walked.total() > 0 || walked.tally.keys == 0 {
            return Err(CommandFailure::new(format!("{to} is not the target of a migration"))
                .hint(format!("start a migration with: margay migrate {from} {to}")));
        }
        let text = format!("{to} is open for use already: it is equal to {from}, {}", walked.tally);
        CommandAnswer::new(text, &self.json(revision, &walked, dry_run, true))
    }

    /// Locks an embedded source store until plugins can use the target store, so that no address is assigned in the
    /// source store any more. Fails if the source store has changed since `revision`. Returns `None` for a cluster,
    /// because a cluster cannot be locked.
    async fn lock_source(&self, revision: Revision) -> CommandResult<Option<OpenStore>> {
        if self.from.location.path().is_none() {
            return Ok(None);
        }
        let open = self.from.open_files(StoreUse::Read).await?;
        if open.embedded().is_some_and(|store| store.status().revision == revision) {
            return Ok(Some(open));
        }
        open.close().await.map_err(|error| self.from.explain(error))?;
        Err(CommandFailure::new(format!("{} was changed meanwhile; {} is not open for use yet", self.from, self.to))
            .hint(format!("stop the container runtime, and then run: margay migrate {} {}", self.from, self.to)))
    }

    /// Fails if the target store is the source store, or if another migration or an import has begun to fill it.
    async fn require_fillable(&self, target: &Target<'_>) -> CommandResult<()> {
        if target.identity().await?.as_ref() == Some(&self.source) {
            return Err(CommandFailure::new(format!("{} and {} are the same store", self.from, self.to))
                .hint("name two different stores"));
        }
        target.mark().map_or(Ok(()), |mark| self.require_same(mark))
    }

    /// Fails if another migration or an import has begun to fill the target store.
    fn require_same(&self, mark: &ImportLock) -> CommandResult<()> {
        let same =
            mark.way == MoveKind::Migrate && mark.source == self.source.id && mark.state != ImportState::Removing;
        if same {
            return Ok(());
        }
        Err(CommandFailure::new(format!("{} is being filled from {} already", self.to, mark.from))
            .hint(format!("continue the unfinished migration or import with: {}", mark.command())))
    }

    async fn compare_newest(&self, target: &mut Target<'_>) -> CommandResult<(Revision, Differences)> {
        retry_at_one_revision(self.from, async || self.compare_or_fill(target, Revision::UNSET, FillMode::DryRun).await)
            .await
    }

    /// Compares the source store at a revision with the target store. With [`FillMode::Fill`] or [`FillMode::Update`],
    /// the differences are also written to the target store.
    async fn compare_or_fill(
        &self,
        target: &mut Target<'_>,
        at: Revision,
        work: FillMode,
    ) -> Result<(Revision, Differences), TransferStop> {
        let mut source = Source::store(self.from, KeyFilter::Ipam, at);
        let found = TargetFiller::run(&mut source, target, work, None).await?;
        Ok((source.revision(), found))
    }

    fn mark(&self, state: ImportState, revision: i64) -> ImportLock {
        let (from, to) = (self.from.to_string(), self.to.to_string());
        ImportLock { way: MoveKind::Migrate, from, to, source: self.source.id.clone(), state, revision }
    }

    fn json(&self, revision: Revision, walked: &Differences, dry_run: bool, finished: bool) -> MigrationJson {
        MigrationJson {
            from: self.from.to_string(),
            to: self.to.to_string(),
            dry_run,
            finished,
            revision: revision.get(),
            new: walked.missing,
            changed: walked.different,
            gone: walked.extra,
            kept: walked.kept,
            tally: walked.tally.clone(),
        }
    }
}

fn changes(walked: &Differences) -> String {
    let mut text = format!("{} new, {} changed, {} gone", walked.missing, walked.different, walked.extra);
    if walked.kept > 0 {
        text.push_str(&format!(", {} nodes or the like that the target had already stay as they are", walked.kept));
    }
    text
}

/// Removes the documents that an unfinished migration or import has written, and then the import lock.
pub(super) async fn remove(at: StoreAccess<'_>, way: MoveKind, dry_run: bool) -> CommandResult<CommandAnswer> {
    let mut target = Target::inspect(at).await?;
    let removed = remove_from(&mut target, way, at, dry_run).await;
    let closed = target.close().await;
    let answer = removed?;
    closed?;
    Ok(answer)
}

async fn remove_from(
    target: &mut Target<'_>,
    way: MoveKind,
    at: StoreAccess<'_>,
    dry_run: bool,
) -> CommandResult<CommandAnswer> {
    let Some(mark) = target.mark().filter(|mark| mark.way == way).cloned() else {
        let what = if way == MoveKind::Import { "an import" } else { "a migration" };
        return Err(CommandFailure::new(format!("{at} is not the target of {what}"))
            .hint("name the target of an unfinished import or migration; nothing was changed"));
    };
    let store = at.to_string();
    if dry_run {
        let text = format!("Would remove from {at} what came from {}", mark.from);
        return CommandAnswer::new(text, &RemovedJson { store, dry_run, removed: 0 });
    }
    let from = mark.from.clone();
    target.remark(ImportLock { state: ImportState::Removing, ..mark }).await?;
    let removed = target.remove_written_keys().await?;
    target.unmark().await?;
    CommandAnswer::new(
        format!("Successfully removed {removed} keys that came from {from}: {at} is empty again"),
        &RemovedJson { store, dry_run, removed },
    )
}
