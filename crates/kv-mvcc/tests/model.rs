//! Tests random sequences of operations against a model that keeps a complete map for every revision.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use kv::{
    Compare, CompareOp, Content, ErrorKind, Event, EventKind, Key, Kv, Op, OpResult, Prev, Range, RangeRequest,
    RangeResponse, Revision, Store, Target, Txn, TxnRange, TxnResponse, Value, WatchRequest,
};
use kv_mvcc::{MAX_ROW_BYTES, MemoryTable, MvccStore, Options, Retention};
use proptest::prelude::*;

type Map = BTreeMap<Key, Kv>;

/// A simple model of a store that keeps every revision as a complete map.
struct Model {
    /// The keys and values of the modelled store at each revision, from revision 1 on.
    states: Vec<Map>,
    events: Vec<Vec<Event>>,
    mark: i64,
}

fn in_range(map: &Map, range: &Range) -> Vec<Kv> {
    map.values().filter(|kv| range.contains(kv.key.as_bytes())).cloned().collect()
}

fn answer(map: &Map, request: &TxnRange, revision: i64) -> RangeResponse {
    let mut kvs = in_range(map, &request.range);
    let count = kvs.len() as u64;
    if request.content == Content::CountOnly {
        return RangeResponse { revision: Revision::new(revision), kvs: Vec::new(), count, more: false };
    }
    if request.limit > 0 {
        kvs.truncate(usize::try_from(request.limit).unwrap());
    }
    if request.content == Content::KeysOnly {
        kvs.iter_mut().for_each(|kv| kv.value = Value::default());
    }
    let more = count > kvs.len() as u64;
    RangeResponse { revision: Revision::new(revision), kvs, count, more }
}

fn compare_holds(map: &Map, compare: &Compare) -> bool {
    let number = |stored: i64, given: i64| match compare.op {
        CompareOp::Equal => stored == given,
        CompareOp::NotEqual => stored != given,
        CompareOp::Less => stored < given,
        CompareOp::Greater => stored > given,
    };
    let one = |kv: Option<&Kv>| match &compare.target {
        Target::Version(given) => number(kv.map_or(0, |kv| kv.version), *given),
        Target::CreateRevision(given) => number(kv.map_or(0, |kv| kv.create_revision.get()), given.get()),
        Target::ModRevision(given) => number(kv.map_or(0, |kv| kv.mod_revision.get()), given.get()),
        Target::Value(given) => kv.is_some_and(|kv| {
            number(
                match kv.value.as_bytes().cmp(given.as_bytes()) {
                    std::cmp::Ordering::Less => -1,
                    std::cmp::Ordering::Equal => 0,
                    std::cmp::Ordering::Greater => 1,
                },
                0,
            )
        }),
        Target::Lease(given) => number(0, *given),
    };
    let found = in_range(map, &compare.range);
    if found.is_empty() { one(None) } else { found.iter().all(|kv| one(Some(kv))) }
}

impl Model {
    fn new() -> Self {
        Self { states: vec![Map::new()], events: vec![Vec::new()], mark: 0 }
    }

    fn revision(&self) -> i64 {
        i64::try_from(self.states.len()).unwrap()
    }

    fn at(&self, revision: i64) -> &Map {
        &self.states[usize::try_from(revision).unwrap() - 1]
    }

    fn txn(&mut self, txn: &Txn) -> TxnResponse {
        let mut map = self.at(self.revision()).clone();
        let next = Revision::new(self.revision() + 1);
        let succeeded = txn.compares.iter().all(|compare| compare_holds(&map, compare));
        let (mut events, mut results) = (Vec::new(), Vec::new());
        for op in if succeeded { &txn.success } else { &txn.failure } {
            results.push(match op {
                Op::Put { key, value, prev, .. } => {
                    let old = map.get(key).cloned();
                    let kv = Kv {
                        key: key.clone(),
                        value: value.clone(),
                        create_revision: old.as_ref().map_or(next, |old| old.create_revision),
                        mod_revision: next,
                        version: old.as_ref().map_or(0, |old| old.version) + 1,
                        lease: None,
                    };
                    map.insert(key.clone(), kv.clone());
                    events.push(Event { kind: EventKind::Put, kv, prev: old.clone() });
                    OpResult::Put { prev: old.filter(|_| *prev == Prev::Return) }
                }
                Op::Delete { range, prev } => {
                    let found = in_range(&map, range);
                    for kv in &found {
                        map.remove(&kv.key);
                        let gone = Kv {
                            key: kv.key.clone(),
                            value: Value::default(),
                            create_revision: Revision::UNSET,
                            mod_revision: next,
                            version: 0,
                            lease: None,
                        };
                        events.push(Event { kind: EventKind::Delete, kv: gone, prev: Some(kv.clone()) });
                    }
                    let count = found.len() as u64;
                    OpResult::Delete { count, prevs: if *prev == Prev::Return { found } else { Vec::new() } }
                }
                Op::Range(request) => OpResult::Range(answer(&map, request, 0)),
            });
        }
        if !events.is_empty() {
            self.states.push(map);
            self.events.push(events);
        }
        let revision = Revision::new(self.revision());
        for result in &mut results {
            if let OpResult::Range(answer) = result {
                answer.revision = revision;
            }
        }
        TxnResponse { revision, succeeded, results }
    }

