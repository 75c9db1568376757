//! Tests the code that judges histories of store calls. The judge ([`Replay`]) must accept the recorded history of a
//! correct store if it was not changed. When a record is corrupted, the judge must report the rule that the corrupted
//! record breaks.

use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime};

use kv::{Batch, ErrorKind, Event, EventKind, Kv, Op, Outcome, Prev, Range, RangeRequest, Revision, Txn, WatchRequest};

use super::{Call, RecordedAnswer, RecordedPart, RecordedRequest, Replay, Stream, Summary, Violation};
use crate::groups::network::NetworkQuality;
use crate::groups::recorded::{RecordedRun, run};
use crate::harness::Harness;
use crate::reference::ReferenceHarness;
use crate::subject::Subject;

/// Records the calls of several clients on the reference store.
fn record(network: NetworkQuality, seed: u64) -> RecordedRun {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let fixture = ReferenceHarness.fresh().await.unwrap();
        let (subject, _home) =
            Subject::new(Arc::new(ReferenceHarness), fixture, Duration::from_secs(10), mpsc::channel().0);
        run(&subject, network, seed).await.unwrap()
    })
}

fn judge(run: RecordedRun) -> Result<Summary, Violation> {
    Replay::new(run.base, []).judge(run.recorded, &run.log)
}

/// A function that corrupts a recorded history; it returns `None` if the history lacks the calls or events to corrupt.
type Mutation = fn(&mut RecordedRun) -> Option<()>;

/// Records histories until one has the calls or events that `mutation` corrupts. For the corrupted history, the judge
/// must report a violation of the given rule.
fn caught(name: &str, rule: &str, mutation: Mutation) {
    for seed in 0..50 {
        let mut run = record(NetworkQuality::Bad, seed);
        if mutation(&mut run).is_some() {
            let found = judge(run).expect_err(name);
            assert_eq!(found.rule(), rule, "{name}: {found}");
            return;
        }
    }
    panic!("{name}: no history has what is needed");
}

#[test]
fn history_passes_as_recorded() {
    for seed in 0..10 {
        let summary = judge(record(NetworkQuality::Good, seed)).unwrap();
        assert!(summary.acknowledged > 50 && summary.observed > 50 && summary.refused > 0, "{summary:?}");
        assert_eq!(summary.acknowledged, summary.revisions);
        let summary = judge(record(NetworkQuality::Bad, seed)).unwrap();
        assert!(summary.happened > 0 && summary.vanished > 0 && summary.watches > 3, "{summary:?}");
        assert_eq!(summary.acknowledged + summary.happened, summary.revisions);
    }
}

/// The recorded answers to all reads of the latest revision; answers without entries are left out.
fn reads(run: &mut RecordedRun) -> impl DoubleEndedIterator<Item = &mut kv::RangeResponse> {
    run.recorded.calls.iter_mut().filter_map(|call| match (&call.request, &mut call.answered) {
        (RecordedRequest::Range(request), RecordedAnswer::Range(answer))
            if !request.at.is_set() && !answer.kvs.is_empty() =>
        {
            Some(answer)
        }
        _ => None,
    })
}

/// Returns the index and the revision of each acknowledged write in the record.
fn writes(run: &RecordedRun) -> Vec<(usize, Revision)> {
    let calls = run.recorded.calls.iter().enumerate();
    let answered = calls.filter_map(|(i, call)| call.revision().map(|revision| (i, call, revision)));
    let wrote = |call: &Call, at: Revision| {
        matches!(call.request, RecordedRequest::Txn(_))
            && matches!(&call.answered, RecordedAnswer::Txn(answer) if matches!(answer.results.first(), Some(kv::OpResult::Put { .. })))
            && run.log.iter().any(|batch| batch.revision == at)
    };
    answered.filter(|(_, call, at)| wrote(call, *at)).map(|(i, _, at)| (i, at)).collect()
}

