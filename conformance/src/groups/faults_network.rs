//! Tests store calls that lose their request or answer, calls that reach no server, and slow calls.

use std::time::Duration;

use kv::{Compare, ErrorKind, Op, OpResult, Outcome, Range, Revision, StoreExt, Txn};

use crate::expect::{Checked, JudgedByRule, holds, same, some};
use crate::ledger::{Ledger, LedgerAnswer};
use crate::proxy::{LinkCondition, Proxy};
use crate::subject::{BoundedHandle, Subject, UnusedAddress, in_time};

const ROUNDS: usize = 5;

/// Sends a transaction to the store and drops the answer on the network. Returns the result that the client got, and
/// the revision at which the store executed the transaction.
async fn without_reply(
    t: &Subject,
    (proxy, far): (&Proxy, &BoundedHandle),
    txn: Txn,
) -> Checked<(kv::Result<kv::TxnResponse>, Revision)> {
    let mut watcher = t.watcher(Range::key("k"), t.revision().await?.next()).await?;
    far.heals().await?;
    proxy.set(LinkCondition::LosesReplies);
    let writer = far.clone();
    let write = tokio::spawn(async move { writer.txn(txn).await });
    let applied = watcher.next().await?.revision;
    proxy.heal();
    Ok((write.await?, applied))
}

pub(crate) async fn lost_reply(t: Subject) -> Checked {
    let (proxy, far) = t.through_proxy().await?;
    for round in 0..ROUNDS {
        let txn = Txn::new().with_success([Op::put("k", format!("round {round}"))]);
        let (said, applied) = without_reply(&t, (&proxy, &far), txn).await?;
        match said {
            // The answer to this write was lost; a store may return an error, or find out the outcome and return that.
            Ok(answer) => same("the revision of a write whose reply got lost", answer.revision, applied).of("E3")?,
            Err(error) => {
                in_time(&error)?;
                same("what is said of a write that was carried out", error.outcome(), Outcome::Unknown)?;
            }
        }
        far.heals().await?;
        let kv = some("what was written", t.get("k").await?)?;
        let times = i64::try_from(round).unwrap_or_default() + 1;
        same("how often it was written, and when last", (kv.version, kv.mod_revision), (times, applied)).of("E3")?;
    }
    Ok(())
}

pub(crate) async fn lost_reply_of_a_guarded_write(t: Subject) -> Checked {
    let (proxy, far) = t.through_proxy().await?;
    let mut before = t.put("k", "before").await?;
    for round in 0..ROUNDS {
        let value = format!("round {round}");
        let txn = Txn::new()
            .with_compares([Compare::unchanged("k", before)])
            .with_success([Op::put("k", value.as_str())])
            .with_failure([Op::range(Range::key("k"))]);
        let (said, applied) = without_reply(&t, (&proxy, &far), txn.clone()).await?;
        match said {
            Ok(answer) => same("a compare that held", (answer.succeeded, answer.revision), (true, applied)).of("E3")?,
            Err(error) => {
                in_time(&error)?;
                same("what is said of a write that was carried out", error.outcome(), Outcome::Unknown)?;
            }
        }
        // When the transaction is sent again, its compare must fail and the key must have the written value, which
        // shows that the first request was executed.
        far.heals().await?;
        let again = far.txn(txn).await?;
        let found = match again.results.first() {
            Some(OpResult::Range(found)) => found.kvs.first().map(|kv| (kv.value.clone(), kv.mod_revision)),
            _ => None,
        };
        same("whether the repeated transaction succeeds", again.succeeded, false).of("E3")?;
        same("the value after the repeated transaction", found, Some((value.into(), applied))).of("E3")?;
        before = applied;
    }
    Ok(())
}

pub(crate) async fn lost_request(t: Subject) -> Checked {
    for round in 0..ROUNDS {
        let (proxy, far) = t.through_proxy().await?;
        far.heals().await?;
        proxy.set(LinkCondition::LosesRequests);
        let name = format!("{round}");
        let writer = tokio::spawn(async move {
            let mut ledger = Ledger::default();
            let said = ledger.write(&far, name).await?;
            Checked::Ok((ledger, said, far))
        });
        t.within("a request that gets lost", proxy.something_got_lost()).await?;
        proxy.heal();
        let (ledger, said, far) = writer.await??;
        far.heals().await?;
        ledger.is_true(&t).await.map_err(|failure| failure.with_note(&format!("told {said:?}")))?;
    }
    Ok(())
}

