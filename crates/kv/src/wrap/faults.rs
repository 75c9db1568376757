//! Makes a store fail in the ways in which networks and servers do.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Revision;
use crate::request::{RangeRequest, Txn, WatchRequest};
use crate::response::{RangeResponse, TxnResponse};
use crate::store::{Store, WatchStream};

/// Something that goes wrong with one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request never left: `NotSent`.
    NotSent,
    /// The request got lost on the way: it is not carried out, and the caller sees a `Timeout`.
    RequestLost,
    /// The request was carried out, and the reply got lost: `Disconnected`.
    ReplyLost,
    /// The caller sees a `Timeout`, and a transaction is carried out only when [`Faulty::deliver_held`] is called.
    Held,
    /// It takes this much longer.
    Delay(Duration),
    /// A watch ends with `Disconnected` after its first batch; any other call with `NotSent`.
    Disconnect,
}

/// Decides which calls go wrong. Called once for each call, in the order in which they begin.
pub trait Faults: Send + Sync + 'static {
    /// The fault of this call, if it has one.
    fn next(&self, operation: Operation) -> Option<Fault>;
}

impl<F: Fn(Operation) -> Option<Fault> + Send + Sync + 'static> Faults for F {
    fn next(&self, operation: Operation) -> Option<Fault> {
        self(operation)
    }
}

/// A store that fails as [`Faults`] say. Clones share everything.
#[derive(Clone)]
pub struct Faulty<S> {
    inner: S,
    faults: Arc<dyn Faults>,
    held: Arc<Mutex<VecDeque<Txn>>>,
}

impl<S: Store> Faulty<S> {
    /// Faults around this store.
    pub fn new(inner: S, faults: impl Faults) -> Self {
        Self { inner, faults: Arc::new(faults), held: Arc::default() }
    }

    /// Faults around this store: each given transaction fails as listed, in order, and everything after works.
    pub fn script(inner: S, faults: impl IntoIterator<Item = Option<Fault>>) -> Self {
        let script: Mutex<VecDeque<Option<Fault>>> = Mutex::new(faults.into_iter().collect());
        Self::new(inner, move |operation| match operation {
            Operation::Txn => script.lock().unwrap_or_else(PoisonError::into_inner).pop_front().flatten(),
            _ => None,
        })
    }

    /// Carries out the transactions that were held back, in order, as a thawed server would.
    ///
    /// # Errors
    /// Those of the store, for the first that fails.
    pub async fn deliver_held(&self) -> Result<Vec<TxnResponse>> {
        let mut answers = Vec::new();
        while let Some(txn) = self.pop_held() {
            answers.push(self.inner.txn(txn).await?);
        }
        Ok(answers)
    }

    fn pop_held(&self) -> Option<Txn> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Applies the faults that come before the call: `Ok` with the fault that follows it.
    async fn request(&self, operation: Operation) -> Result<Option<Fault>> {
        let fault = self.faults.next(operation);
        match fault {
            Some(Fault::NotSent) => Err(self.error(ErrorKind::NotSent, operation)),
            Some(Fault::Disconnect) if operation != Operation::Watch => Err(self.error(ErrorKind::NotSent, operation)),
            Some(Fault::RequestLost) => Err(self.error(ErrorKind::Timeout, operation)),
            Some(Fault::Held) if operation != Operation::Txn => Err(self.error(ErrorKind::Timeout, operation)),
            Some(Fault::Delay(time)) => {
                tokio::time::sleep(time).await;
                Ok(None)
            }
            fault => Ok(fault),
        }
    }

    /// Lets an answer get lost on the way back.
    fn reply<T>(&self, fault: Option<Fault>, operation: Operation, answer: T) -> Result<T> {
        match fault {
            Some(Fault::ReplyLost) => {
                Err(self.error(ErrorKind::Disconnected { resume_from: Revision::UNSET }, operation))
            }
            _ => Ok(answer),
        }
    }

    fn error(&self, kind: ErrorKind, operation: Operation) -> Error {
        Error::new(kind, operation, "faulty").with_detail("injected")
    }
}

impl<S: fmt::Debug> fmt::Debug for Faulty<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Faulty").field(&self.inner).finish()
    }
}

#[async_trait]
impl<S: Store> Store for Faulty<S> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let fault = self.request(Operation::Range).await?;
        let answer = self.inner.range(request).await?;
        self.reply(fault, Operation::Range, answer)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let fault = self.request(Operation::Txn).await?;
        if fault == Some(Fault::Held) {
            self.held.lock().unwrap_or_else(PoisonError::into_inner).push_back(txn);
            return Err(self.error(ErrorKind::Timeout, Operation::Txn));
        }
        let answer = self.inner.txn(txn).await?;
        self.reply(fault, Operation::Txn, answer)
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        let fault = self.request(Operation::Watch).await?;
        let stream = self.inner.watch(request).await?;
        if fault != Some(Fault::Disconnect) {
            return self.reply(fault, Operation::Watch, stream);
        }
        let this = self.error(ErrorKind::Closed, Operation::Watch);
        let store = this.store().to_owned();
        let cut = stream.take(1).flat_map(move |batch| {
            let resume_from = batch.as_ref().map_or(Revision::UNSET, |batch| batch.revision.next());
            let end = Error::new(ErrorKind::Disconnected { resume_from }, Operation::Watch, store.clone());
            futures::stream::iter([batch, Err(end)])
        });
        Ok(cut.boxed())
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        let fault = self.request(Operation::Compact).await?;
        self.inner.compact(revision).await?;
        self.reply(fault, Operation::Compact, ())
    }
}
