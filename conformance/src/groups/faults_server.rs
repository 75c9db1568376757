//! Tests a store whose server is killed during writes, hangs, or is restored from an earlier copy.

use kv::{ErrorKind, Op, Range, StoreExt};
use nix::sys::signal::Signal;

use crate::expect::{Checked, JudgedByRule, holds, same, some};
use crate::ledger::{Ledger, LedgerAnswer, Writers};
use crate::subject::{BoundedHandle, Subject, in_time};

const WRITERS: usize = 8;
const ROUNDS: usize = 5;

async fn handles(t: &Subject, count: usize) -> Checked<Vec<BoundedHandle>> {
    let addresses = t.addresses()?;
    let mut handles = Vec::with_capacity(count);
    while handles.len() < count {
        handles.push(t.connect(&addresses).await?);
    }
    Ok(handles)
}

pub(crate) async fn killed_under_writers(mut t: Subject) -> Checked {
    let handles = handles(&t, WRITERS).await?;
    for round in 0..ROUNDS {
        let writers = Writers::start(&format!("{round}"), handles.iter().cloned());
        writers.progress(WRITERS * (10 + round)).await?;
        t.signal(0, Signal::SIGKILL)?;
        t.restart(0).await?;
        writers.progress(WRITERS).await?;
        let ledger = writers.stop().await?;
        t.heals().await?;
        ledger.is_true(&t).await.map_err(|failure| failure.with_note(&format!("round {round}")))?;
    }
    Ok(())
}

pub(crate) async fn killed_after_compaction(mut t: Subject) -> Checked {
    for _ in 0..3 {
        t.put("k", "v").await?;
        let last = t.run([Op::delete("k")]).await?.revision;
        t.compact(last).await?;
        t.signal(0, Signal::SIGKILL)?;
        t.restart(0).await?;
        same("the revision after the server was killed", t.heals().await?, last)?;
        let next = t.put("k", "v").await?;
        same("the revision of the next write", next, last.next())?;
        let found = t.read_at(Range::All, last).await?.kvs;
        same("the keys at the mark", found.len(), 0).of("C3")?;
    }
    Ok(())
}

pub(crate) async fn frozen_server(t: Subject) -> Checked {
    let handles = handles(&t, WRITERS).await?;
    let first = some("a handle", handles.first())?;
    for round in 0..2 {
        let writers = Writers::start(&format!("{round}"), handles.iter().cloned());
        writers.progress(WRITERS * 10).await?;
        let stuck = async {
            let mut ledger = Ledger::default();
            let said = ledger.write(first, format!("{round}-frozen")).await?;
            holds("no acknowledgement by a frozen server", !matches!(said, LedgerAnswer::Applied(_)), &said)
                .of("S3")?;
            ledger.extend(writers.stop().await?);
            Ok(ledger)
        };
        let ledger = t.while_frozen(0, stuck).await?;
        t.heals().await?;
        for handle in &handles {
            handle.heals().await?;
        }
        ledger.is_true(&t).await.map_err(|failure| failure.with_note(&format!("round {round}")))?;
    }
    Ok(())
}

pub(crate) async fn older_copy(mut t: Subject) -> Checked {
    t.put("k", "early").await?;
    t.take_copy().await?;
    let before = t.heals().await?;
    let watching = t.connect(&t.addresses()?).await?;
    // Write ten revisions that are lost when the store is restored from its copy. After the restore, the test makes
    // fewer than ten writes, so the store's revision stays below the last revision before the restore.
    let mut late = before;
    for _ in 0..10 {
        late = t.put("k", "late").await?;
    }
    let mut watcher = watching.watcher(Range::key("k"), late).await?.through_faults();
    same("the first batch", watcher.next().await?.revision, late).of("W2")?;
    t.put_back().await?;
    // The test has two handles: `t` reads, and `watching` only watches; both must notice that the store was restored.
    let seen = loop {
        match t.get("k").await {
            Err(error) if error.kind().is_transient() => in_time(&error)?,
            other => break other,
        }
    };
    same("a read of the past", seen.map_err(|error| error.kind().clone()), Err(ErrorKind::RevisionRegressed))?;
    let mut ledger = Ledger::default();
    let said = ledger.write(&t, "late".to_owned()).await?;
    let noticed = matches!(
        &said,
        LedgerAnswer::NotApplied(ErrorKind::RevisionRegressed) | LedgerAnswer::Unknown(ErrorKind::RevisionRegressed)
    );
    holds("a write to the past fails with RevisionRegressed", noticed, &said)?;
    let end = watcher.step().await?.map(|batch| batch.revision);
    same("the end of a watch of the past", end, Err(ErrorKind::RevisionRegressed))?;
    // A new store handle works normally, because it has not seen a revision that the restored store lacks. The old
    // store handle wrote after the restore; the answers to these writes must match the contents of the restored store.
    let fresh = t.connect(&t.addresses()?).await?;
    holds("the revision of the copy", fresh.heals().await? >= before, &before).of("R6")?;
    ledger.is_true(&fresh).await
}
