//! Cases on one store that is emptied between them.

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

/// The abilities of the one store that all cases share, one after the other: nothing writes to it past the case, and
/// it is never new.
const PASSED_ON: [Ability; 4] = [Ability::Reopen, Ability::Close, Ability::Measure, Ability::Progress];

/// How many keys of others an error names.
const NAMED: usize = 3;

/// The treatment of keys that no case has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Keep them, and fail the case that found them: somebody else uses the store.
    Leave,
    /// Delete them.
    Erase,
}

/// An environment in which all cases, one after the other, get the same store, emptied.
///
/// It can reopen, close and measure the store if the environment beneath can, and nothing else. A store that is not
/// empty when a case begins is an error unless all found keys may be erased.
#[derive(Debug)]
pub struct InPlace<H> {
    store: H,
    abilities: Vec<Ability>,
    found: Found,
    turn: Arc<tokio::sync::Mutex<()>>,
    written: Written,
    begun: AtomicBool,
}

impl<H: Harness> InPlace<H> {
    /// Cases on the one store of which `store` hands out handles.
    pub fn new(store: H, found: Found) -> Self {
        let abilities = store.abilities().iter().copied().filter(|ability| PASSED_ON.contains(ability)).collect();
        Self {
            store,
            abilities,
            found,
            turn: Arc::default(),
            written: Written::default(),
            begun: AtomicBool::new(false),
        }
    }

    /// Deletes the keys of a case that did not come to its end. Nothing happens unless a case has begun.
    ///
    /// # Errors
    /// The obstacle to emptying the store.
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
impl<H: Harness> Harness for InPlace<H> {
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
        Ok(Box::new(Tenant {
            fixture,
            found: self.found,
            written: self.written.clone(),
            state: State::Open,
            _turn: turn,
        }))
    }
}

/// Deletes the keys that cases wrote, and all others if that is allowed.
async fn empty(store: &Arc<dyn Store>, found: Found, written: &Written) -> Result<(), BoxError> {
    if found == Found::Erase {
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
    let named: Vec<String> = foreign.iter().take(NAMED).map(Key::to_string).collect();
    let more = if foreign.len() > NAMED { ", ..." } else { "" };
    Err(format!("somebody else writes to this store meanwhile: {}{more}", named.join(", ")).into())
}

/// The store, while a case has it.
#[derive(Debug)]
struct Tenant {
    fixture: Box<dyn Fixture>,
    found: Found,
    written: Written,
    state: State,
    _turn: OwnedMutexGuard<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// The writes of the case wait until the store is opened for the next one, or for clearing up.
    Closed,
}

impl Tenant {
    fn recorded(&self, inner: Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(Recorded { inner, written: self.written.clone() })
    }
}

#[async_trait]
impl Fixture for Tenant {
    fn store(&self) -> Arc<dyn Store> {
        self.recorded(self.fixture.store())
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(self.recorded(self.fixture.another().await?))
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.fixture.reopen().await?;
        self.state = State::Open;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        self.state = State::Closed;
        self.fixture.close().await
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        self.fixture.stored_bytes().await
    }

    async fn finish(&mut self) -> Result<(), BoxError> {
        let emptied = match self.state {
            State::Open => empty(&self.fixture.store(), self.found, &self.written).await,
            State::Closed => Ok(()),
        };
        self.fixture.finish().await?;
        emptied
    }
}

/// The keys that cases have put.
#[derive(Clone, Debug, Default)]
struct Written(Arc<Mutex<BTreeSet<Key>>>);

impl Written {
    fn keys(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A store that remembers which keys were put, before they are.
#[derive(Debug)]
struct Recorded {
    inner: Arc<dyn Store>,
    written: Written,
}

#[async_trait]
impl Store for Recorded {
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