    fn compact(&mut self, mark: i64) -> Result<(), ErrorKind> {
        if mark <= self.mark {
            return Err(ErrorKind::Compacted { compact_revision: Revision::new(self.mark) });
        }
        if mark > self.revision() {
            return Err(ErrorKind::FutureRevision);
        }
        self.mark = mark;
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Txns(Vec<Txn>),
    /// Compacts the history at the newest revision minus this number; a negative number names a future revision.
    Compact(i64),
    Reopen,
}

const KEYS: [&[u8]; 7] = [b"a", b"a\0", b"a/1", b"a/10", b"b", b"\xff", b"\xff\xff"];

fn key() -> impl Strategy<Value = Key> {
    proptest::sample::select(&KEYS[..]).prop_map(Key::from)
}

fn range() -> impl Strategy<Value = Range> {
    prop_oneof![
        4 => key().prop_map(Range::Key),
        1 => key().prop_map(Range::Prefix),
        1 => (key(), key()).prop_map(|(from, to)| Range::FromTo(from, to)),
        1 => key().prop_map(Range::From),
        1 => Just(Range::All),
        1 => Just(Range::prefix("")),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        8 => "[a-c]{0,2}".prop_map(Value::from),
        // The value has about the maximum length that fits into one row, or needs three rows.
        1 => (MAX_ROW_BYTES - 6..MAX_ROW_BYTES + 2).prop_map(|len| Value::from(vec![7; len])),
        1 => Just(Value::from(vec![9; 2 * MAX_ROW_BYTES + 1])),
    ]
}

fn compare() -> impl Strategy<Value = Compare> {
    let op = proptest::sample::select(vec![CompareOp::Equal, CompareOp::NotEqual, CompareOp::Less, CompareOp::Greater]);
    let target = prop_oneof![
        (0_i64..4).prop_map(Target::Version),
        (0_i64..30).prop_map(|revision| Target::CreateRevision(Revision::new(revision))),
        (0_i64..30).prop_map(|revision| Target::ModRevision(Revision::new(revision))),
        "[a-c]{0,2}".prop_map(|value| Target::Value(value.into())),
    ];
    (range(), op, target).prop_map(|(range, op, target)| Compare::new(range, op, target))
}

fn request() -> impl Strategy<Value = TxnRange> {
    let content = proptest::sample::select(vec![Content::Full, Content::KeysOnly, Content::CountOnly]);
    (range(), -1_i64..5, content)
        .prop_map(|(range, limit, content)| TxnRange::new(range).with_limit(limit).with_content(content))
}

fn op() -> impl Strategy<Value = Op> {
    let write = prop_oneof![
        3 => (key(), value()).prop_map(|(key, value)| Op::put(key, value)),
        2 => range().prop_map(Op::delete_range),
    ];
    prop_oneof![
        4 => (write, any::<bool>()).prop_map(|(op, prev)| if prev { op.with_prev() } else { op }),
        1 => request().prop_map(Op::Range),
    ]
}

fn txn() -> impl Strategy<Value = Txn> {
    let ops = || proptest::collection::vec(op(), 0..4);
    (proptest::collection::vec(compare(), 0..2), ops(), ops()).prop_map(|(compares, success, failure)| {
        Txn::new().with_compares(compares).with_success(success).with_failure(failure)
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => proptest::collection::vec(txn(), 1..4).prop_map(Step::Txns),
        1 => (-1_i64..12).prop_map(Step::Compact),
        1 => Just(Step::Reopen),
    ]
}

fn open(table: &MemoryTable) -> MvccStore {
    let options = Options { retention: Retention::UNBOUNDED, ..Options::default() };
    MvccStore::open(Box::new(table.clone()), options).unwrap()
}

/// Runs a random sequence of steps on the store and the model, then compares all reads and watches at every revision.
async fn run(steps: Vec<Step>, requests: Vec<TxnRange>) {
    let table = MemoryTable::new();
    let mut store = open(&table);
    let mut model = Model::new();
    for step in steps {
        match step {
            Step::Txns(txns) => apply(&store, &mut model, txns).await,
            Step::Compact(back) => {
                let mark = model.revision() - back;
                let result = store.compact(Revision::new(mark)).await.map_err(|error| error.kind().clone());
                if mark < 1 {
                    assert!(matches!(result, Err(ErrorKind::InvalidArgument(_))), "{result:?}");
                } else {
                    assert_eq!(result, model.compact(mark));
                }
            }
            Step::Reopen => {
                store.close().await.unwrap();
                store = open(&table);
            }
        }
        assert_eq!(store.status().revision.get(), model.revision());
    }
    store.verify().await.unwrap();
    check_reads(&store, &model, &requests).await;
    check_watches(&store, &model, &requests).await;
}

/// Runs transactions concurrently, so that they may share a commit. Writing transactions must take effect in the order
/// in which they were queued.
async fn apply(store: &MvccStore, model: &mut Model, txns: Vec<Txn>) {
    let answers = futures::future::join_all(txns.iter().map(|txn| store.txn(txn.clone()))).await;
    let mut read_only = Vec::new();
    let first = model.revision();
    for (txn, answer) in txns.iter().zip(answers) {
        if txn.check("model").is_err() {
            assert!(matches!(answer.unwrap_err().kind(), ErrorKind::InvalidArgument(_)));
        } else if txn.is_read_only() {
            // A read-only transaction does not wait in the writer's queue, so its response may show any state between
            // the first and the last write.
            read_only.push((txn, answer.unwrap()));
        } else {
            assert_eq!(answer.unwrap(), model.txn(txn), "{txn:?}");
        }
    }
    for (txn, answer) in read_only {
        let seen = answer.revision.get();
        assert!((first..=model.revision()).contains(&seen));
        let states = model.states[..usize::try_from(seen).unwrap()].to_vec();
        let events = vec![Vec::new(); states.len()];
        assert_eq!(answer, Model { states, events, mark: 0 }.txn(txn), "{txn:?}");
    }
}

async fn check_reads(store: &MvccStore, model: &Model, requests: &[TxnRange]) {
    for at in 0..=model.revision() + 1 {
        for request in requests {
            let TxnRange { range, limit, content, .. } = request.clone();
            let read = RangeRequest::new(range).with_at(Revision::new(at)).with_limit(limit).with_content(content);
            let found = store.range(read).await.map_err(|error| error.kind().clone());
            let expected = if at > model.revision() {
                Err(ErrorKind::FutureRevision)
            } else if at > 0 && at < model.mark {
                Err(ErrorKind::Compacted { compact_revision: Revision::new(model.mark) })
            } else {
                let state = model.at(if at > 0 { at } else { model.revision() });
                Ok(answer(state, request, model.revision()))
            };
            assert_eq!(found, expected, "{request:?} at {at}");
        }
    }
}

async fn check_watches(store: &MvccStore, model: &Model, requests: &[TxnRange]) {
    for start in 1..=model.revision() {
        for range in requests.iter().map(|request| &request.range).filter(|range| !range.is_empty()) {
            let request = WatchRequest::new(range.clone(), Revision::new(start)).with_prev(Prev::Return);
            let mut stream = store.watch(request).await.unwrap();
            if start < model.mark {
                let error = stream.next().await.unwrap().unwrap_err();
                assert_eq!(*error.kind(), ErrorKind::Compacted { compact_revision: Revision::new(model.mark) });
                assert!(stream.next().await.is_none());
                continue;
            }
            for revision in start..=model.revision() {
                let mut events = model.events[usize::try_from(revision).unwrap() - 1].clone();
                events.retain(|event| range.contains(event.kv.key.as_bytes()));
                if events.is_empty() {
                    continue;
                }
                let batch = tokio::time::timeout(Duration::from_secs(20), stream.next()).await.unwrap();
                let batch = batch.unwrap().unwrap();
                assert_eq!((batch.revision.get(), batch.events), (revision, events), "{range} from {start}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn store_matches_model(
        steps in proptest::collection::vec(step(), 1..24),
        requests in proptest::collection::vec(request(), 3),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(run(steps, requests));
    }
}
