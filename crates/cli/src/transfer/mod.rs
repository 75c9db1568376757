//! The ways of documents from one place to another: a [`Source`] gives them part by part, a filter leaves out what is
//! none of IPAM's, and a [`Sink`] takes them.
//!
//! | | source | filter | sink |
//! |---|---|---|---|
//! | `store backup` | store | | file |
//! | `export` | store | IPAM's | file |
//! | `store restore` | file | | new store |
//! | `import` | file | IPAM's, nodes renamed | marked store, empty before |
//! | `migrate` | store | IPAM's | marked store, made equal |
//!
//! A store is read at one revision. A store that is filled while others can reach it is marked: the mark refuses plugins,
//! and says with which command a run that was broken off goes on.

mod filling;
mod format;
mod plan;
mod reader;
mod snapshot;
mod sum;
mod target;
mod writer;

use std::time::SystemTime;

use ipam_operator::moving::{mark_key, ranges};
use kv::{Key, LeaseId, Range, Revision, Value};
use tokio::task::spawn_blocking;

use crate::error::{Failure, Result};
use crate::output::rfc3339;
use crate::store::StoreAt;
pub(crate) use filling::{Differences, Filling, Work};
pub(crate) use format::Header;
pub(crate) use plan::Plan;
pub(crate) use reader::{Checked, Rows};
pub(crate) use snapshot::{Identity, Snapshot, identity};
pub(crate) use target::Target;
pub(crate) use writer::{Overwrite, Writer, Written};

/// The prefixes that the backup of a cluster has: Calico's and Margay's keys, not those of other users. Ascending.
pub(crate) const CLUSTER_PREFIXES: [&str; 2] = ["/calico/", "/margay/"];

/// The number of attempts: the history of a revision can be removed before all of it was read.
const ATTEMPTS: usize = 5;
/// The most bytes that one transaction writes, unless one value alone is longer.
const TXN_BYTES: usize = 1_000_000;

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) key: Key,
    pub(crate) value: Value,
    pub(crate) lease: Option<LeaseId>,
}

/// Some rows, ascending.
pub(crate) struct Part {
    pub(crate) rows: Vec<Row>,
    /// True if no other part follows.
    pub(crate) is_last: bool,
}

/// The part of a store's keys that a command moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    /// All keys; of a cluster those that are Calico's and Margay's.
    All,
    /// IPAM's documents. A store that is itself being filled is refused.
    Ipam,
}

/// The place that rows come from.
pub(crate) enum Source<'l> {
    Store(Box<Snapshot<'l>>, Filter),
    File(Box<Rows>),
}

impl<'l> Source<'l> {
    /// A store, at a revision or, if that is unset, at the newest one.
    pub(crate) fn store(at: StoreAt<'l>, filter: Filter, revision: Revision) -> Self {
        let ranges = match filter {
            Filter::All if at.location.is_shared() => CLUSTER_PREFIXES.map(Range::prefix).to_vec(),
            Filter::All => vec![Range::All],
            Filter::Ipam => ranges(),
        };
        Self::Store(Box::new(Snapshot::of(at, ranges).at(revision)), filter)
    }

    /// The next part.
    async fn next(&mut self) -> Result<Part, Stop> {
        match self {
            Self::Store(snapshot, filter) => {
                let kvs = snapshot.batch().await?.unwrap_or_default();
                let mark = mark_key();
                if *filter == Filter::Ipam && kvs.iter().any(|kv| kv.key == mark) {
                    return Err(marked(&snapshot.store().to_string()).into());
                }
                let row = |kv: kv::Kv| Row { key: kv.key, value: kv.value, lease: kv.lease };
                Ok(Part { rows: kvs.into_iter().map(row).collect(), is_last: snapshot.is_over() })
            }
            Self::File(rows) => Ok(rows.next().await?),
        }
    }

    /// The description of the source; of a store known after the first part.
    fn header(&self) -> Option<Header> {
        match self {
            Self::Store(snapshot, _) => {
                let (about, revision) = (snapshot.identity()?, snapshot.revision().get());
                Some(Header::new(about, revision, rfc3339(SystemTime::now())))
            }
            Self::File(rows) => Some(rows.header().clone()),
        }
    }

    /// The revision of a store; unset before the first part, and for a file.
    pub(crate) fn revision(&self) -> Revision {
        match self {
            Self::Store(snapshot, _) => snapshot.revision(),
            Self::File(_) => Revision::UNSET,
        }
    }
}

/// The place that rows go to.
pub(crate) trait Sink {
    /// Prepares for the rows of a source with this description.
    async fn begin(&mut self, header: Header) -> Result<()>;

    /// Takes the next part.
    async fn take(&mut self, part: Part) -> Result<()>;
}

/// Moves all rows. While one part is taken, the next one is read.
pub(crate) async fn pump(source: &mut Source<'_>, sink: &mut impl Sink) -> Result<(), Stop> {
    let mut next = Some(source.next().await?);
    if let Some(header) = source.header() {
        sink.begin(header).await?;
    }
    while let Some(part) = next {
        let is_last = part.is_last;
        let read = async { if is_last { Ok(None) } else { source.next().await.map(Some) } };
        let (taken, read) = futures::join!(sink.take(part), read);
        taken?;
        next = read?;
    }
    Ok(())
}

/// Why a source ended early.
pub(crate) enum Stop {
    /// The history of the revision was removed.
    Overtaken,
    /// The source or the sink failed.
    Failed(Failure),
}

impl Stop {
    /// The failure of a way from a file.
    pub(crate) fn of_a_file(self, file: &Checked) -> Failure {
        match self {
            Self::Overtaken => Failure::new(format!("{} cannot be read any more", file.path())),
            Self::Failed(failure) => failure,
        }
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Reads a store at one revision, with several attempts, as its history can be removed meanwhile.
pub(crate) async fn at_one_revision<T>(
    at: StoreAt<'_>,
    mut attempt: impl AsyncFnMut() -> Result<T, Stop>,
) -> Result<T> {
    for _ in 0..ATTEMPTS {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(Stop::Overtaken) => {}
            Err(Stop::Failed(failure)) => return Err(failure),
        }
    }
    Err(too_fast(at, &format!("{ATTEMPTS} times"), "try again when fewer containers are started and stopped"))
}

/// The failure for a store whose history was removed before it was read.
fn too_fast(at: StoreAt<'_>, times: &str, hint: &str) -> Failure {
    Failure::new(format!("{at} changes faster than it can be read: its history was given up {times}")).hint(hint)
}

/// The refusal of a source that is itself being filled.
fn marked(what: &str) -> Failure {
    Failure::new(format!("{what} is itself the target of a migration or an import that is not finished"))
        .hint("finish that first, or end it with --abort; nothing was changed")
}

/// Groups things that one transaction writes each: at most `most`, and no more bytes than one should write.
pub(crate) fn grouped<T>(things: impl IntoIterator<Item = T>, most: usize, size: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let (mut groups, mut group, mut bytes) = (Vec::new(), Vec::new(), 0);
    for thing in things {
        let more = size(&thing);
        if group.len() == most || (bytes + more > TXN_BYTES && !group.is_empty()) {
            groups.push(std::mem::take(&mut group));
            bytes = 0;
        }
        bytes += more;
        group.push(thing);
    }
    groups.extend((!group.is_empty()).then_some(group));
    groups
}

/// Does blocking work on another thread.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(Failure::new(error)))
}
