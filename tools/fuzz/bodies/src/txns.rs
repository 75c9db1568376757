//! Compares the validation of transactions with a second implementation of the conformance rules X1 to X4 and T8.

use arbitrary::{Result, Unstructured};
use kv::{
    Compare, CompareOp, Content, ErrorKind, InvalidArgument, Key, Op, Outcome, Range, Revision, Store, Target, Txn,
    TxnRange, Value,
};
use kv_mvcc::MemoryTable;

use crate::ranges::{key, range};
use crate::store::{block_on, open};

/// Runs the fuzz target `txn_check` on an input.
pub fn txn_check(data: &[u8]) {
    let txn = txn(&mut Unstructured::new(data)).unwrap();
    let faults = faults(&txn);
    let checked = txn.check("fuzz");
    match &checked {
        Ok(()) => assert!(faults.is_empty(), "taken in spite of {faults:?}"),
        Err(error) => {
            assert!(faults.contains(error.kind()), "{error} is none of {faults:?}");
            assert_eq!(error.outcome(), Outcome::NotApplied, "{error}");
            assert!(!error.to_string().is_empty());
        }
    }
    let store = open(Box::new(MemoryTable::new())).unwrap();
    let answer = block_on(store.txn(txn.clone()));
    assert_eq!(
        answer.as_ref().map(|_| ()).map_err(kv::Error::kind),
        checked.as_ref().copied().map_err(kv::Error::kind)
    );
    match answer {
        Ok(answer) => {
            let ran = if answer.succeeded { &txn.success } else { &txn.failure };
            assert_eq!(answer.results.len(), ran.len());
        }
        Err(_) => assert_eq!(store.status().revision, Revision::new(1), "a refusal changes nothing"),
    }
}

fn txn(input: &mut Unstructured<'_>) -> Result<Txn> {
    let compares = many(input, compare)?;
    let success = many(input, op)?;
    let failure = many(input, op)?;
    Ok(Txn::new().with_compares(compares).with_success(success).with_failure(failure))
}

/// Generates a few random items, and sometimes repeats one of them, up to about the maximum number of items.
fn many<T: Clone>(input: &mut Unstructured<'_>, one: fn(&mut Unstructured<'_>) -> Result<T>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for _ in 0..input.int_in_range(0..=4)? {
        let thing = one(input)?;
        let times = if input.ratio(1, 16)? { input.int_in_range(120..=130)? } else { 1 };
        all.extend(std::iter::repeat_n(thing, times));
    }
    Ok(all)
}

/// Generates a random key, sometimes with about the maximum length.
fn any_key(input: &mut Unstructured<'_>) -> Result<Key> {
    if input.ratio(1, 16)? {
        return Ok(Key::from(vec![b'k'; input.int_in_range(4095..=4098)?]));
    }
    key(input)
}

fn any_range(input: &mut Unstructured<'_>) -> Result<Range> {
    Ok(match input.int_in_range(0..=7)? {
        0 => Range::Key(any_key(input)?),
        1 => Range::Prefix(any_key(input)?),
        2 => Range::From(any_key(input)?),
        3 => Range::FromTo(any_key(input)?, any_key(input)?),
        _ => range(input)?,
    })
}

fn value(input: &mut Unstructured<'_>) -> Result<Value> {
    let len = if input.ratio(1, 16)? {
        *input.choose(&[1_499_999, 1_500_000, 1_500_001, 1_549_900, 775_000])?
    } else {
        input.int_in_range(0..=9)?
    };
    Ok(Value::from(vec![7; len]))
}

fn compare(input: &mut Unstructured<'_>) -> Result<Compare> {
    let op = *input.choose(&[CompareOp::Equal, CompareOp::NotEqual, CompareOp::Less, CompareOp::Greater])?;
    let number: i64 = input.arbitrary()?;
    let target = match input.int_in_range(0..=3)? {
        0 => Target::Version(number),
        1 => Target::CreateRevision(Revision::new(number)),
        2 => Target::ModRevision(Revision::new(number)),
        _ => Target::Value(value(input)?),
    };
    Ok(match input.int_in_range(0..=3)? {
        0 => Compare::unchanged(any_key(input)?, Revision::new(number)),
        1 => Compare::nothing_newer(any_range(input)?, Revision::new(number)),
        _ => Compare::new(any_range(input)?, op, target),
    })
}