pub(crate) async fn never_sent(t: Subject) -> Checked {
    let unused = UnusedAddress::new()?;
    let lonely = t.connect(&[unused.address()?]).await?;
    let before = t.revision().await?;
    let mut ledger = Ledger::default();
    for i in 0..ROUNDS {
        let said = ledger.write(&lonely, format!("{i}")).await?;
        let certain = matches!(&said, LedgerAnswer::NotApplied(kind) if kind.is_transient());
        holds("a definite error after which one may try again", certain, &said)?;
    }
    let read = lonely.get("k").await.map(|_| ()).map_err(|error| error.kind().clone());
    same("a read from an unused address", read, Err(ErrorKind::NotSent))?;
    ledger.is_true(&t).await?;
    same("the revision", t.revision().await?, before)
}

/// Makes one write, one read and one watch in each of 20 rounds. Only the first call may fail, and each acknowledged
/// write must have happened exactly once.
async fn loses_at_most_the_first(t: &Subject, far: &BoundedHandle, name: &str) -> Checked {
    const CALLS: usize = 20;
    let before = t.revision().await?;
    let mut ledger = Ledger::default();
    let mut failed = Vec::new();
    for i in 0..CALLS {
        match ledger.write(far, format!("{name}-{i}")).await? {
            LedgerAnswer::Applied(_) => {}
            said => failed.push((i, said)),
        }
        if let Err(error) = far.get("ledger").await {
            failed.push((i, LedgerAnswer::NotApplied(error.kind().clone())));
        }
        far.watcher(Range::prefix("ledger"), before.next()).await.of("N1")?;
    }
    let first_only = failed.is_empty() || failed.len() == 1 && failed[0].0 == 0;
    holds("at most the first call fails", first_only, &failed).of("N1")?;
    ledger.is_true(t).await
}

pub(crate) async fn nobody_and_a_silent_one_beside(t: Subject) -> Checked {
    let unused = UnusedAddress::new()?;
    let (proxy, _) = t.through_proxy().await?;
    proxy.set(LinkCondition::Silent);
    let live = t.addresses()?;
    let (unused, silent) = (unused.address()?, proxy.address());
    for (name, others) in [("unused", vec![unused]), ("silent", vec![silent]), ("both", vec![unused, silent])] {
        let first = t.connect(&[&others[..], &live].concat()).await?;
        loses_at_most_the_first(&t, &first, &format!("{name}-first")).await?;
        let last = t.connect(&[&live, &others[..]].concat()).await?;
        loses_at_most_the_first(&t, &last, &format!("{name}-last")).await?;
    }
    Ok(())
}

pub(crate) async fn slow_network(t: Subject) -> Checked {
    const WRITERS: usize = 8;
    let (proxy, far) = t.through_proxy().await?;
    proxy.set(LinkCondition::Slow(Duration::from_millis(20)));
    let base = t.revision().await?;
    let mut watcher = far.watcher(Range::prefix("ledger/"), base.next()).await?;
    let writes = (0..WRITERS).map(|writer| {
        let far = far.clone();
        tokio::spawn(async move {
            let mut ledger = Ledger::default();
            for i in 0..10 {
                let said = ledger.write(&far, format!("{writer}-{i}")).await?;
                holds("a write over a slow network succeeds", matches!(said, LedgerAnswer::Applied(_)), &said)?;
            }
            Checked::Ok(ledger)
        })
    });
    for ledger in futures::future::join_all(writes).await {
        ledger??.is_true(&t).await?;
    }
    let last = t.revision().await?;
    let seen: Vec<i64> = watcher.until(last).await?.iter().map(|batch| batch.revision.get()).collect();
    same("every revision once, in order", seen, (base.get() + 1..=last.get()).collect::<Vec<_>>()).of("W2")
}
