//! Tests how `transact!` finds out the outcome of unanswered commits while another writer changes the same keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use kv::wrap::{Fault, FaultyStore};
use kv::{Committed, Error, Key, Op, Outcome, Range, Revision, Store, StoreExt, Txn, transact};
use kv_mvcc::MvccStore;

use super::{options, shared};

/// What another writer does before or after the commit under test.
#[derive(Clone, Debug)]
enum WriterAction {
    Write(Txn),
    /// The writer that interferes with the transaction under test compacts the store at its latest revision.
    Compact,
}

fn put(key: &str, value: &str) -> WriterAction {
    WriterAction::Write(Txn::new().with_success([Op::put(key, value)]))
}

fn delete(key: &str) -> WriterAction {
    WriterAction::Write(Txn::new().with_success([Op::delete(key)]))
}

/// A store wrapper that injects a fault into the first commit, and lets another writer change keys just before and
/// after this commit.
#[derive(Clone, Debug)]
struct Contended {
    inner: FaultyStore<MvccStore>,
    other: MvccStore,
    before: Vec<WriterAction>,
    after: Vec<WriterAction>,
    calls: Arc<AtomicU32>,
}

impl Contended {
    fn new(other: &MvccStore, fault: Fault, before: Vec<WriterAction>, after: Vec<WriterAction>) -> Self {
        let inner = FaultyStore::script(other.clone(), [None, Some(fault)]);
        Self { inner, other: other.clone(), before, after, calls: Arc::default() }
    }

    async fn act(&self, deeds: &[WriterAction]) -> kv::Result<()> {
        for deed in deeds {
            match deed {
                WriterAction::Write(txn) => {
                    self.other.txn(txn.clone()).await?;
                }
                WriterAction::Compact => {
                    let now = self.other.range(kv::RangeRequest::new(Range::key("k"))).await?.revision;
                    self.other.compact(now).await?;
                }
            }
        }
        Ok(())
    }
}

#[async_trait::async_trait]
impl Store for Contended {
    async fn range(&self, request: kv::RangeRequest) -> kv::Result<kv::RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<kv::TxnResponse> {
        let is_commit = self.calls.fetch_add(1, SeqCst) == 1;
        if is_commit {
            self.act(&self.before).await?;
        }
        let answer = self.inner.txn(txn).await;
        if is_commit {
            self.act(&self.after).await?;
        }
        answer
    }

    async fn watch(&self, request: kv::WatchRequest) -> kv::Result<kv::WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}

/// In one transaction, reads the key `config` and creates every key of `keys` that is absent.
async fn create(store: &Contended, keys: &[&str]) -> Result<Committed<()>, Error> {
    let keys: Vec<Key> = keys.iter().map(|key| Key::from(*key)).collect();
    transact!(shared(store), options(), |tx| {
        tx.get(&"config".into()).await?;
        for key in &keys {
            if tx.get(key).await?.is_none() {
                tx.put(key, "ours")?;
            }
        }
        Ok::<_, Error>(())
    })
}

/// The number of times that a key was created with the value of the transaction under test.
async fn creations(store: &MvccStore, key: &str) -> usize {
    let last = store.range(kv::RangeRequest::new(Range::key(key))).await.unwrap().revision;
    let mut found = std::collections::BTreeSet::new();
    for revision in 1..=last.get() {
        let then = store.range(kv::RangeRequest::new(Range::key(key)).with_at(Revision::new(revision))).await.unwrap();
        found.extend(then.kvs.into_iter().filter(|kv| kv.value == "ours".into()).map(|kv| kv.create_revision));
    }
    found.len()
}

