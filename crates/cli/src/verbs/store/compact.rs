//! `margay store compact`.

use datastore::Location;
use datastore::care::{self, Room};
use indicatif::HumanBytes;
use kv::{ErrorKind, Revision, Store};
use serde::Serialize;

use super::args::Compact;
use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::store::{self, Use, explain, wait};

#[derive(Serialize)]
struct Json {
    before: Extent,
    after: Extent,
}

/// The extent of a store's history.
#[derive(Serialize)]
struct Extent {
    oldest_revision: i64,
    /// The length of the log in bytes; unknown after a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    log_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

pub(super) async fn run(location: &Location, args: &Compact) -> Result<Answer> {
    super::refuse_cluster(
        location,
        "compact",
        "an etcd's history is that of all who use it; see etcd's --auto-compaction-retention, etcdctl compact and \
         etcdctl defrag",
    )?;
    let failed = |error| explain(location, error);
    let open = store::open_files(location, Use::Release).await?;
    let Some(embedded) = open.embedded() else {
        return Err(Failure::new(format!("{location} has no history to give up")));
    };
    let revision = embedded.status().revision;
    let extent = async || {
        let oldest_revision = embedded.oldest().await.map_err(failed)?.revision.get();
        let bytes = Some(care::glance(location).await.map_err(failed)?.bytes);
        Ok::<_, Failure>(Extent { oldest_revision, log_bytes: Some(embedded.status().log_bytes), bytes })
    };
    let before = extent().await?;
    let keep = i64::try_from(args.keep.get()).unwrap_or(i64::MAX);
    let mark = Revision::new(revision.get().saturating_sub(keep - 1).max(1));
    if args.dry_run {
        open.close().await.map_err(failed)?;
        return would_compact(location, before, mark, revision);
    }
    match embedded.compact(mark).await {
        Ok(()) => {}
        // That history was removed before.
        Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => {}
        Err(error) => return Err(failed(error)),
    }
    let mut after = extent().await?;
    open.close().await.map_err(failed)?;
    let room = care::shrink(location, wait()).await.map_err(failed)?;
    after.bytes = Some(care::glance(location).await.map_err(failed)?.bytes);
    let text = format!(
        "Successfully compacted {location}\n\
         oldest revision: {} -> {}, the newest is {revision}\n\
         log:             {} -> {}\n\
         on disk:         {} -> {}",
        before.oldest_revision,
        after.oldest_revision,
        size(before.log_bytes),
        size(after.log_bytes),
        size(before.bytes),
        size(after.bytes),
    );
    let answer = Answer::new(text, &Json { before, after })?;
    Ok(match room {
        Room::GivenBack => answer,
        Room::Kept => answer.note(
            "this engine keeps the room in its files and uses it again; a backup that is restored with --replace is as \
             small as can be",
        ),
    })
}

fn size(bytes: Option<u64>) -> HumanBytes {
    HumanBytes(bytes.unwrap_or_default())
}

/// The history that would be removed; the room that it frees is known only afterwards.
fn would_compact(location: &Location, before: Extent, mark: Revision, newest: Revision) -> Result<Answer> {
    let oldest_revision = before.oldest_revision.max(mark.get());
    let text = format!(
        "Successfully compacted {location}\noldest revision: {} -> {oldest_revision}, the newest is {newest}",
        before.oldest_revision
    );
    let after = Extent { oldest_revision, log_bytes: None, bytes: None };
    Ok(Answer::new(text, &Json { before, after })?.of_a_dry_run())
}