#[test]
fn history_is_refused_when_answers_are_spoiled() {
    caught("a stale read", "S1", |run| {
        let base = run.base;
        let read = reads(run).next_back()?;
        *read = kv::RangeResponse { revision: base, ..Default::default() };
        Some(())
    });
    caught("a read of another value", "S1", |run| {
        let read = reads(run).find(|read| read.kvs.iter().any(|kv| !kv.value.is_empty()))?;
        read.kvs.iter_mut().for_each(|kv| kv.value = "other".into());
        Some(())
    });
    caught("one revision for two writes", "R2", |run| {
        let writes = writes(run);
        let [(one, revision), (other, _)] = writes.get(5..7)? else { return None };
        let start = run.recorded.calls[*one].start;
        let call = &mut run.recorded.calls[*other];
        call.start = start;
        let RecordedAnswer::Txn(answer) = &mut call.answered else { return None };
        answer.revision = *revision;
        Some(())
    });
    caught("a compare that held is said not to have held", "S1", |run| {
        let (i, _) = *writes(run).get(8)?;
        let RecordedAnswer::Txn(answer) = &mut run.recorded.calls[i].answered else { return None };
        answer.succeeded = !answer.succeeded;
        Some(())
    });
    caught("an answer to a call that began later", "S1", |run| {
        let (i, _) = *writes(run).get(8)?;
        let late = run.recorded.calls.iter().map(|call| call.start).max()? + 1;
        run.recorded.calls[i].start = late;
        Some(())
    });
}

#[test]
fn history_is_refused_when_logs_are_spoiled() {
    caught("a lost update", "S1", |run| {
        let (_, revision) = *writes(run).get(9)?;
        run.log.retain(|batch| batch.revision != revision);
        Some(())
    });
    caught("acknowledged before it was durable", "S1", |run| {
        let (_, revision) = *writes(run).iter().rev().nth(3)?;
        run.log.retain(|batch| batch.revision < revision);
        Some(())
    });
    caught("a torn transaction", "T2", |run| {
        let acknowledged = writes(run);
        let answered = |batch: &&mut Batch| acknowledged.iter().any(|(_, at)| *at == batch.revision);
        run.log.iter_mut().filter(answered).find(|batch| batch.events.len() > 1)?.events.pop().map(drop)
    });
    caught("two revisions in the wrong order", "W2", |run| {
        run.log.swap(7, 8);
        Some(())
    });
    caught("a change that no client made", "S1", |run| {
        again(run, "foreign".into());
        Some(())
    });
    caught("a write of unknown outcome twice", "E3", |run| {
        let value = only_value(run, |call, found| call.is_unknown() && found)?;
        again(run, value);
        Some(())
    });
    caught("an acknowledged write twice", "E3", |run| {
        let value = only_value(run, |call, found| matches!(call.answered, RecordedAnswer::Txn(_)) && found)?;
        again(run, value);
        Some(())
    });
    caught("a write that was refused for certain", "E2", |run| {
        let refused = |call: &Call, _| matches!(call.answered, RecordedAnswer::Failed(_, Outcome::NotApplied));
        let value = only_value(run, refused)?;
        again(run, value);
        Some(())
    });
}

/// Returns the value of a recorded put that `wanted` accepts and that is the only operation of a transaction without
/// compares. `wanted` gets each such put, and whether its value is in the store's log.
fn only_value(run: &RecordedRun, wanted: impl Fn(&Call, bool) -> bool) -> Option<kv::Value> {
    run.recorded.calls.iter().find_map(|call| {
        let RecordedRequest::Txn(Txn { compares, success, .. }) = &call.request else { return None };
        let [Op::Put { value, .. }] = &success[..] else { return None };
        let found = run.log.iter().flat_map(|batch| &batch.events).any(|event| event.kv.value == *value);
        (compares.is_empty() && wanted(call, found)).then(|| value.clone())
    })
}

