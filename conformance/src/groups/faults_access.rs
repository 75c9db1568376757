//! Tests clients without access, logins that expire, and a store that is out of space.

use std::time::{Duration, Instant};

use kv::{Auth, Error, ErrorKind, Op, Range, RangeRequest, Revision, StoreExt, WatchRequest};

use crate::expect::{Checked, Failure, RECOVERY_TIMEOUT, holds, refused, same};
use crate::harness::RefusedUser;
use crate::ledger::{Ledger, LedgerAnswer};
use crate::subject::{BoundedHandle, Subject, in_time};

/// Checks that a refused user's error message has one line and shows no secret.
fn kept_out(name: &str, secrets: &[String], error: &Error) -> Checked {
    in_time(error)?;
    let shown = format!("{error} {error:?}");
    let secret = secrets.iter().find(|secret| shown.contains(secret.as_str()));
    holds("no secret in the error", secret.is_none(), &secret.map(|_| name))?;
    holds("one line", !error.to_string().contains('\n'), &error.to_string())
}

/// Checks that every kind of store call fails for a user without access.
async fn is_kept_out(t: &Subject, stranger: RefusedUser) -> Checked {
    let RefusedUser { name, store, secrets } = stranger;
    let handle = t.bounded(store);
    let watch = handle.watch(WatchRequest::new(Range::All, Revision::new(1))).await.map(|_| ());
    for (call, said) in [
        ("a write", handle.put("k", "theirs").await.map(|_| ())),
        ("a read", handle.get("k").await.map(|_| ())),
        ("a watch", watch),
    ] {
        match said {
            Err(error) => kept_out(name, &secrets, &error),
            Ok(()) => Err(Failure::new(format!("{call} of {name}"), "an error", "an answer")),
        }
        .map_err(|failure| failure.with_note(&format!("{call} of {name}")))?;
    }
    Ok(())
}

pub(crate) async fn strangers(t: Subject) -> Checked {
    let at = t.put("k", "ours").await?;
    let strangers = t.strangers().await?;
    holds("the environment: some strangers", !strangers.is_empty(), &strangers.len())?;
    for stranger in strangers {
        is_kept_out(&t, stranger).await?;
    }
    // The calls of the refused users must have written nothing, whatever the store answered them.
    same("the revision after all that", t.revision().await?, at)
}

pub(crate) async fn compacting_strangers(t: Subject) -> Checked {
    let at = t.put("k", "ours").await?;
    for RefusedUser { name, store, secrets } in t.strangers().await? {
        match t.bounded(store).compact(at).await {
            Err(error) => kept_out(name, &secrets, &error)?,
            Ok(()) => return Err(Failure::new(format!("a compaction by {name}"), "an error", "an answer")),
        }
    }
    t.read_at(Range::All, Revision::new(1)).await.map(|_| ())
}

pub(crate) async fn guest(t: Subject) -> Checked {
    let at = t.put("k", "ours").await?;
    let guest = t.guest().await?;
    let denied = || ErrorKind::Auth(Auth::Denied);
    let own = guest.put("open/k", "v").await?;
    same("a read of what is open", guest.value("open/k").await?.as_deref(), Some("v"))?;
    refused("a read of something else", guest.get("k").await, denied())?;
    refused("a read of everything", guest.range(RangeRequest::new(Range::All)).await, denied())?;
    refused("a write of something else", guest.put("k", "theirs").await, denied())?;
    let half = guest.txn(kv::Txn::new().with_success([Op::put("open/l", "v"), Op::put("k", "theirs")])).await;
    refused("a transaction with a part that is not allowed", half, denied())?;
    let look = guest.txn(kv::Txn::new().with_success([Op::put("open/l", "v"), Op::range(Range::key("k"))])).await;
    refused("a transaction that reads what is not allowed", look, denied())?;
    match guest.watch(WatchRequest::new(Range::All, at)).await {
        Err(error) => same("a watch of everything", error.kind().clone(), denied())?,
        Ok(stream) => {
            let mut watcher = t.watching(stream, WatchRequest::new(Range::All, at));
            same("a watch of everything", watcher.step().await?.map(|batch| batch.revision), Err(denied()))?;
        }
    }
    let mut open = guest.watcher(Range::prefix("open/"), own).await?;
    same("a watch of what is open", open.next().await?.revision, own)?;
    same("what is not theirs", t.value("k").await?.as_deref(), Some("ours"))?;
    same("what was in one transaction with it", t.value("open/l").await?, None)
}

pub(crate) async fn logins_run_out(t: Subject) -> Checked {
    /// How long the test freezes the server: longer than a login stays valid.
    const LONG_FREEZE: Duration = Duration::from_millis(3500);
    let first = t.put("k", "v").await?;
    let mut early = t.watcher(Range::key("k"), first).await?;
    same("the first batch", early.next().await?.revision, first)?;
    tokio::time::sleep(LONG_FREEZE).await;
    let second = t.put("k", "w").await?;
    tokio::time::sleep(LONG_FREEZE).await;
    for read in futures::future::join_all((0..8).map(|_| t.get("k"))).await {
        same("a read after the login ran out", read?.map(|kv| kv.mod_revision), Some(second))?;
    }
    tokio::time::sleep(LONG_FREEZE).await;
    let mut late = t.watcher(Range::key("k"), second).await?;
    same("the first batch of a new watch", late.next().await?.revision, second)?;
    same("the next batch of an old watch", early.next().await?.revision, second)?;
    tokio::time::sleep(LONG_FREEZE).await;
    let third = t.put("k", "x").await?;
    same("the next batch of a watch that is older than any login", early.next().await?.revision, third)
}

/// Creates keys from several clients until the store is out of space, and returns the store's answers to all writes.
async fn fill(t: &Subject, round: usize) -> Checked<Ledger> {
    const WRITERS: usize = 32;
    const BYTES: usize = 50_000;
    let until = Instant::now() + RECOVERY_TIMEOUT;
    let writers = (0..WRITERS).map(|writer| {
        let handle: BoundedHandle = t.handle();
        async move {
            let mut ledger = Ledger::default();
            let mut full = 0;
            for i in 0.. {
                let said = ledger.write_sized(&handle, format!("{round}-{writer}-{i}"), BYTES).await?;
                let no_room = matches!(
                    said,
                    LedgerAnswer::Unknown(ErrorKind::NoSpace) | LedgerAnswer::NotApplied(ErrorKind::NoSpace)
                );
                full += usize::from(no_room);
                if full == 4 {
                    break;
                }
                holds("the store is full before long", Instant::now() < until, &ledger.failed())?;
            }
            Checked::Ok(ledger)
        }
    });
    let mut all = Ledger::default();
    for ledger in futures::future::try_join_all(writers).await? {
        all.extend(ledger);
    }
    Ok(all)
}

pub(crate) async fn full(t: Subject) -> Checked {
    t.put("small", "v").await?;
    for round in 0..2 {
        let ledger = fill(&t, round).await?;
        ledger.is_true(&t).await?;
        same("a read of a full store", t.value("small").await?.as_deref(), Some("v"))?;
        holds("a plain delete in a full store", t.delete(Range::prefix("ledger/")).await? > 0, &round)?;
        t.compact(t.revision().await?).await?;
        t.make_room().await?;
        t.put("small", "v").await?;
    }
    Ok(())
}
