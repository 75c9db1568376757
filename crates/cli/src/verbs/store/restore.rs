//! `margay store restore`.
//!
//! The store is built in a folder beside its final one, and gets its name in one step when it is complete.

use std::path::Path;

use datastore::care::{self, FORMAT_WITH_LEASES, Staging, could_be_made};
use datastore::{Create, Location};
use indicatif::HumanCount;
use kv::{ErrorKind, MAX_TXN_OPS, Op, Prev, Store, Txn, Value};
use serde::Serialize;

use super::args::Restore;
use super::upgrade::refuse_older_plugins;
use crate::answer::Answer;
use crate::backup::{Header, Reader, aside};
use crate::error::{Failure, Result};
use crate::store::{self, Use, explain, wait};

/// The most bytes that one transaction writes, unless one value alone is longer.
const TXN_BYTES: usize = 1_000_000;
/// The number of bytes that are read at once.
const GROUP_BYTES: usize = 4 << 20;

#[derive(Serialize)]
struct Json {
    store: String,
    /// The id of the new store; a dry run has none.
    id: Option<String>,
    keys: u64,
    backup_revision: i64,
    backup_time: String,
    replaced: Option<String>,
}

pub(super) async fn run(location: &Location, args: &Restore) -> Result<Answer> {
    super::refuse_cluster(
        location,
        "restore",
        &format!(
            "to bring a whole etcd back: etcdctl snapshot restore (etcdutl since 3.6); a backup can be restored to {}",
            location.drivers().local_names("", "")
        ),
    )?;
    let file = args.file.clone();
    // The whole file is checked before anything is written.
    let (header, keys) = aside(move || Reader::check(&file)).await?;
    let seen = if args.replace { None } else { Some(newest_of_empty(location).await?) };
    let failed = |error| explain(location, error);
    if args.dry_run {
        could_be_made(location).await.map_err(failed)?;
        return answer(location, args, Restored { header, keys, id: None, aside: None }).map(Answer::of_a_dry_run);
    }
    if header.leases.is_some() {
        refuse_older_plugins()?;
    }
    let staging = Staging::begin(location).await.map_err(failed)?;
    let (staging, held) = staging.hold(wait()).await.map_err(failed)?;
    if let (Some(seen), Some(held)) = (seen, &held)
        && held.newest_revision().map_err(failed)? > seen
    {
        return Err(not_empty(location, "it was written to meanwhile"));
    }
    let id = fill(&staging.location(), &args.file, &header, keys).await?;
    let aside = staging.finish(held).await.map_err(failed)?.map(|path| path.display().to_string());
    answer(location, args, Restored { header, keys, id: Some(id), aside })
}

/// The outcome.
struct Restored {
    header: Header,
    keys: u64,
    /// The id of the new store.
    id: Option<String>,
    /// The folder in which the former store is now.
    aside: Option<String>,
}

fn answer(location: &Location, args: &Restore, done: Restored) -> Result<Answer> {
    let Restored { header, keys, id, aside } = done;
    let Header { revision, time, engine, .. } = header;
    let text = format!(
        "Successfully restored {location} from {}: {} keys of revision {revision} of a {engine} store, read at {time}",
        args.file.display(),
        HumanCount(keys)
    );
    let json = Json {
        store: location.to_string(),
        id,
        keys,
        backup_revision: revision,
        backup_time: time.clone(),
        replaced: aside.clone(),
    };
    let mut answer = Answer::new(text, &json)?;
    if let Some(aside) = aside {
        answer = answer.note(format!("what was there is in {aside} now: remove it when you do not need it"));
    }
    Ok(answer.note(format!(
        "addresses that were assigned after {time} are free in this store and will be assigned again: start anew \
         every container that is younger"
    )))
}

/// The newest revision of a store without keys; 1 if there is no store. Refuses a store with keys.
async fn newest_of_empty(location: &Location) -> Result<u64> {
    let open = match datastore::open(location, &Create::Never.with_wait(wait())).await {
        Ok(open) => open,
        // A creation that was interrupted may have left the first revision.
        Err(error) if *error.kind() == ErrorKind::Missing => return Ok(1),
        Err(error) => return Err(explain(location, error)),
    };
    let status = open.embedded().map(care::MvccStore::status);
    open.close().await.map_err(|error| explain(location, error))?;
    match status {
        Some(status) if status.live == 0 => Ok(u64::try_from(status.revision.get()).unwrap_or_default().max(1)),
        Some(status) => Err(not_empty(location, &format!("it has {} keys", HumanCount(status.live)))),
        None => Err(Failure::new(format!("{location} cannot be restored"))),
    }
}

fn not_empty(location: &Location, why: &str) -> Failure {
    Failure::new(format!("there is a store at {location} already: {why}"))
        .hint("--replace moves that store aside and puts the backup in its place; nothing was changed")
}

/// Makes a store of a backup, and returns its id.
async fn fill(location: &Location, file: &Path, header: &Header, keys: u64) -> Result<String> {
    let failed = |error| explain(location, error);
    if header.leases.is_some() {
        care::create(location, FORMAT_WITH_LEASES, wait()).await.map_err(failed)?;
    }
    let open = store::open_files(location, Use::Make).await?;
    let Some(embedded) = open.embedded() else {
        return Err(Failure::new(format!("{location} cannot be restored")));
    };
    for lease in header.leases.iter().flatten() {
        let damaged = || Failure::new(format!("{} is damaged: it has a lease that cannot be", file.display()));
        let lease = lease.read().ok_or_else(|| damaged().hint("use another backup; nothing was changed"))?;
        embedded.grant(lease).await.map_err(failed)?;
    }
    let path = file.to_owned();
    let mut reader = aside(move || Reader::open(&path)).await?;
    loop {
        let txns;
        (reader, txns) = aside(move || {
            let txns = next_txns(&mut reader)?;
            Ok((reader, txns))
        })
        .await?;
        if txns.is_empty() {
            break;
        }
        // Transactions run one after the other: for larger commits sled takes gigabytes of memory.
        for txn in txns {
            embedded.txn(txn).await.map_err(failed)?;
        }
    }
    let changed =
        || Failure::new(format!("{} was changed meanwhile", file.display())).hint("try again; nothing was changed");
    if reader.header() != header || embedded.status().live != keys {
        return Err(changed());
    }
    let id = embedded.id().to_string();
    open.close().await.map_err(failed)?;
    Ok(id)
}

/// The next rows of a backup as transactions; none at its end.
fn next_txns(reader: &mut Reader) -> Result<Vec<Txn>> {
    let (mut txns, mut ops, mut size, mut read) = (Vec::new(), Vec::new(), 0, 0);
    while read < GROUP_BYTES
        && let Some(row) = reader.next_row()?
    {
        let bytes = row.key.len() + row.value.len();
        if ops.len() == MAX_TXN_OPS || (size + bytes > TXN_BYTES && !ops.is_empty()) {
            txns.push(Txn::new().with_success(std::mem::take(&mut ops)));
            size = 0;
        }
        size += bytes;
        read += bytes;
        ops.push(Op::Put { key: row.key.into(), value: Value::new(row.value), prev: Prev::Omit, lease: row.lease });
    }
    if !ops.is_empty() {
        txns.push(Txn::new().with_success(ops));
    }
    Ok(txns)
}
