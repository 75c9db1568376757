//! Several clients make random transactions while watches run; all calls and watch events are recorded. The store's log
//! of changes and the recorded answers must match.

use std::sync::Arc;

use futures::{FutureExt, StreamExt};
use kv::{Batch, ErrorKind, Op, Prev, Range, Revision, WatchRequest};
use tokio::task::{JoinHandle, yield_now};

use crate::expect::{Checked, JudgedByRule, holds, same};
use crate::groups::network::{NetworkQuality, is_injected, left_doubts};
use crate::groups::workload::{CallGenerator, GeneratedCall, KEYS, key};
use crate::history::{CallHistory, RecordedPart, Recorder, Replay, Summary, read_log};
use crate::seed::{seed, seeded};
use crate::subject::{BoundedHandle, Subject, after};

const CLIENTS: u64 = 8;
const CALLS: usize = 60;
/// After this number of batches, the client drops its watch and opens a new watch at the next revision.
const BATCHES_PER_WATCH: usize = 40;

pub(crate) async fn log_is_what_was_acknowledged(t: Subject) -> Checked {
    let base = t.revision().await?;
    let summary = seeded(judge(&t, NetworkQuality::Good, seed())).await?;
    let expected = after(base, i64::try_from(summary.acknowledged).unwrap_or(i64::MAX));
    t.revision_is("the store's revision", t.revision().await?, expected).of("R2")?;
    holds("acknowledged, refused and other calls in the history", summary.refused > 0, &summary)
}

pub(crate) async fn lost_replies_and_watches(t: Subject) -> Checked {
    left_doubts(&seeded(judge(&t, NetworkQuality::Bad, seed())).await?)
}

async fn judge(t: &Subject, network: NetworkQuality, seed: u64) -> Checked<Summary> {
    let RecordedRun { base, recorded, log, complaints } = run(t, network, seed).await?;
    let summary = Replay::new(base, []).judge(recorded, &log)?;
    same("errors that nothing explains", complaints, Vec::<String>::new())?;
    Ok(summary)
}

/// The recorded calls of a test run's clients, and the store's log of all changes.
pub(crate) struct RecordedRun {
    /// The revision of the store before the test run.
    pub(crate) base: Revision,
    pub(crate) recorded: RecordedPart,
    pub(crate) log: Vec<Batch>,
    /// The errors that came from the store and not from the simulated network.
    pub(crate) complaints: Vec<String>,
}

pub(crate) async fn run(t: &Subject, network: NetworkQuality, seed: u64) -> Checked<RecordedRun> {
    let base = t.revision().await?;
    let history = Arc::new(CallHistory::new());
    let mut watches = Vec::new();
    for (number, range) in [Range::All, Range::prefix("k/1"), Range::key(key(0))].into_iter().enumerate() {
        let store = network.between(t.another().await?.store(), seed ^ number as u64);
        let handle = t.over(Recorder::new(store, history.clone()));
        let request = WatchRequest::new(range, base.next());
        let request = if number == 1 { request } else { request.with_prev(Prev::Return) };
        watches.push(tokio::spawn(watch(handle, request)));
    }
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let random = seed.wrapping_add(number);
        let store = network.between(t.another().await?.store(), random);
        let handle = t.over(Recorder::new(store.clone(), history.clone()));
        clients.push((store, tokio::spawn(client(handle, CallGenerator::new(random, number, network)))));
    }
    let mut complaints = Vec::new();
    for (store, client) in clients {
        complaints.extend(client.await??);
        store.deliver_held().await?;
    }
    let last = end(&t.over(Recorder::new(t.store(), history.clone())), watches).await?;
    let log = t.within("the log of all keys", read_log(&***t, Range::All, base.next(), last)).await??;
    Ok(RecordedRun { base, recorded: history.take(), log, complaints })
}

/// Writes all keys once more, and waits until all watches have received this last write.
async fn end(t: &BoundedHandle, watches: Vec<JoinHandle<Checked>>) -> Checked<Revision> {
    let last = t.run((0..KEYS).map(|i| Op::put(key(i), END_VALUE))).await?.revision;
    for watch in watches {
        watch.await?.of("W2")?;
    }
    Ok(last)
}

/// The value of the last write of a test run.
const END_VALUE: &str = "end";

/// Opens several watches one after another, until one has received the last write of the test run.
async fn watch(t: BoundedHandle, mut request: WatchRequest) -> Checked {
    loop {
        let mut stream = match t.watch(request.clone()).await {
            Ok(stream) => stream,
            Err(error) if is_injected(&error) => continue,
            Err(error) => return Err(error.into()),
        };
        for _ in 0..BATCHES_PER_WATCH {
            match t.within("a watch that has not seen the last write", stream.next()).await? {
                Some(Ok(batch)) => {
                    request.start = batch.revision.next();
                    if batch.events.iter().any(|event| event.kv.value.as_bytes() == END_VALUE.as_bytes()) {
                        return Ok(());
                    }
                }
                Some(Err(error)) if matches!(error.kind(), ErrorKind::Disconnected { .. }) && is_injected(&error) => {
                    break;
                }
                other => return holds("a batch", false, &other),
            }
        }
    }
}

/// Makes the random calls of one client. The recorder keeps the answers to the client's random calls, which are judged
/// after the test run. Returns the errors that came from the store and not from the simulated network.
async fn client(t: BoundedHandle, mut workload: CallGenerator) -> Checked<Vec<String>> {
    let mut complaints = Vec::new();
    for _ in 0..CALLS {
        let call = workload.next();
        if workload.gives_up() {
            abandon(&t, call, workload.patience()).await;
            continue;
        }
        match call {
            GeneratedCall::Read(request) => match t.range(request).await {
                Ok(answer) => workload.learn(&answer.kvs),
                Err(error) if is_injected(&error) => {}
                Err(error) => complaints.push(error.to_string()),
            },
            GeneratedCall::Txn(txn) => match t.txn(txn.clone()).await {
                Ok(answer) => workload.learn_txn(&txn, &answer),
                Err(error) if is_injected(&error) || txn.check("client").is_err() => {}
                Err(error) => complaints.push(error.to_string()),
            },
        }
        yield_now().await;
    }
    Ok(complaints)
}

/// Begins a store call and drops its future before it completes.
async fn abandon(t: &BoundedHandle, call: GeneratedCall, patience: usize) {
    let mut begun = match call {
        GeneratedCall::Read(request) => t.range(request).map(drop).boxed(),
        GeneratedCall::Txn(txn) => t.txn(txn).map(drop).boxed(),
    };
    for _ in 0..patience {
        if futures::poll!(&mut begun).is_ready() {
            break;
        }
        yield_now().await;
    }
}
