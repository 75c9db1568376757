//! Copying a part of a store to a file. Another thread writes the file: the store is open only while it is read.

use std::time::SystemTime;

use datastore::Location;
use kv::{Kv, Range};

use super::snapshot::{Snapshot, Stop, aside};
use super::{Header, Writer};
use crate::error::{Failure, Result};
use crate::output::{Progress, rfc3339};

/// The number of attempts: the history of a revision can be removed before all of it was read.
const ATTEMPTS: usize = 5;

/// The outcome of a copy.
pub(crate) struct Copied {
    /// The revision.
    pub(crate) revision: i64,
    /// The number of keys.
    pub(crate) keys: u64,
    /// The length of the file in bytes.
    pub(crate) bytes: u64,
}

/// Copies these ranges, which ascend, at one revision. `check` gets every key and may refuse it.
pub(crate) async fn copy(
    location: &Location,
    ranges: Vec<Range>,
    mut writer: Writer,
    mut check: impl FnMut(&Kv) -> Result<()>,
) -> Result<Copied> {
    let progress = Progress::new("reading", None);
    let attempts = if writer.can_begin_anew() { ATTEMPTS } else { 1 };
    for _ in 0..attempts {
        let (given_back, copied) = attempt(location, ranges.clone(), writer, &mut check, &progress).await?;
        writer = given_back;
        let Some((revision, keys)) = copied else { continue };
        let bytes = aside(move || writer.finish()).await?;
        return Ok(Copied { revision, keys, bytes });
    }
    let times = if attempts == 1 { "once".to_owned() } else { format!("{attempts} times") };
    Err(Failure::new(format!("{location} changes faster than it can be read: its history was given up {times}"))
        .hint("try again when fewer containers are started and stopped; to a file it is read faster than to a pipe"))
}

/// Copies one revision. Returns its number and its number of keys, or `None` if its history was removed meanwhile.
async fn attempt(
    location: &Location,
    ranges: Vec<Range>,
    mut writer: Writer,
    check: &mut impl FnMut(&Kv) -> Result<()>,
    progress: &Progress,
) -> Result<(Writer, Option<(i64, u64)>)> {
    let mut snapshot = Snapshot::of(location, ranges);
    let (mut keys, mut begun) = (0, false);
    let mut read = snapshot.batch().await;
    loop {
        let rows = match read {
            Ok(Some(rows)) => rows,
            Ok(None) => return Ok((writer, Some((snapshot.revision().get(), keys)))),
            Err(Stop::Overtaken) => return Ok((writer, None)),
            Err(Stop::Failed(failure)) => return Err(failure),
        };
        keys += rows.len() as u64;
        progress.at(keys);
        rows.iter().try_for_each(&mut *check)?;
        let revision = snapshot.revision().get();
        let header = snapshot
            .identity()
            .filter(|_| !begun)
            .map(|about| Header::new(about, revision, rfc3339(SystemTime::now())));
        begun = true;
        // One part is written while the next one is read.
        let write = aside(move || {
            if let Some(header) = header {
                writer.begin(&header)?;
            }
            writer.rows(&rows)?;
            Ok(writer)
        });
        let (written, next) = futures::join!(write, snapshot.batch());
        (writer, read) = (written?, next);
    }
}
