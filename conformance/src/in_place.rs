//! Runs all test cases on one store, which is emptied before each case.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use kv::{
    Content, Key, MAX_TXN_OPS, Op, Range, RangeRequest, RangeResponse, Result, Revision, Store, StoreExt, Txn,
    TxnResponse, WatchRequest, WatchStream,
};
use tokio::sync::OwnedMutexGuard;

use crate::harness::{Ability, BoxError, Fixture, Harness};

/// The abilities that remain when an environment runs all test cases on one store, one after another. Abilities that
/// need a store that was never used are missing, because this environment runs all cases on one store.
const SHARED_ABILITIES: [Ability; 4] = [Ability::Reopen, Ability::Close, Ability::Measure, Ability::Progress];

/// Maximum number of other clients' keys that an error message lists.
const MAX_NAMED_KEYS: usize = 3;

/// Says what to do with keys that no test case has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignKeys {
    /// Keys that no test case has written are kept, and the test case that finds them fails: another client uses the
    /// store.
    Leave,
    /// Keys that no test case has written are deleted before the next test case.
    Erase,
}

/// A test environment in which all cases use one store, one after another; the store is emptied between two cases.
///
/// Of the inner environment's abilities, this environment keeps only `Reopen`, `Close`, `Measure` and `Progress`. If
/// the store is not empty when a test case begins, the case fails, unless keys of other clients may be deleted.
#[derive(Debug)]
pub struct InPlaceHarness<H> {
    store: H,
    abilities: Vec<Ability>,
    found: ForeignKeys,
    turn: Arc<tokio::sync::Mutex<()>>,
    written: WrittenKeys,
    begun: AtomicBool,
}

impl<H: Harness> InPlaceHarness<H> {
    /// Creates a test environment that runs all cases on the one store that `store` provides.
    pub fn new(store: H, found: ForeignKeys) -> Self {
        let abilities =
            store.abilities().iter().copied().filter(|ability| SHARED_ABILITIES.contains(ability)).collect();
        Self {
            store,
            abilities,
            found,
            turn: Arc::default(),
            written: WrittenKeys::default(),
            begun: AtomicBool::new(false),
        }
    }

    /// Deletes the keys of an abandoned test case; does nothing if no test case has begun.
    ///
    /// # Errors
    /// Any error that prevents emptying the store.
    pub async fn clear_up(&self) -> Result<(), BoxError> {
        if !self.begun.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut fixture = self.store.fresh().await?;
        let emptied = empty(&fixture.store(), self.found, &self.written).await;
        fixture.finish().await?;
        emptied
    }
}

#[async_trait]
impl<H: Harness> Harness for InPlaceHarness<H> {
    fn abilities(&self) -> &[Ability] {
        &self.abilities
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        self.begun.store(true, Ordering::SeqCst);
        let turn = self.turn.clone().lock_owned().await;
        let mut fixture = self.store.fresh().await?;
        if let Err(error) = empty(&fixture.store(), self.found, &self.written).await {
            fixture.finish().await?;
            return Err(error);
        }
        Ok(Box::new(InPlaceFixture {
            fixture,
            found: self.found,
            written: self.written.clone(),
            state: TenantState::Open,
            _turn: turn,
        }))
    }
}

/// Deletes the keys that test cases have written. With [`ForeignKeys::Erase`], deletes all keys of the store, including
/// those of other clients.
async fn empty(store: &Arc<dyn Store>, found: ForeignKeys, written: &WrittenKeys) -> Result<(), BoxError> {
    if found == ForeignKeys::Erase {
        store.delete(Range::All).await?;
        written.keys().clear();
        return Ok(());
    }
    let listed = store.list_at(Range::All, Revision::UNSET, Content::KeysOnly).await?;
    let (ours, foreign): (Vec<Key>, Vec<Key>) = {
        let written = written.keys();
        listed.kvs.into_iter().map(|kv| kv.key).partition(|key| written.contains(key))
    };
    for some in ours.chunks(MAX_TXN_OPS) {
        store.txn(Txn::new().with_success(some.iter().cloned().map(Op::delete))).await?;
    }
    written.keys().clear();
    if foreign.is_empty() {
        return Ok(());
    }
    let named: Vec<String> = foreign.iter().take(MAX_NAMED_KEYS).map(Key::to_string).collect();
    let more = if foreign.len() > MAX_NAMED_KEYS { ", ..." } else { "" };
    Err(format!("another client writes to this store meanwhile: {}{more}", named.join(", ")).into())
}

/// The fixture of one test case on the shared store.
#[derive(Debug)]
struct InPlaceFixture {
    fixture: Box<dyn Fixture>,
    found: ForeignKeys,
    written: WrittenKeys,
    state: TenantState,
    _turn: OwnedMutexGuard<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TenantState {
    Open,
    /// The store is closed and still contains the keys of the test case; they are deleted when the store is reopened,
    /// either for the next case or for the final cleanup.
    Closed,
}

impl InPlaceFixture {
    fn recorded(&self, inner: Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(KeyRecordingStore { inner, written: self.written.clone() })
    }
}

#[async_trait]
impl Fixture for InPlaceFixture {
    fn store(&self) -> Arc<dyn Store> {
        self.recorded(self.fixture.store())
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(self.recorded(self.fixture.another().await?))
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.fixture.reopen().await?;
        self.state = TenantState::Open;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        self.state = TenantState::Closed;
        self.fixture.close().await
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        self.fixture.stored_bytes().await
    }

    async fn finish(&mut self) -> Result<(), BoxError> {
        let emptied = match self.state {
            TenantState::Open => empty(&self.fixture.store(), self.found, &self.written).await,
            TenantState::Closed => Ok(()),
        };
        self.fixture.finish().await?;
        emptied
    }
}

#[derive(Clone, Debug, Default)]
struct WrittenKeys(Arc<Mutex<BTreeSet<Key>>>);

impl WrittenKeys {
    fn keys(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A store wrapper that records the keys of puts before it runs the puts.
#[derive(Debug)]
struct KeyRecordingStore {
    inner: Arc<dyn Store>,
    written: WrittenKeys,
}

#[async_trait]
impl Store for KeyRecordingStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let ops = txn.success.iter().chain(&txn.failure);
        self.written.keys().extend(ops.filter_map(|op| match op {
            Op::Put { key, .. } => Some(key.clone()),
            _ => None,
        }));
        self.inner.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }
}
