//! Compares ranges of store keys with a naive model.

use std::collections::BTreeMap;

use arbitrary::{Result, Unstructured};
use kv::{Key, Op, Range, RangeRequest, Store, StoreExt, Txn};
use kv_mvcc::MemoryTable;

use crate::store::{block_on, open};

/// The bytes that keys consist of: a few bytes near 0x00 and 0xff and one in the middle, so that keys are often
/// neighbours in key order.
const BYTES: [u8; 5] = [0, 1, b'a', 0xfe, 0xff];

/// Runs the fuzz target `key_ranges` on an input.
pub fn key_ranges(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let keys = (0..6).map(|_| key(&mut input)).collect::<Result<Vec<_>>>();
    let ranges = (0..4).map(|_| range(&mut input)).collect::<Result<Vec<_>>>();
    // `Unstructured` pads a short input with zeros, so decoding never fails.
    let (keys, ranges) = (keys.unwrap(), ranges.unwrap());
    for key in &keys {
        check_neighbours(key, &keys);
    }
    for range in &ranges {
        check_range(range, &keys);
    }
    check_store(&keys, &ranges);
}

pub(crate) fn key(input: &mut Unstructured<'_>) -> Result<Key> {
    let len = input.int_in_range(0..=4)?;
    let bytes: Vec<u8> = (0..len).map(|_| input.choose(&BYTES).copied()).collect::<Result<_>>()?;
    Ok(Key::from(bytes))
}

pub(crate) fn range(input: &mut Unstructured<'_>) -> Result<Range> {
    Ok(match input.int_in_range(0..=4)? {
        0 => Range::Key(key(input)?),
        1 => Range::Prefix(key(input)?),
        2 => Range::FromTo(key(input)?, key(input)?),
        3 => Range::From(key(input)?),
        _ => Range::All,
    })
}

/// Returns true if a range contains a key according to the naive model, which compares keys byte by byte.
fn says(range: &Range, key: &[u8]) -> bool {
    let not_before = |from: &Key| !precedes(key, from.as_bytes());
    match range {
        Range::Key(only) => !precedes(key, only.as_bytes()) && !precedes(only.as_bytes(), key),
        Range::Prefix(prefix) => key.get(..prefix.as_bytes().len()) == Some(prefix.as_bytes()),
        Range::FromTo(from, to) => not_before(from) && precedes(key, to.as_bytes()),
        Range::From(from) => not_before(from),
        Range::All => true,
    }
}

/// Returns true if `a` sorts before `b` in the order of unsigned bytes, in which a string precedes all longer strings
/// that begin with it.
fn precedes(a: &[u8], b: &[u8]) -> bool {
    for (place, other) in b.iter().enumerate() {
        match a.get(place) {
            None => return true,
            Some(byte) if byte < other => return true,
            Some(byte) if byte > other => return false,
            Some(_) => {}
        }
    }
    false
}

fn check_neighbours(key: &Key, keys: &[Key]) {
    let next = key.successor();
    assert!(precedes(key.as_bytes(), next.as_bytes()), "{key} and its successor {next}");
    for other in keys {
        let after = precedes(key.as_bytes(), other.as_bytes());
        assert_eq!(after, !precedes(other.as_bytes(), next.as_bytes()), "{other} between {key} and its successor");
        let end = key.prefix_end();
        let before_end = end.is_none_or(|end| precedes(other.as_bytes(), end.as_bytes()));
        let inside = !precedes(other.as_bytes(), key.as_bytes()) && before_end;
        assert_eq!(inside, other.as_bytes().starts_with(key.as_bytes()), "{other} and the prefix {key}");
    }
}

fn check_range(range: &Range, keys: &[Key]) {
    assert!(range.to_string().bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{range} is not escaped");
    let (from, to) = range.bounds();
    for key in keys {
        let bytes = key.as_bytes();
        let expected = says(range, bytes);
        assert_eq!(range.contains(bytes), expected, "{range} and {key}");
        let within = !precedes(bytes, from.as_bytes()) && to.as_ref().is_none_or(|to| precedes(bytes, to.as_bytes()));
        assert_eq!(within, expected, "the bounds of {range} and {key}");
        assert!(!(expected && range.is_empty()), "{range} is empty and has {key}");
    }
    assert_eq!(range.is_empty(), !says(range, from.as_bytes()), "{range} and its start");
}

/// Checks that a store reads and deletes exactly the keys in the ranges, at the current revision and at past ones.
fn check_store(keys: &[Key], ranges: &[Range]) {
    let store = open(Box::new(MemoryTable::new())).unwrap();
    block_on(async {
        let mut model: BTreeMap<Key, ()> = BTreeMap::new();
        let mut states = Vec::new();
        for key in keys.iter().filter(|key| !key.is_empty()) {
            let put = store.txn(Txn::new().with_success([Op::put(key.clone(), "v")])).await.unwrap();
            model.insert(key.clone(), ());
            states.push((put.revision, model.clone()));
        }
        for range in ranges.iter().filter(|range| **range != Range::key("")) {
            let deleted = store.txn(Txn::new().with_success([Op::delete_range(range.clone())])).await.unwrap();
            model.retain(|key, ()| !says(range, key.as_bytes()));
            states.push((deleted.revision, model.clone()));
            for (at, state) in &states {
                let found = store.range(RangeRequest::new(range.clone()).with_at(*at)).await.unwrap();
                let found: Vec<Key> = found.kvs.into_iter().map(|kv| kv.key).collect();
                let expected: Vec<Key> = state.keys().filter(|key| says(range, key.as_bytes())).cloned().collect();
                assert_eq!(found, expected, "{range} at {at}");
            }
        }
        let found: Vec<Key> = store.list(Range::All).await.unwrap().kvs.into_iter().map(|kv| kv.key).collect();
        assert_eq!(found, model.into_keys().collect::<Vec<_>>());
    });
}
