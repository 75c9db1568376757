//! Tests clusters of three servers of which some are killed or stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use kv::{Compare, ConditionalOutcome, ErrorKind, Outcome, Range, Revision, StoreExt, Txn};
use nix::sys::signal::Signal;
use tokio::task::JoinSet;

use super::faults_watch::all_of;
use crate::expect::{Checked, JudgedByRule, holds, same, some};
use crate::ledger::{Ledger, LedgerAnswer, Writers};
use crate::subject::{BoundedHandle, Subject, in_time};

const WRITERS: usize = 8;
const MEMBERS: usize = 3;

/// Opens a handle that connects to any server of the cluster, and tries the given server first.
async fn first_at(t: &Subject, server: usize) -> Checked<BoundedHandle> {
    let mut addresses = t.addresses()?;
    same("the environment: servers of a cluster", addresses.len(), MEMBERS)?;
    addresses.rotate_left(server);
    t.connect(&addresses).await
}

/// Opens a handle that connects only to the given server of the cluster.
async fn only(t: &Subject, server: usize) -> Checked<BoundedHandle> {
    let addresses = t.addresses()?;
    t.connect(&[*some("the environment: a server", addresses.get(server))?]).await
}

/// The indexes of the leader and of the two other servers.
async fn roles(t: &Subject) -> Checked<(usize, [usize; 2])> {
    t.heals().await?;
    let leader = t.leader().await?;
    Ok((leader, [(leader + 1) % MEMBERS, (leader + 2) % MEMBERS]))
}

pub(crate) async fn follower_dies(t: Subject) -> Checked {
    let (_, [follower, _]) = roles(&t).await?;
    let handles = futures::future::try_join_all((0..WRITERS).map(|_| first_at(&t, follower))).await?;
    let writers = Writers::start("follower", handles);
    writers.progress(300).await?;
    t.signal(follower, Signal::SIGKILL)?;
    writers.progress(700).await?;
    let ledger = writers.stop().await?;
    holds("only calls that were under way fail", ledger.failed() <= WRITERS, &failures(&ledger)).of("N1")?;
    ledger.is_true(&t).await
}

fn failures(ledger: &Ledger) -> Vec<&LedgerAnswer> {
    ledger.said().filter(|said| !matches!(said, LedgerAnswer::Applied(_))).collect()
}

/// The counter values that all clients together have seen and written while they increment the counter.
#[derive(Debug, Default)]
struct ClientCounts {
    /// The highest value of the shared counter that any client has read, or written with an acknowledged write.
    seen: AtomicI64,
    acknowledged: AtomicI64,
    unknown: AtomicI64,
}

fn number(value: Option<&kv::Kv>) -> i64 {
    value.and_then(|kv| String::from_utf8_lossy(kv.value.as_bytes()).parse().ok()).unwrap_or_default()
}

