//! Follows the store and looks at every revision.

use std::sync::Arc;

use futures::StreamExt;
use kv::{ErrorKind, Range, Revision, Store, StoreExt, WatchRequest};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::Failure;
use crate::ledger::Ledger;
use crate::replay::{Replay, changed};

/// Follows a store.
pub(crate) struct Checker {
    pub(crate) replay: Replay,
    ledger: Arc<Ledger>,
    /// The revision that was checked last.
    checked: watch::Sender<i64>,
}

impl Checker {
    /// Begins with the store as it is.
    pub(crate) async fn begin(store: &Arc<dyn Store>, ledger: Arc<Ledger>) -> Result<Self, Failure> {
        let start = store.list(Range::All).await?;
        let replay = Replay::begin(&start.kvs, start.revision.get()).map_err(Failure)?;
        let checked = watch::Sender::new(replay.revision);
        Ok(Self { replay, ledger, checked })
    }

    /// Where the revision can be seen that was checked last.
    pub(crate) fn progress(&self) -> watch::Receiver<i64> {
        self.checked.subscribe()
    }

    /// Follows the store beside what is done to it.
    pub(crate) fn in_the_background(mut self, store: &Arc<dyn Store>) -> Following {
        let (store, first) = (Arc::clone(store), self.replay.revision);
        let (set_goal, goal) = watch::channel(None);
        let task = tokio::spawn({
            let store = Arc::clone(&store);
            async move {
                let done = self.follow(&store, goal).await;
                (self, done)
            }
        });
        Following { store, first, set_goal, task }
    }

    /// Follows the store from where it was left until the goal is known and reached.
    ///
    /// # Errors
    /// The fault.
    pub(crate) async fn follow(
        &mut self,
        store: &Arc<dyn Store>,
        mut goal: watch::Receiver<Option<i64>>,
    ) -> Result<(), Failure> {
        loop {
            let start = Revision::new(self.replay.revision).next();
            let mut changes = match store.watch(WatchRequest::new(Range::All, start)).await {
                Ok(changes) => changes,
                Err(error) if error.kind().is_transient() => {
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            loop {
                let reached = goal.borrow_and_update().is_some_and(|goal| self.replay.revision >= goal);
                if reached {
                    return Ok(());
                }
                let batch = tokio::select! {
                    batch = changes.next() => batch,
                    // The caller that sets the goal may be gone; then there is a violation already.
                    changed = goal.changed() => match changed {
                        Ok(()) => continue,
                        Err(_) => return Ok(()),
                    },
                };
                match batch {
                    Some(Ok(batch)) => self.check(&batch)?,
                    Some(Err(error)) if matches!(error.kind(), ErrorKind::Disconnected { .. }) => break,
                    Some(Err(error)) => return Err(error.into()),
                    None => break,
                }
            }
        }
    }

    fn check(&mut self, batch: &kv::Batch) -> Result<(), Failure> {
        let revision = batch.revision.get();
        let changes = self.replay.advance(revision, &batch.events).inspect_err(|what| {
            self.ledger.violated(what.clone(), batch);
        });
        let changes = changes.map_err(|what| Failure(self.ledger.violation().unwrap_or(what)))?;
        self.ledger.follow(revision, changes, |container| self.replay.held_by(container));
        self.checked.send_replace(revision);
        self.ledger.violation().map_or(Ok(()), |what| Err(Failure(what + &changed(&batch.events))))
    }

    /// That the store has what was replayed, that every container is accounted for, and that nothing is left.
    pub(crate) async fn end(&self, store: &Arc<dyn Store>) -> Result<(), Failure> {
        let now = store.list(Range::All).await?;
        let stored = Replay::begin(&now.kvs, now.revision.get()).map_err(Failure)?;
        if stored.left() != self.replay.left() || stored.revision != self.replay.revision {
            return Err(Failure(format!(
                "replayed to revision {} there is {:?}; stored at {} is {:?}",
                self.replay.revision,
                self.replay.left(),
                stored.revision,
                stored.left()
            )));
        }
        self.ledger.close();
        let left = stored.left();
        if !left.is_empty() {
            return Err(Failure(format!("after the DEL of everything there is left: {left:?}")));
        }
        self.ledger.violation().map_or(Ok(()), |what| Err(Failure(what)))
    }
}

/// A checker that follows a store in the background.
pub(crate) struct Following {
    store: Arc<dyn Store>,
    /// The revision at which it began.
    first: i64,
    set_goal: watch::Sender<Option<i64>>,
    task: JoinHandle<(Checker, Result<(), Failure>)>,
}

impl Following {
    /// Looks at everything that there is by now, and at what is left. Returns how many revisions there were.
    ///
    /// `worked` is what came of the work; what it was done with, such as a server, is kept until the end.
    ///
    /// # Errors
    /// The finding of the checker, or else the failure of the work.
    pub(crate) async fn end<T>(self, worked: Result<T, Failure>) -> Result<i64, Failure> {
        let goal = match &worked {
            Ok(_) => self.store.list(Range::All).await?.revision.get(),
            // The fault is reported; the checker need not wait for more.
            Err(_) => 0,
        };
        self.set_goal.send_replace(Some(goal));
        let (checker, followed) = self.task.await.map_err(|error| Failure(error.to_string()))?;
        followed?;
        checker.ledger.violation().map_or(Ok(()), |what| Err(Failure(what)))?;
        let _kept = worked?;
        checker.end(&self.store).await?;
        Ok(checker.replay.revision - self.first)
    }
}
