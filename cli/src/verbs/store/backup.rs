//! `margay store backup`.
//!
//! The whole backup is of one revision, but it is read in turns, so that no plugin waits long: whoever has read for 20 ms
//! gives the store back as soon as somebody waits, and goes on at that revision when it has its turn again. Nothing is
//! written to the file while the store is held.

use std::time::{Duration, Instant, SystemTime};

use datastore::{Location, OpenStore, care};
use indicatif::{HumanBytes, HumanCount};
use kv::{ErrorKind, Kv, Range, RangeRequest, Revision};
use serde::Serialize;
use tokio::task::spawn_blocking;

use super::args::Backup;
use super::rfc3339;
use crate::answer::Answer;
use crate::backup::{CLUSTER_PREFIXES, Header, Overwrite, Writer};
use crate::error::{Failure, Result};
use crate::store::{self, Use, explain};

/// How long a turn lasts at least; then it ends when somebody waits.
const TURN: Duration = Duration::from_millis(20);
/// How many bytes of values are read before they are written to the file. What is read is in memory.
const TURN_BYTES: usize = 16 << 20;
/// How many bytes of values a page should have.
const PAGE_BYTES: usize = 1 << 20;
/// How many keys a page of a cluster has at first, and at most. A block can have more than a megabyte.
const FIRST_PAGE_KEYS: i64 = 16;
const PAGE_KEYS: i64 = 1024;
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
    rest: Vec<Range>,
    /// How many keys to ask a cluster for at a time.
    limit: i64,
}

impl Place {
    fn first(location: &Location) -> Self {
        let mut rest = match location {
            Location::Etcd(_) => CLUSTER_PREFIXES.map(Range::prefix).to_vec(),
            _ => vec![Range::All],
        };
        rest.reverse();
        Self { at: Revision::UNSET, id: None, header: None, rest, limit: FIRST_PAGE_KEYS }
    }

    /// Reads the next page.
    async fn page(&mut self, open: &OpenStore, range: &Range) -> kv::Result<Vec<Kv>> {
        if let Some(store) = open.embedded() {
            let page = store.page(range.bounds().0, self.at, PAGE_BYTES).await?;
            self.at = page.at;
            self.rest.extend(page.next.map(Range::From));
            return Ok(page.kvs);
        }
        let request = RangeRequest::new(range.clone()).with_at(self.at).with_limit(self.limit);
        let page = open.store().range(request).await?;
        if !self.at.is_set() {
            self.at = page.revision;
        }
        let size: usize = page.kvs.iter().map(size).sum();
        self.limit = if size > PAGE_BYTES { self.limit / 2 } else { self.limit * 2 }.clamp(1, PAGE_KEYS);
        if let (Some(last), true) = (page.kvs.last(), page.more) {
            let from = last.key.successor();
            self.rest.push(match range.bounds().1 {
                Some(end) => Range::FromTo(from, end),
                None => Range::From(from),
            });
        }
        Ok(page.kvs)
    }
}

fn size(kv: &Kv) -> usize {
    kv.key.as_bytes().len() + kv.value.len()
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
    let open = store::open(location, Use::Existing).await?;
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
    let (began, mut bytes) = (Instant::now(), 0);
    while let Some(range) = place.rest.pop() {
        let page = place.page(open, &range).await.map_err(|error| match error.kind() {
            ErrorKind::Compacted { .. } => Stop::Overtaken,
            _ => Stop::Failed(explain(location, error)),
        })?;
        if place.id.is_none() {
            place.id = Some(id.clone());
            place.header = Some(Header::new(engine, &id, place.at.get(), rfc3339(SystemTime::now())));
        }
        bytes += page.iter().map(size).sum::<usize>();
        pages.push(page);
        let over = bytes >= TURN_BYTES || (began.elapsed() >= TURN && somebody_waits(location).await?);
        if over && !place.rest.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
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
