//! Generates random calls of a client: reads, and transactions of all forms, on a few keys. No two generated puts write
//! the same value.

use fastrand::Rng;
use kv::{Compare, CompareOp, Content, Key, Kv, Op, OpResult, Range, RangeRequest, Revision, Target, Txn, TxnResponse};

use crate::groups::network::NetworkQuality;

pub(crate) const KEYS: usize = 6;

pub(crate) fn key(i: usize) -> String {
    format!("k/{i}")
}

#[derive(Clone, Debug)]
pub(crate) enum GeneratedCall {
    Read(RangeRequest),
    Txn(Txn),
}

/// A deterministic generator of random calls: its calls depend only on the seed and on the answers to earlier calls.
pub(crate) struct CallGenerator {
    random: Rng,
    client: u64,
    network: NetworkQuality,
    writes: u32,
    /// For each key, the mod revision that this client last saw, for use in guards.
    known: Vec<Revision>,
    newest: Revision,
}

impl CallGenerator {
    pub(crate) fn new(seed: u64, client: u64, network: NetworkQuality) -> Self {
        let known = vec![Revision::UNSET; KEYS];
        let random = Rng::with_seed(seed);
        Self { random, client, network, writes: 0, known, newest: Revision::UNSET }
    }

    /// Returns true if the client drops its next call before the call completes: sometimes on a bad network, never on a
    /// good one.
    pub(crate) fn gives_up(&mut self) -> bool {
        self.network == NetworkQuality::Bad && self.random.u8(..100) < 4
    }

    /// The number of times that the future of a call is polled before it is dropped.
    pub(crate) fn patience(&mut self) -> usize {
        self.random.usize(..4)
    }

    pub(crate) fn next(&mut self) -> GeneratedCall {
        match self.random.u8(..20) {
            0..=2 => GeneratedCall::Read(RangeRequest::new(Range::key(self.key()))),
            3..=5 => GeneratedCall::Read(self.listing()),
            6 => GeneratedCall::Read(self.listing().with_at(self.newest)),
            _ => GeneratedCall::Txn(self.txn()),
        }
    }

    /// Remembers the mod revisions of the entries that a read returned: later calls use them in guards, so that some of
    /// these guards hold.
    pub(crate) fn learn(&mut self, kvs: &[Kv]) {
        for kv in kvs {
            self.set(&kv.key, kv.mod_revision);
        }
    }

    /// Remembers the mod revisions of the entries that a transaction read or wrote: later calls use them in guards, so
    /// that some of these guards hold.
    pub(crate) fn learn_txn(&mut self, txn: &Txn, answer: &TxnResponse) {
        self.newest = answer.revision;
        let branch = if answer.succeeded { &txn.success } else { &txn.failure };
        for op in branch {
            if let Op::Put { key, .. } = op {
                self.set(key, answer.revision);
            }
        }
        for result in &answer.results {
            if let OpResult::Range(found) = result {
                self.learn(&found.kvs);
            }
        }
    }

    fn set(&mut self, key: &Key, revision: Revision) {
        if let Some(known) = (0..KEYS).find(|i| *key == Key::from(self::key(*i))).and_then(|i| self.known.get_mut(i)) {
            *known = revision;
        }
    }

    fn listing(&mut self) -> RangeRequest {
        let content = match self.random.u8(..3) {
            0 => Content::KeysOnly,
            1 => Content::CountOnly,
            _ => Content::Full,
        };
        RangeRequest::new(self.span()).with_limit(self.random.i64(..4)).with_content(content)
    }

    fn txn(&mut self) -> Txn {
        let (one, other) = self.two_keys();
        let expected = self.known[one];
        let (one, other) = (key(one), key(other));
        let unchanged = Compare::unchanged(one.as_str(), expected);
        let read = || Op::range(Range::key(one.as_str()));
        match self.random.u8(..10) {
            0 => Txn::new().with_success([self.put(&one)]),
            1 => Txn::new().with_success([self.put(&one), self.put(&other).with_prev()]),
            2 => Txn::new()
                .with_compares([Compare::absent(one.as_str())])
                .with_success([self.put(&one)])
                .with_failure([read()]),
            3 | 4 => {
                Txn::new().with_compares([unchanged]).with_success([self.put(&one), read()]).with_failure([read()])
            }
            5 => Txn::new().with_compares([unchanged]).with_success([Op::delete(one.as_str()).with_prev()]),
            6 => Txn::new()
                .with_compares([Compare::new(Range::key(one.as_str()), CompareOp::Greater, Target::Version(0))])
                .with_success([Op::delete(one.as_str()), self.put(&other)])
                .with_failure([self.put(&one)]),
            7 => Txn::new().with_success([Op::delete_range(self.span()).with_prev()]),
            8 => Txn::new().with_compares([unchanged]).with_success([Op::range(Range::prefix("k/"))]),
            // On a bad network, the generator makes only valid requests, because the simulated network delivers held
            // requests without checks.
            _ if self.network == NetworkQuality::Bad => Txn::new().with_success([Op::delete(one.as_str())]),
            _ => Txn::new().with_success([self.put(&one), self.put(&one)]),
        }
    }

    fn put(&mut self, key: &str) -> Op {
        self.writes += 1;
        Op::put(key, format!("{}/{}", self.client, self.writes))
    }

    fn key(&mut self) -> String {
        key(self.random.usize(..KEYS))
    }

    fn two_keys(&mut self) -> (usize, usize) {
        let one = self.random.usize(..KEYS);
        (one, (one + self.random.usize(1..KEYS)) % KEYS)
    }

    fn span(&mut self) -> Range {
        match self.random.u8(..3) {
            0 => Range::prefix("k/"),
            1 => Range::FromTo(self.key().into(), self.key().into()),
            _ => Range::key(self.key()),
        }
    }
}