#[tokio::test(start_paused = true)]
async fn settling_does_not_repeat_creation_removed_since() {
    for after in [
        vec![delete("k")],
        vec![put("k", "another's"), delete("k")],
        vec![delete("k"), put("k", "another's"), delete("k")],
        vec![delete("k"), delete("l")],
        // The guarded key `config` has changed, so the commit under test cannot succeed when `transact!` sends it
        // again.
        vec![delete("k"), delete("l"), put("config", "new")],
        vec![delete("k"), put("k", "another's")],
        vec![put("config", "new")],
    ] {
        let inner = kv_mvcc::memory();
        let store = Contended::new(&inner, Fault::ReplyLost, Vec::new(), after.clone());
        let committed = create(&store, &["k", "l"]).await.unwrap();
        assert_eq!((committed.revision, committed.attempts), (Revision::new(2), 1), "{after:?}");
        assert_eq!((creations(&inner, "k").await, creations(&inner, "l").await), (1, 1), "{after:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn settling_finds_commit_behind_short_lived_key() {
    let inner = kv_mvcc::memory();
    let before = vec![put("k", "another's"), put("k", "more"), delete("k")];
    let store = Contended::new(&inner, Fault::ReplyLost, before, vec![put("k", "changed"), delete("k")]);
    let committed = create(&store, &["k"]).await.unwrap();
    assert_eq!((committed.revision, committed.attempts), (Revision::new(5), 1));
    assert_eq!(creations(&inner, "k").await, 1);
}

#[tokio::test(start_paused = true)]
async fn settling_repeats_lost_request_after_short_lived_key() {
    for before in [vec![], vec![put("k", "another's"), delete("k")], vec![put("l", "ours"), delete("l")]] {
        let inner = kv_mvcc::memory();
        let store = Contended::new(&inner, Fault::RequestLost, before.clone(), Vec::new());
        let committed = create(&store, &["k", "l"]).await.unwrap();
        let kv = inner.get("k").await.unwrap().unwrap();
        assert_eq!((committed.attempts, committed.revision), (1, kv.mod_revision), "{before:?}");
        assert_eq!((kv.value, creations(&inner, "k").await), ("ours".into(), 1), "{before:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn settling_tells_other_creator_from_lost_request() {
    let inner = kv_mvcc::memory();
    let store = Contended::new(&inner, Fault::RequestLost, vec![put("k", "another's")], Vec::new());
    let committed = create(&store, &["k", "l"]).await.unwrap();
    assert_eq!(committed.attempts, 2);
    assert_eq!(inner.get("k").await.unwrap().unwrap().value, "another's".into());
    assert_eq!(inner.get("l").await.unwrap().unwrap().value, "ours".into());
}

#[tokio::test(start_paused = true)]
async fn settling_ignores_equal_creation_before_attempt() {
    let inner = kv_mvcc::memory();
    let earlier = Txn::new().with_success([Op::put("k", "ours"), Op::put("l", "ours")]);
    inner.txn(earlier).await.unwrap();
    inner.txn(Txn::new().with_success([Op::delete("k"), Op::delete("l")])).await.unwrap();
    let store = Contended::new(&inner, Fault::RequestLost, Vec::new(), Vec::new());
    let committed = create(&store, &["k", "l"]).await.unwrap();
    assert_eq!((committed.revision, committed.attempts), (Revision::new(4), 1));
    assert_eq!(inner.get("k").await.unwrap().unwrap().create_revision, Revision::new(4));
}

#[tokio::test(start_paused = true)]
async fn settling_restarts_at_once_when_guard_broke() {
    let inner = kv_mvcc::memory();
    inner.put("k", "old").await.unwrap();
    let store = Contended::new(&inner, Fault::RequestLost, Vec::new(), vec![put("config", "new")]);
    let begun = tokio::time::Instant::now();
    let committed = transact!(shared(&store), options(), |tx| {
        tx.get(&"config".into()).await?;
        tx.get(&"k".into()).await?;
        tx.put(&"k".into(), "new")
    })
    .unwrap();
    // No writer changes `k`, so settling the commit must not wait for a change of `k`.
    assert_eq!(committed.attempts, 2);
    assert!(begun.elapsed() < std::time::Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn settling_is_skipped_when_nothing_was_sent() {
    let inner = kv_mvcc::memory();
    let store = Contended::new(&inner, Fault::NotSent, Vec::new(), Vec::new());
    let committed = create(&store, &["k"]).await.unwrap();
    assert_eq!((committed.revision, committed.attempts), (Revision::new(2), 2));
}

/// A store wrapper that loses the commit of the first attempt and returns an error for every later transaction.
#[derive(Clone, Debug)]
struct Refusing {
    inner: MvccStore,
    calls: Arc<AtomicU32>,
}

#[async_trait::async_trait]
impl Store for Refusing {
    async fn range(&self, request: kv::RangeRequest) -> kv::Result<kv::RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<kv::TxnResponse> {
        let refused = |kind| Err(Error::new(kind, kv::Operation::Txn, "refusing"));
        match self.calls.fetch_add(1, SeqCst) {
            0 => self.inner.txn(txn).await,
            1 => refused(kv::ErrorKind::Timeout),
            _ => refused(kv::ErrorKind::Auth(kv::Auth::Denied)),
        }
    }

    async fn watch(&self, request: kv::WatchRequest) -> kv::Result<kv::WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}

#[tokio::test(start_paused = true)]
async fn settling_asks_three_times_when_store_refuses() {
    let store = Refusing { inner: kv_mvcc::memory(), calls: Arc::default() };
    let error = transact!(shared(&store), options(), |tx| {
        tx.get(&"k".into()).await?;
        tx.put(&"k".into(), "ours")
    })
    .unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (&kv::ErrorKind::Timeout, Outcome::Unknown));
    assert_eq!(store.calls.load(SeqCst), 1 + 1 + 3, "the read, the commit, and three times the commit again");
}

#[tokio::test(start_paused = true)]
async fn settling_of_creation_is_unknown_without_history() {
    let inner = kv_mvcc::memory();
    let after = vec![delete("k"), WriterAction::Compact];
    let store = Contended::new(&inner, Fault::ReplyLost, Vec::new(), after);
    let error = create(&store, &["k"]).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
    assert!(inner.get("k").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn settling_of_creation_is_unknown_after_too_much_history() {
    let inner = kv_mvcc::memory();
    let mut after = vec![delete("k")];
    after.extend((0..2_000).map(|_| put("elsewhere", "x")));
    let store = Contended::new(&inner, Fault::ReplyLost, Vec::new(), after);
    let error = create(&store, &["k"]).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
    assert!(inner.get("k").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn settling_takes_no_foreign_deletion_as_proof() {
    let inner = kv_mvcc::memory();
    inner.put("old", "x").await.unwrap();
    let store = Contended::new(&inner, Fault::RequestLost, Vec::new(), vec![delete("old")]);
    let (old, new) = (Key::from("old"), Key::from("renamed"));
    let committed = transact!(shared(&store), options(), |tx| {
        let there = tx.get(&old).await?.is_some();
        tx.get(&new).await?;
        if there {
            tx.delete(&old)?;
        }
        tx.put(&new, "ours")?;
        Ok::<_, Error>(there)
    })
    .unwrap();
    assert_eq!((committed.value, committed.attempts), (false, 2));
    assert_eq!(inner.get("renamed").await.unwrap().unwrap().mod_revision, committed.revision);
}

/// A store wrapper that fails the first attempt's commit with `NoSpace`, and panics if a write is sent afterwards.
#[derive(Clone, Debug)]
struct Full {
    inner: Contended,
}

fn no_space(error: &Error) -> Error {
    Error::new(kv::ErrorKind::NoSpace, error.operation(), "full").with_final_outcome()
}

#[async_trait::async_trait]
impl Store for Full {
    async fn range(&self, request: kv::RangeRequest) -> kv::Result<kv::RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<kv::TxnResponse> {
        assert!(self.inner.calls.load(SeqCst) < 2 || txn.is_read_only(), "it is sent again");
        self.inner.txn(txn).await.map_err(|error| no_space(&error))
    }

    async fn watch(&self, request: kv::WatchRequest) -> kv::Result<kv::WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}

#[tokio::test(start_paused = true)]
async fn settling_of_final_refusal_only_reads() {
    let others = [
        vec![],
        vec![delete("k")],
        vec![put("k", "another's")],
        vec![put("k", "another's"), delete("k")],
        vec![delete("k"), put("k", "another's")],
        vec![put("config", "new")],
    ];
    for (is_there, fault) in
        [false, true].into_iter().flat_map(|there| [Fault::ReplyLost, Fault::RequestLost].map(|fault| (there, fault)))
    {
        for after in &others {
            let inner = kv_mvcc::memory();
            if is_there {
                inner.put("k", "old").await.unwrap();
            }
            let happened = matches!(fault, Fault::ReplyLost);
            let store = Full { inner: Contended::new(&inner, fault, Vec::new(), after.clone()) };
            let done = transact!(shared(&store), options(), |tx| {
                tx.get(&"config".into()).await?;
                tx.get(&"k".into()).await?;
                tx.put(&"k".into(), "ours")
            });
            match done {
                Ok(committed) => assert!(happened && committed.attempts == 1, "{is_there} {after:?}"),
                Err(error) => {
                    assert!(!happened, "{is_there} {after:?}: {error}");
                    assert_eq!((error.kind(), error.outcome()), (&kv::ErrorKind::NoSpace, Outcome::NotApplied));
                    assert!(!error.to_string().contains("all the same"), "{error}");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn settling_of_final_refusal_is_unknown_without_history() {
    let inner = kv_mvcc::memory();
    let store =
        Full { inner: Contended::new(&inner, Fault::ReplyLost, Vec::new(), vec![delete("k"), WriterAction::Compact]) };
    let done = transact!(shared(&store), options(), |tx| {
        tx.get(&"k".into()).await?;
        tx.put(&"k".into(), "ours")
    });
    let error = done.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
}
