//! `margay store compact`.

use std::num::NonZeroU64;

use async_trait::async_trait;
use clap::Args;
use datastore::Drivers;
use datastore::care::{self, Room};
use indicatif::HumanBytes;
use kv::{ErrorKind, Revision, Store};
use serde::Serialize;

use crate::answer::Answer;
use crate::command::OnStore;
use crate::error::{Failure, Result};
use crate::store::{Need, StoreAt};

#[derive(Debug, Args)]
pub(crate) struct Compact {
    /// How many revisions stay readable, the newest one included
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) keep: NonZeroU64,

    /// Only say what would be given up
    #[arg(long)]
    pub(crate) dry_run: bool,
}

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

#[async_trait(?Send)]
impl OnStore for Compact {
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        let instead = "an etcd's history is that of all who use it; see etcd's --auto-compaction-retention, etcdctl compact \
                       and etcdctl defrag";
        Some(("compact", instead.to_owned()))
    }

    fn doing(&self) -> Option<&'static str> {
        Some("compacting")
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let failed = |error| at.explain(error);
        let open = at.open_files(Need::Release).await?;
        let Some(embedded) = open.embedded() else {
            return Err(Failure::new(format!("{at} has no history to give up")));
        };
        let revision = embedded.status().revision;
        let extent = async || {
            let oldest_revision = embedded.oldest().await.map_err(failed)?.revision.get();
            let bytes = Some(care::glance(at.location).await.map_err(failed)?.bytes);
            Ok::<_, Failure>(Extent { oldest_revision, log_bytes: Some(embedded.status().log_bytes), bytes })
        };
        let before = extent().await?;
        let keep = i64::try_from(self.keep.get()).unwrap_or(i64::MAX);
        let mark = Revision::new(revision.get().saturating_sub(keep - 1).max(1));
        if self.dry_run {
            open.close().await.map_err(failed)?;
            return would_compact(at, before, mark, revision);
        }
        match embedded.compact(mark).await {
            Ok(()) => {}
            // That history was removed before.
            Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => {}
            Err(error) => return Err(failed(error)),
        }
        let mut after = extent().await?;
        open.close().await.map_err(failed)?;
        let room = care::shrink(at.location, at.wait).await.map_err(failed)?;
        after.bytes = Some(care::glance(at.location).await.map_err(failed)?.bytes);
        let text = format!(
            "Successfully compacted {at}\n\
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
}

fn size(bytes: Option<u64>) -> HumanBytes {
    HumanBytes(bytes.unwrap_or_default())
}

/// The history that would be removed; the room that it frees is known only afterwards.
fn would_compact(at: StoreAt<'_>, before: Extent, mark: Revision, newest: Revision) -> Result<Answer> {
    let oldest_revision = before.oldest_revision.max(mark.get());
    let text = format!(
        "Successfully compacted {at}\noldest revision: {} -> {oldest_revision}, the newest is {newest}",
        before.oldest_revision
    );
    let after = Extent { oldest_revision, log_bytes: None, bytes: None };
    Ok(Answer::new(text, &Json { before, after })?.of_a_dry_run())
}