/// Increments the counter `times` times, each time by a compare-and-swap on the value that the client has read.
async fn count_up(handle: BoundedHandle, counted: Arc<ClientCounts>, times: usize) -> Checked {
    let mut done = 0;
    while done < times {
        let least = counted.seen.load(Ordering::SeqCst);
        let before = match handle.get("count").await {
            Ok(found) => found,
            Err(error) => {
                in_time(&error)?;
                continue;
            }
        };
        let now = number(before.as_ref());
        holds(&format!("at least {least}, which was seen before"), now >= least, &now).of("S1")?;
        let guard = before.map_or(Revision::UNSET, |kv| kv.mod_revision);
        match handle.update_if("count", (now + 1).to_string(), guard).await {
            Ok(ConditionalOutcome::Done(_)) => {
                counted.acknowledged.fetch_add(1, Ordering::SeqCst);
                counted.seen.fetch_max(now + 1, Ordering::SeqCst);
                done += 1;
            }
            Ok(ConditionalOutcome::Found(_)) => {}
            Err(error) => {
                in_time(&error)?;
                if error.outcome() == Outcome::Unknown {
                    counted.unknown.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    }
    Ok(())
}

pub(crate) async fn leader_dies_under_load(mut t: Subject) -> Checked {
    const TIMES: usize = 40;
    let mut watcher = t.watcher(Range::key("count"), t.revision().await?.next()).await?.through_faults();
    let counted = Arc::new(ClientCounts::default());
    for round in 0..2 {
        let (leader, _) = roles(&t).await?;
        let mut tasks = JoinSet::new();
        for server in 0..6 {
            tasks.spawn(count_up(first_at(&t, server % MEMBERS).await?, counted.clone(), TIMES));
        }
        let a_quarter = (TIMES * 6 * round + TIMES * 6 / 4) as i64;
        let under_way = async {
            while counted.acknowledged.load(Ordering::SeqCst) < a_quarter {
                tokio::task::yield_now().await;
            }
        };
        t.within("a quarter of the writes", under_way).await?;
        t.signal(leader, Signal::SIGKILL)?;
        while let Some(task) = tasks.join_next().await {
            task??;
        }
        t.restart(leader).await?;
        // The server that was killed must answer again before the next leader is killed.
        only(&t, leader).await?.heals().await?;
    }
    t.heals().await?;
    let (now, last) = some("the count", t.get("count").await?).map(|kv| (number(Some(&kv)), kv.mod_revision))?;
    let (acknowledged, unknown) = (counted.acknowledged.load(Ordering::SeqCst), counted.unknown.load(Ordering::SeqCst));
    let fits = (acknowledged..=acknowledged + unknown).contains(&now);
    holds(&format!("{acknowledged} acknowledged and up to {unknown} unknown additions"), fits, &now).of("S3")?;
    // The history must contain every counter value in order, so no increment was lost or made twice.
    let mut expected = 1;
    while watcher.resume_from() <= last {
        for event in watcher.next().await?.events {
            same("the next count", number(Some(&event.kv)), expected).of("E3")?;
            expected += 1;
        }
    }
    Ok(())
}

/// Stops two of the three servers, including the leader, and sends a request to the third server. With two of the three
/// servers stopped, the request must fail, because the cluster has no quorum.
async fn without_quorum<T: std::fmt::Debug, F: Future<Output = kv::Result<T>>>(
    t: &Subject,
    work: impl FnOnce(BoundedHandle) -> F,
    rule: &'static str,
) -> Checked<(ErrorKind, Outcome)> {
    let (leader, [other, lonely]) = roles(t).await?;
    let handle = only(t, lonely).await?;
    handle.heals().await?;
    let ask = t.while_frozen(other, async { Ok(work(handle.clone()).await) });
    let said = t.while_frozen(leader, ask).await?;
    handle.heals().await?;
    match said {
        Err(error) => in_time(&error).map(|()| (error.kind().clone(), error.outcome())),
        Ok(answer) => holds("an error without a quorum", false, &answer)
            .of(rule)
            .map(|()| (ErrorKind::NoLeader, Outcome::Unknown)),
    }
}

pub(crate) async fn no_quorum_no_answer(t: Subject) -> Checked {
    t.put("k", "before").await?;
    let base = t.revision().await?;
    without_quorum(&t, |handle| async move { handle.get("k").await }, "S1").await?;
    let (kind, outcome) = without_quorum(&t, |handle| async move { handle.put("k", "meanwhile").await }, "S3").await?;
    // When the two frozen servers of three continue, the put that failed in the meantime may still happen, unless its
    // error said that it was not applied.
    let times = t.get("k").await?.map_or(0, |kv| kv.version);
    let allowed = if outcome == Outcome::NotApplied { 1..=1 } else { 1..=2 };
    holds(&format!("{allowed:?} writes after {kind:?}"), allowed.contains(&times), &times).of("E2")?;
    let last = t.put("k", "after").await?;
    holds("the write is newer than all before", last > base, &last).of("R2")
}

pub(crate) async fn no_quorum_no_compare(t: Subject) -> Checked {
    let at = t.put("k", "before").await?;
    let compare = || Txn::new().with_compares([Compare::unchanged("k", at)]);
    without_quorum(&t, |handle| async move { handle.txn(compare()).await }, "T10").await?;
    t.put("k", "after").await?;
    holds("a compare with the previous value fails", !t.txn(compare()).await?.succeeded, &at)
}

pub(crate) async fn hanging_leader_under_writers(t: Subject) -> Checked {
    let mut ledgers = Vec::new();
    for round in 0..2 {
        let (leader, _) = roles(&t).await?;
        let handles = futures::future::try_join_all((0..WRITERS).map(|_| first_at(&t, leader))).await?;
        let writers = Writers::start(&format!("{round}"), handles);
        writers.progress(100).await?;
        t.while_frozen(leader, writers.progress(100)).await?;
        writers.progress(100).await?;
        ledgers.push(writers.stop().await?);
        only(&t, leader).await?.heals().await?;
    }
    for ledger in ledgers {
        ledger.is_true(&t).await?;
    }
    Ok(())
}

pub(crate) async fn writers_without_quorum(t: Subject) -> Checked {
    let (leader, [other, lonely]) = roles(&t).await?;
    let handles = futures::future::try_join_all((0..WRITERS).map(|_| only(&t, lonely))).await?;
    for handle in &handles {
        handle.heals().await?;
    }
    let writers = Writers::start("lonely", handles);
    writers.progress(100).await?;
    // Two of the three servers are frozen during four writes: writes in flight time out, and later writes fail because
    // the cluster has no leader.
    let refused = async {
        let mut ledger = Ledger::default();
        let handle = only(&t, lonely).await?;
        for i in 0..4 {
            ledger.write(&handle, format!("refused-{i}")).await?;
        }
        Ok(ledger)
    };
    let refused = t.while_frozen(leader, t.while_frozen(other, refused)).await?;
    writers.progress(100).await?;
    let ledger = writers.stop().await?;
    holds("no write succeeds without a quorum", refused.failed() == 4, &failures(&refused)).of("S3")?;
    refused.is_true(&t).await?;
    ledger.is_true(&t).await
}

pub(crate) async fn lonely_watch(t: Subject) -> Checked {
    let (leader, [other, lonely]) = roles(&t).await?;
    let handle = only(&t, lonely).await?;
    let at = t.put("w/k", "v").await?;
    let mut watcher = handle.watcher(Range::prefix("w/"), at).await?.through_faults();
    same("the first batch", watcher.next().await?.revision, at)?;
    let end = t.while_frozen(leader, t.while_frozen(other, watcher.step())).await?;
    same("the end of a watch without a quorum", end, Err(ErrorKind::Disconnected { resume_from: at.next() }))?;
    handle.heals().await?;
    t.heals().await?;
    let mut again = handle.watcher(Range::prefix("w/"), at.next()).await?.through_faults();
    let last = t.put("w/k", "w").await?;
    all_of(&handle, &mut again, last).await
}

pub(crate) async fn all_restart(mut t: Subject) -> Checked {
    let handles = futures::future::try_join_all((0..WRITERS).map(|i| first_at(&t, i % MEMBERS))).await?;
    let watching = first_at(&t, 0).await?;
    let mut watcher = watching.watcher(Range::prefix("ledger/"), t.revision().await?.next()).await?.through_faults();
    let writers = Writers::start("all", handles);
    writers.progress(100).await?;
    for server in 0..MEMBERS {
        t.signal(server, Signal::SIGKILL)?;
    }
    for server in 0..MEMBERS {
        t.restart(server).await?;
    }
    writers.progress(100).await?;
    let ledger = writers.stop().await?;
    let last = t.heals().await?;
    ledger.is_true(&t).await?;
    all_of(&watching, &mut watcher, last).await
}

pub(crate) async fn dead_endpoint(mut t: Subject) -> Checked {
    const CALLS: usize = 100;
    for dead in 0..MEMBERS {
        t.signal(dead, Signal::SIGKILL)?;
        // After a server is killed, store calls fail until the two remaining servers have elected a leader.
        only(&t, (dead + 1) % MEMBERS).await?.heals().await?;
        only(&t, (dead + 2) % MEMBERS).await?.heals().await?;
        let handle = first_at(&t, dead).await?;
        let mut ledger = Ledger::default();
        let mut lost = Vec::new();
        for i in 0..CALLS {
            if let said @ (LedgerAnswer::NotApplied(_) | LedgerAnswer::Unknown(_)) =
                ledger.write(&handle, format!("{dead}-{i}")).await?
            {
                lost.push((i, said));
            }
            if let Err(error) = handle.get("k").await {
                lost.push((i, LedgerAnswer::NotApplied(error.kind().clone())));
            }
            if i % 10 == 0 {
                handle.watcher(Range::key("k"), Revision::new(1)).await.of("N1")?;
            }
        }
        let first_only = lost.is_empty() || lost.len() == 1 && lost[0].0 == 0;
        holds("no call after the first is lost", first_only, &lost).of("N1")?;
        ledger.is_true(&handle).await?;
        t.restart(dead).await?;
        only(&t, dead).await?.heals().await?;
    }
    Ok(())
}

pub(crate) async fn left_far_behind(t: Subject) -> Checked {
    // Number of writes that a stopped member must miss so that it cannot catch up from the leader's log and needs a
    // full snapshot.
    const WRITES: usize = 6000;
    let (_, [behind, other]) = roles(&t).await?;
    let watching = only(&t, behind).await?;
    let base = t.revision().await?;
    let mut watcher = watching.watcher(Range::prefix("w/"), base.next()).await?.through_faults();
    let writing = only(&t, other).await?;
    let first = writing.put("w/first", "v").await?;
    same("the first batch", watcher.next().await?.revision, first)?;
    let write = async { writing.write_all(WRITES, |i| kv::Op::put(format!("w/{}", i % 100), "v")).await };
    t.while_frozen(behind, write).await?;
    let last = writing.put("w/last", "v").await?;
    all_of(&watching, &mut watcher, last).await
}