fn op(input: &mut Unstructured<'_>) -> Result<Op> {
    let op = match input.int_in_range(0..=3)? {
        0 => Op::delete_range(any_range(input)?),
        1 => {
            let content = *input.choose(&[Content::Full, Content::KeysOnly, Content::CountOnly])?;
            Op::Range(TxnRange::new(any_range(input)?).with_limit(input.arbitrary()?).with_content(content))
        }
        _ => Op::put(any_key(input)?, value(input)?),
    };
    Ok(if input.arbitrary()? { op.with_prev() } else { op })
}

/// Returns all violations of the conformance rules X1 to X4 and T8 in a transaction.
fn faults(txn: &Txn) -> Vec<ErrorKind> {
    let mut faults = Vec::new();
    for count in [txn.compares.len(), txn.success.len(), txn.failure.len()] {
        if count > 128 {
            faults.push(InvalidArgument::TooManyOps { count }.into());
        }
    }
    let mut bytes = 0;
    for compare in &txn.compares {
        faults.extend(range_faults(&compare.range));
        bytes += 32 + range_size(&compare.range);
        if let Target::Value(value) = &compare.target {
            bytes += value.len();
        }
    }
    for branch in [&txn.success, &txn.failure] {
        for (place, op) in branch.iter().enumerate() {
            bytes += 32 + op_size(op);
            faults.extend(op_faults(op));
            if let Op::Put { key, .. } = op
                && branch.iter().enumerate().any(|(other, op)| other != place && writes(op, key))
            {
                faults.push(InvalidArgument::DuplicateKey(key.clone()).into());
            }
        }
    }
    if bytes > 1_550_000 {
        faults.push(ErrorKind::TooLarge { bytes });
    }
    faults
}

fn writes(op: &Op, key: &Key) -> bool {
    match op {
        Op::Put { key: same, .. } => same == key,
        Op::Delete { range, .. } => range.contains(key.as_bytes()),
        _ => false,
    }
}

fn op_faults(op: &Op) -> Vec<ErrorKind> {
    match op {
        Op::Put { key, value, .. } => {
            let large = (value.len() > 1_500_000).then_some(ErrorKind::TooLarge { bytes: value.len() });
            range_faults(&Range::Key(key.clone())).into_iter().chain(large).collect()
        }
        Op::Delete { range, .. } | Op::Range(TxnRange { range, .. }) => range_faults(range),
    }
}

fn op_size(op: &Op) -> usize {
    match op {
        Op::Put { key, value, .. } => key.as_bytes().len() + value.len(),
        Op::Delete { range, .. } | Op::Range(TxnRange { range, .. }) => range_size(range),
    }
}

fn range_faults(range: &Range) -> Vec<ErrorKind> {
    // The next page of a range starts directly after a key, so a bound of a range may be one byte longer than the
    // longest key.
    let (ends, most): (&[&Key], usize) = match range {
        Range::Key(key) | Range::Prefix(key) => (&[key], 4096),
        Range::From(from) => (&[from], 4097),
        Range::FromTo(from, to) => (&[from, to], 4097),
        Range::All => (&[], 0),
    };
    let mut faults: Vec<_> = ends
        .iter()
        .map(|key| key.as_bytes().len())
        .filter(|bytes| *bytes > most)
        .map(|bytes| InvalidArgument::KeyTooLong { bytes }.into())
        .collect();
    if matches!(range, Range::Key(key) if key.as_bytes().is_empty()) {
        faults.push(InvalidArgument::EmptyKey.into());
    }
    faults
}

/// Returns the size of a range in bytes as the conformance rules define it: the length of the key, or of both bounds.
/// The upper bound of a prefix range has the same size as the prefix.
fn range_size(range: &Range) -> usize {
    match range {
        Range::Key(key) => key.as_bytes().len(),
        Range::Prefix(key) | Range::From(key) => 2 * key.as_bytes().len(),
        Range::FromTo(from, to) => from.as_bytes().len() + to.as_bytes().len(),
        Range::All => 2,
    }
}
