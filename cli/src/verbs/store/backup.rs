//! `margay store backup`.
//!
//! The whole backup is of one revision, but it is read in turns, so that no plugin waits long: whoever has read for 20 ms
//! gives the store back as soon as somebody waits, and goes on at that revision when it has its turn again. Nothing is
//! written to the file while the store is held.

use std::time::{Duration, Instant, SystemTime};

use datastore::{Create, Location, OpenStore, care};
use indicatif::{HumanBytes, HumanCount};
use kv::{ErrorKind, Kv, Range, RangeRequest, Revision};
use serde::Serialize;
use tokio::task::spawn_blocking;

use super::args::Backup;
use super::rfc3339;
use crate::answer::Answer;
use crate::backup::{CLUSTER_PREFIXES, Header, Overwrite, Writer};
use crate::error::{Failure, Result};
use crate::store::{self, explain};

/// How long a turn lasts at least; then it ends when somebody waits.
const TURN: Duration = Duration::from_millis(20);
/// How many bytes of values are read before they are written to the file. What is read is in memory.
const TURN_BYTES: usize = 16 << 20;
/// How many bytes of values a page should have.
const PAGE_BYTES: usize = 1 << 20;
/// How many keys a page has at most. A block of 4096 addresses can have more than a megabyte.
const PAGE_KEYS: i64 = 128;
/// How often to begin anew when the revision is given up before all of it was read.
const ATTEMPTS: usize = 5;

#[derive(Serialize)]
struct Json {
    file: String,
    revision: i64,
    keys: u64,
    bytes: u64,
}

pub(super) async fn run(location: &Location, args: &Backup) -> Result<Answer> {
    let (path, overwrite) = (args.file.clone(), if args.force { Overwrite::Allowed } else { Overwrite::Never });
    let mut writer = aside(move || Writer::create(&path, overwrite)).await?;
    for _ in 0..ATTEMPTS {
        let (given_back, copied) = copy(location, writer).await?;
        writer = given_back;
        let Some((revision, keys)) = copied else { continue };
        let bytes = aside(move || writer.finish()).await?;
        let file = args.file.display().to_string();
        let text = format!(
            "Successfully backed up {location} at revision {revision} to {file}: {} keys, {}",
            HumanCount(keys),
            HumanBytes(bytes)
        );
        return Answer::new(text, &Json { file, revision, keys, bytes });
    }
    Err(Failure::new(format!(
        "{location} changes faster than it can be read: its history was given up {ATTEMPTS} times"
    ))
    .hint("try again when fewer containers are started and stopped"))
}

/// Copies one revision, and returns which and how many keys; nothing if its history was given up meanwhile.
async fn copy(location: &Location, mut writer: Writer) -> Result<(Writer, Option<(i64, u64)>)> {
    let mut place = Place::first(location);
    let mut keys = 0;
    loop {
        let mut pages = Vec::new();
        let done = match turn(location, &mut place, &mut pages).await {
            Ok(done) => done,
            Err(Stop::Overtaken) => return Ok((writer, None)),
            Err(Stop::Failed(failure)) => return Err(failure),
        };
        keys += pages.iter().map(|page: &Vec<Kv>| page.len() as u64).sum::<u64>();
        let header = place.header.take();
        writer = aside(move || {
            if let Some(header) = header {
                writer.begin(&header)?;
            }
            pages.iter().try_for_each(|page| writer.rows(page))?;
            Ok(writer)
        })
        .await?;
        if done {
            return Ok((writer, Some((place.at.get(), keys))));
        }
    }
}

/// Where a copy has come to.
struct Place {
    /// The revision; unset before the first turn.
    at: Revision,
    /// Which store that is.
    id: Option<String>,
    /// What the first turn has found out, until it is written.
    header: Option<Header>,
    /// What is still to be read.
    ranges: std::vec::IntoIter<Range>,
    range: Option<Range>,
    /// How many keys to read at a time.
    limit: i64,
}

impl Place {
    fn first(location: &Location) -> Self {
        let ranges = match location {
            Location::Etcd(_) => CLUSTER_PREFIXES.map(Range::prefix).to_vec(),
            _ => vec![Range::All],
        };
        let mut ranges = ranges.into_iter();
        let range = ranges.next();
        Self { at: Revision::UNSET, id: None, header: None, ranges, range, limit: PAGE_KEYS / 8 }
    }
}

/// Why a turn ended before its time.
enum Stop {
    /// The revision cannot be read any more.
    Overtaken,
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Reads for one turn; true if that was all.
async fn turn(location: &Location, place: &mut Place, pages: &mut Vec<Vec<Kv>>) -> Result<bool, Stop> {
    let open = store::open(location, Create::Never).await?;
    let result = read(location, &open, place, pages).await;
    let closed = open.close().await.map_err(|error| explain(location, error));
    let done = result?;
    closed?;
    Ok(done)
}

async fn read(
    location: &Location,
    open: &OpenStore,
    place: &mut Place,
    pages: &mut Vec<Vec<Kv>>,
) -> Result<bool, Stop> {
    let (engine, id) = identity(location, open).await?;
    if place.id.as_ref().is_some_and(|known| *known != id) {
        return Err(Failure::new(format!("{location} was replaced by another store meanwhile"))
            .hint("try again")
            .into());
    }
    let (store, began, mut bytes) = (open.store(), Instant::now(), 0);
    while let Some(range) = place.range.take() {
        let request = RangeRequest::new(range.clone()).with_at(place.at).with_limit(place.limit);
        let page = store.range(request).await.map_err(|error| match error.kind() {
            ErrorKind::Compacted { .. } => Stop::Overtaken,
            _ => Stop::Failed(explain(location, error)),
        })?;
        if place.id.is_none() {
            place.at = page.revision;
            place.id = Some(id.clone());
            place.header = Some(Header::new(engine, &id, place.at.get(), rfc3339(SystemTime::now())));
        }
        place.range = match page.kvs.last() {
            Some(last) if page.more => Some(after(&last.key, &range)),
            _ => place.ranges.next(),
        };
        let size = page.kvs.iter().map(|kv| kv.key.as_bytes().len() + kv.value.len()).sum::<usize>();
        place.limit = if size > PAGE_BYTES { place.limit / 2 } else { place.limit * 2 }.clamp(1, PAGE_KEYS);
        bytes += size;
        pages.push(page.kvs);
        if place.range.is_some()
            && (bytes >= TURN_BYTES || (began.elapsed() >= TURN && somebody_waits(location).await?))
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What comes after a key in a range.
fn after(key: &kv::Key, range: &Range) -> Range {
    match range.bounds().1 {
        Some(end) => Range::FromTo(key.successor(), end),
        None => Range::From(key.successor()),
    }
}

async fn somebody_waits(location: &Location) -> Result<bool> {
    Ok(care::waiting(location).await.map_err(|error| explain(location, error))? > 0)
}

/// The engine and the id of a store.
async fn identity(location: &Location, open: &OpenStore) -> Result<(&'static str, String)> {
    if let Some(etcd) = open.etcd() {
        let about = etcd.about().await.map_err(|error| explain(location, error))?;
        return Ok(("etcd", format!("{:x}", about.cluster)));
    }
    let id = open.embedded().map(|store| store.id().to_string()).unwrap_or_default();
    Ok((if matches!(location, Location::Redb(_)) { "redb" } else { "sled" }, id))
}

/// Does what blocks where that is no harm.
pub(super) async fn aside<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(Failure::new(error)))
}
