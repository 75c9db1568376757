//! Generates the next call of a random sequence of store calls.

use kv::{
    Compare, CompareOp, Content, Key, Op, Prev, Range, RangeRequest, Revision, Target, Txn, TxnRange, Value,
    WatchRequest,
};
use proptest::collection::vec;
use proptest::prelude::{BoxedStrategy, Just, Strategy, prop_oneof};
use proptest::sample::select;

use crate::groups::random::Reopening;
use crate::model::Model;

/// One step of a random sequence: a store call, or an event such as reopening the store.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Txn(Txn),
    Read(RangeRequest),
    Watch(WatchRequest),
    Compact(Revision),
    Reopen,
}

/// The keys that the generated calls use. Only a few keys are used, so that operations often collide. Some generated
/// keys are prefixes of other keys or end in 0xff.
const KEYS: [&[u8]; 10] = [b"a", b"a\0", b"a/1", b"a/10", b"a/2", b"a\xff", b"b", b"b/1", b"\xff", b"\xff\xff"];

/// Generates any step. The revisions in a generated call are close to the model's revision.
pub(crate) fn step(model: &Model, reopening: Reopening) -> BoxedStrategy<Step> {
    let (mark, now) = (model.mark().get(), model.revision().get());
    let txn = (vec(compare(now), 0..3), vec(op(), 0..5), vec(op(), 0..5)).prop_map(|(compares, success, failure)| {
        Step::Txn(Txn::new().with_compares(compares).with_success(success).with_failure(failure))
    });
    let read = (range(), -1..=now + 1, -1i64..6, content()).prop_map(|(range, at, limit, content)| {
        Step::Read(RangeRequest::new(range).with_at(Revision::new(at)).with_limit(limit).with_content(content))
    });
    // Generated watches start above the model's first revision, because the model does not know the changes that led to
    // this revision.
    let watch = (range(), 2..=now + 1, prev()).prop_map(|(range, start, prev)| {
        let range = if range.is_empty() { Range::All } else { range };
        Step::Watch(WatchRequest::new(range, Revision::new(start)).with_prev(prev))
    });
    let compact = (mark - 1..=now + 1).prop_map(|to| Step::Compact(Revision::new(to)));
    match reopening {
        Reopening::Never => prop_oneof![60 => txn, 25 => read, 10 => watch, 3 => compact].boxed(),
        Reopening::Sometimes => {
            prop_oneof![60 => txn, 25 => read, 10 => watch, 3 => compact, 3 => Just(Step::Reopen)].boxed()
        }
    }
}

fn key() -> impl Strategy<Value = Key> {
    select(&KEYS[..]).prop_map(Key::from)
}

fn range() -> impl Strategy<Value = Range> {
    prop_oneof![
        4 => key().prop_map(Range::Key),
        2 => key().prop_map(Range::Prefix),
        2 => (key(), key()).prop_map(|(from, to)| Range::FromTo(from, to)),
        1 => key().prop_map(Range::From),
        1 => Just(Range::All),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    vec(b'a'..=b'c', 0..3).prop_map(Value::new)
}

fn content() -> impl Strategy<Value = Content> {
    select(&[Content::Full, Content::Full, Content::KeysOnly, Content::CountOnly][..])
}

fn prev() -> impl Strategy<Value = Prev> {
    select(&[Prev::Omit, Prev::Return][..])
}

fn compare(now: i64) -> impl Strategy<Value = Compare> {
    let op = select(&[CompareOp::Equal, CompareOp::NotEqual, CompareOp::Less, CompareOp::Greater][..]);
    let near = move || (-1..=now + 1).prop_map(Revision::new);
    let target = prop_oneof![
        (0i64..4).prop_map(Target::Version),
        near().prop_map(Target::CreateRevision),
        near().prop_map(Target::ModRevision),
        Just(Target::ModRevision(Revision::UNSET)),
        value().prop_map(Target::Value),
    ];
    (range(), op, target).prop_map(|(range, op, target)| Compare::new(range, op, target))
}

fn op() -> impl Strategy<Value = Op> {
    let read = (range(), -1i64..6, content())
        .prop_map(|(range, limit, content)| Op::Range(TxnRange::new(range).with_limit(limit).with_content(content)));
    prop_oneof![
        5 => (key(), value(), prev()).prop_map(|(key, value, prev)| Op::Put { key, value, prev, lease: None }),
        2 => (range(), prev()).prop_map(|(range, prev)| Op::Delete { range, prev }),
        3 => read,
    ]
}