/// Appends an event to the log that puts `value` a second time: at the key to which a recorded call put it, or else at
/// a new key.
fn again(run: &mut RecordedRun, value: kv::Value) {
    let put = run.recorded.calls.iter().find_map(|call| match &call.request {
        RecordedRequest::Txn(txn) => txn.success.iter().find_map(|op| match op {
            Op::Put { key, value: put, .. } if *put == value => Some(key.clone()),
            _ => None,
        }),
        _ => None,
    });
    let key = put.unwrap_or_else(|| "new".into());
    let events = run.log.iter().flat_map(|batch| &batch.events);
    let old = events.filter(|event| event.kv.key == key).last().map(|event| event.kv.clone());
    let revision = run.log.last().unwrap().revision.next();
    let version = old.as_ref().map_or(0, |old| old.version) + 1;
    let create_revision = old.filter(|old| old.version > 0).map_or(revision, |old| old.create_revision);
    let kv = Kv { key, value, create_revision, mod_revision: revision, version, lease: None };
    run.log.push(Batch { revision, time: None, events: vec![Event { kind: EventKind::Put, kv, prev: None }] });
}

/// Of the recorded watches for which `wanted` returns true, picks the one with the most batches and returns its batches
/// (if more than ten).
fn batches(
    run: &mut RecordedRun,
    wanted: fn(&WatchRequest) -> bool,
) -> Option<&mut Vec<(u64, Result<Batch, ErrorKind>)>> {
    let streams = run.recorded.streams.iter_mut().filter(|stream| wanted(&stream.request));
    let items = streams.map(|stream| &mut stream.items).max_by_key(|items| items.len())?;
    (items.len() > 10).then_some(items)
}

fn batch(item: &mut (u64, Result<Batch, ErrorKind>)) -> Option<&mut Batch> {
    item.1.as_mut().ok()
}

fn all(request: &WatchRequest) -> bool {
    request.range == Range::All
}

#[test]
fn history_is_refused_when_watches_are_spoiled() {
    caught("a batch that is left out", "W2", |run| batches(run, all).map(|items| drop(items.remove(4))));
    caught("the first batch left out", "W2", |run| batches(run, all).map(|items| drop(items.remove(0))));
    caught("a batch twice", "W2", |run| {
        let items = batches(run, all)?;
        let again = items[4].clone();
        items.insert(5, again);
        Some(())
    });
    caught("two batches in the wrong order", "W2", |run| {
        let items = batches(run, all)?;
        items.swap(4, 5);
        Some(())
    });
    caught("an event that is left out", "W3", |run| {
        let items = batches(run, all)?;
        items.iter_mut().filter_map(batch).find(|batch| batch.events.len() > 1)?.events.pop().map(drop)
    });
    caught("events in the wrong order", "W2", |run| {
        let items = batches(run, all)?;
        items.iter_mut().filter_map(batch).find(|batch| batch.events.len() > 1)?.events.swap(0, 1);
        Some(())
    });
    caught("a revision in two pieces", "W3", |run| {
        let items = batches(run, all)?;
        let at = items.iter_mut().position(|item| batch(item).is_some_and(|batch| batch.events.len() > 1))?;
        let rest = batch(&mut items[at])?.events.split_off(1);
        let mut second = items[at].clone();
        batch(&mut second)?.events = rest;
        items.insert(at + 1, second);
        Some(())
    });
    caught("an event of another key", "W4", |run| {
        let items = batches(run, |request| matches!(request.range, Range::Key(_)))?;
        batch(&mut items[2])?.events[0].kv.key = "k/5".into();
        Some(())
    });
    caught("a wrong entry from before", "W6", |run| {
        let items = batches(run, |request| request.prev == Prev::Return)?;
        let mut events = items.iter_mut().filter_map(batch).flat_map(|batch| &mut batch.events);
        events.find_map(|event| event.prev.as_mut())?.value = "other".into();
        Some(())
    });
    caught("no entry from before", "W6", |run| {
        let items = batches(run, |request| request.prev == Prev::Return)?;
        let mut events = items.iter_mut().filter_map(batch).flat_map(|batch| &mut batch.events);
        events.find(|event| event.prev.is_some())?.prev = None;
        Some(())
    });
    caught("an event from before the start", "W1", |run| {
        let stream = run.recorded.streams.iter_mut().find(|stream| !stream.items.is_empty())?;
        let first = batch(stream.items.first_mut()?)?.revision;
        stream.request.start = first.next();
        Some(())
    });
    caught("time that goes back", "W15", |run| {
        let items = batches(run, all)?;
        batch(&mut items[3])?.time = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(2));
        batch(&mut items[5])?.time = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1));
        Some(())
    });
    caught("compacted, though no call asked for that", "W8", |run| {
        let items = batches(run, all)?;
        items[5].1 = Err(ErrorKind::Compacted { compact_revision: Revision::new(90) });
        items.truncate(6);
        Some(())
    });
}

