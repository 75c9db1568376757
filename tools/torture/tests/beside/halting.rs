//! A store wrapper that slows down its caller: before any store call, the caller may pause, halt for a while, or halt
//! for ever.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use kv::{RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

/// Notifications that the caller of a store has halted.
#[derive(Debug, Default)]
pub(crate) struct Fate {
    /// Tells the test that this caller has halted, for a while or for ever, so that no other caller waits for it.
    pub(crate) stopped: Notify,
    /// Tells the test that this caller has halted for ever.
    pub(crate) gone: Notify,
}

/// A store wrapper that slows down or halts its only caller.
#[derive(Debug)]
pub(crate) struct Halting {
    inner: Arc<dyn Store>,
    random: Mutex<fastrand::Rng>,
    fate: Arc<Fate>,
}

impl Halting {
    /// Wraps a store. Returns the store wrapper, and the [`Fate`] that is notified when the wrapper's caller halts.
    pub(crate) fn around(inner: Arc<dyn Store>, seed: u64) -> (Arc<dyn Store>, Arc<Fate>) {
        let fate = Arc::<Fate>::default();
        let random = Mutex::new(fastrand::Rng::with_seed(seed));
        (Arc::new(Self { inner, random, fate: Arc::clone(&fate) }), fate)
    }

    async fn wait(&self) {
        let (what, pause) = {
            let mut random = self.random.lock().unwrap();
            (random.u32(..100), random.u64(..3_000))
        };
        match what {
            0..=2 => {
                self.fate.stopped.notify_one();
                self.fate.gone.notify_one();
                std::future::pending::<()>().await;
            }
            3..=5 => {
                self.fate.stopped.notify_one();
                tokio::time::sleep(Duration::from_micros(pause * 100)).await;
            }
            6..=40 => tokio::time::sleep(Duration::from_micros(pause)).await,
            _ => {}
        }
    }
}

/// The tasks of callers that have halted. All clones of a [`Left`] share one list of tasks.
#[derive(Clone, Default)]
pub(crate) struct Left(Arc<Mutex<Vec<Stopped>>>);

type Stopped = (JoinHandle<()>, Arc<Fate>);

impl Left {
    /// Runs a caller of the store in a separate task. Returns `None` as soon as the caller halts; the task of a caller
    /// that halts only for a while continues later.
    pub(crate) async fn behind<T: Send + 'static>(
        &self,
        fate: Arc<Fate>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (answer, mut answered) = oneshot::channel();
        let task = tokio::spawn(async move { drop(answer.send(work.await)) });
        tokio::select! {
            done = &mut answered => Some(done.unwrap()),
            () = fate.stopped.notified() => {
                self.0.lock().unwrap().push((task, fate));
                None
            }
        }
    }

    /// Waits until each caller that halted only for a while has finished.
    pub(crate) async fn settle(&self) {
        let left = std::mem::take(&mut *self.0.lock().unwrap());
        for (task, fate) in left {
            tokio::select! {
                done = task => done.unwrap(),
                () = fate.gone.notified() => {}
            }
        }
    }
}

#[async_trait]
impl Store for Halting {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.wait().await;
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.wait().await;
        self.inner.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }
}