#[test]
fn history_is_refused_when_answer_is_older_than_event() {
    let put = Txn::new().with_success([Op::put("a", "v")]);
    let kv = Kv {
        key: "a".into(),
        value: "v".into(),
        create_revision: Revision::new(2),
        mod_revision: Revision::new(2),
        version: 1,
        lease: None,
    };
    let batch =
        Batch { revision: Revision::new(2), time: None, events: vec![Event { kind: EventKind::Put, kv, prev: None }] };
    let request = WatchRequest::new(Range::All, Revision::new(2));
    let stream = Stream { client: 0, request, items: vec![(2, Ok(batch.clone()))] };
    let answered = RecordedAnswer::Range(kv::RangeResponse { revision: Revision::new(1), ..Default::default() });
    let read = |start| Call { client: 1, start, end: start + 1, request: read_all(), answered: answered.clone() };
    let put = Call {
        client: 0,
        start: 0,
        end: u64::MAX,
        request: RecordedRequest::Txn(put),
        answered: RecordedAnswer::Nothing,
    };
    let judge = |start| {
        let recorded = RecordedPart { calls: vec![put.clone(), read(start)], streams: vec![stream.clone()] };
        Replay::new(Revision::new(1), []).judge(recorded, std::slice::from_ref(&batch))
    };
    assert_eq!(judge(1).unwrap().happened, 1);
    assert_eq!(judge(3).unwrap_err().rule(), "W14");
}

fn read_all() -> RecordedRequest {
    RecordedRequest::Range(RangeRequest::new(Range::All))
}

#[test]
fn history_allows_unknown_write_in_later_part() {
    let RecordedRun { base, recorded, log, .. } = record(NetworkQuality::Good, 3);
    let mut replay = Replay::new(base, []);
    let late = Txn::new().with_success([Op::put("late", "v")]);
    let mut first = recorded;
    first.calls.push(Call {
        client: 99,
        start: 0,
        end: u64::MAX,
        request: RecordedRequest::Txn(late),
        answered: RecordedAnswer::Nothing,
    });
    assert_eq!(replay.judge(first, &log).unwrap().vanished, 1);
    let revision = log.last().unwrap().revision.next();
    let kv = Kv {
        key: "late".into(),
        value: "v".into(),
        create_revision: revision,
        mod_revision: revision,
        version: 1,
        lease: None,
    };
    let batch = |revision| Batch {
        revision,
        time: None,
        events: vec![Event { kind: EventKind::Put, kv: Kv { mod_revision: revision, ..kv.clone() }, prev: None }],
    };
    assert_eq!(replay.judge(RecordedPart::default(), &[batch(revision)]).unwrap().happened, 1);
    assert_eq!(replay.judge(RecordedPart::default(), &[batch(revision.next())]).unwrap_err().rule(), "S1");
}

#[test]
fn history_is_judged_in_parts_and_among_others() {
    let RecordedRun { base, mut recorded, log, .. } = record(NetworkQuality::Good, 4);
    recorded.calls.retain(|call| call.client % 2 == 0);
    assert!(Replay::new(base, []).judge(recorded.clone(), &log).is_err(), "others wrote as well");
    Replay::new(base, []).among_others().judge(recorded, &log).unwrap();
}
