//! Runs several actors on one store, one store call at a time, in every order that can lead to a different result.
//!
//! If two adjacent store calls use disjoint keys, only one order is run, because both orders have the same result.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use kv::{
    Op, Range, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream,
};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// The side (Calico or Margay) that has written a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    Ours,
    Calicos,
}

pub(crate) type Authors = Arc<Mutex<BTreeMap<Revision, Side>>>;
/// For each revision, the keys that it changed, with their new values; `None` for a deleted key.
pub(crate) type Commits = Arc<Mutex<BTreeMap<Revision, BTreeMap<String, Option<Vec<u8>>>>>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Waiting,
    Done,
}

/// The keys that a store call reads, and the keys that it writes.
#[derive(Clone, Debug, Default)]
struct Call {
    reads: Vec<Range>,
    writes: Vec<Range>,
}

impl Call {
    fn of_txn(txn: &Txn) -> Self {
        let mut call =
            Self { reads: txn.compares.iter().map(|compare| compare.range.clone()).collect(), writes: vec![] };
        for op in txn.success.iter().chain(&txn.failure) {
            match op {
                Op::Put { key, .. } => call.writes.push(Range::Key(key.clone())),
                Op::Delete { range, .. } => call.writes.push(range.clone()),
                Op::Range(read) => call.reads.push(read.range.clone()),
            }
        }
        // The first read of a transaction fixes the revision for its later reads, so the transaction depends on all
        // earlier writes, whatever their keys.
        if txn.compares.is_empty() && txn.is_read_only() {
            call.reads.push(Range::All);
        }
        call
    }

    fn disturbs(&self, other: &Self) -> bool {
        let touched = || other.reads.iter().chain(&other.writes);
        self.writes.iter().any(|write| touched().any(|range| overlap(write, range)))
    }

    fn commutes_with(&self, other: &Self) -> bool {
        !self.disturbs(other) && !other.disturbs(self)
    }
}

fn overlap(one: &Range, other: &Range) -> bool {
    let ((from, to), (other_from, other_to)) = (one.bounds(), other.bounds());
    other_to.is_none_or(|end| from < end) && to.is_none_or(|end| other_from < end)
}

/// The state that the actors share to wait for their turns.
#[derive(Debug, Default)]
struct Table {
    states: Mutex<Vec<State>>,
    /// The next store call of each actor that waits for its turn.
    calls: Mutex<Vec<Call>>,
    /// For each actor, the notification that it is the actor's turn.
    turns: Vec<Notify>,
    changed: Notify,
}

impl Table {
    fn set(&self, actor: usize, state: State) {
        self.states.lock().unwrap()[actor] = state;
        self.changed.notify_one();
    }
}

/// A store wrapper that makes its actor wait for its turn before each store call, and records the actor's side (Calico
/// or Margay) as the author of each commit.
#[derive(Debug)]
struct InTurn {
    inner: Arc<dyn Store>,
    actor: usize,
    table: Option<Arc<Table>>,
    side: Side,
    authors: Authors,
    commits: Commits,
}

impl InTurn {
    async fn turn(&self, call: impl FnOnce() -> Call) {
        if let Some(table) = &self.table {
            table.calls.lock().unwrap()[self.actor] = call();
            table.set(self.actor, State::Waiting);
            table.turns[self.actor].notified().await;
        }
    }
}

#[async_trait]
impl Store for InTurn {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        // A past revision never changes, so a read at a past revision need not wait for its turn.
        if !request.at.is_set() {
            self.turn(|| Call { reads: vec![request.range.clone()], writes: vec![] }).await;
        }
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.turn(|| Call::of_txn(&txn)).await;
        let branch = |answer: &TxnResponse| if answer.succeeded { txn.success.clone() } else { txn.failure.clone() };
        let answer = self.inner.txn(txn.clone()).await?;
        if branch(&answer).iter().any(Op::is_write) {
            self.authors.lock().unwrap().insert(answer.revision, self.side);
            let writes = branch(&answer).into_iter().filter_map(|op| match op {
                Op::Put { key, value, .. } => Some((key.to_string(), Some(value.as_bytes().to_vec()))),
                Op::Delete { range: Range::Key(key), .. } => Some((key.to_string(), None)),
                _ => None,
            });
            self.commits.lock().unwrap().insert(answer.revision, writes.collect());
        }
        Ok(answer)
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.turn(|| Call { reads: vec![Range::All], writes: vec![] }).await;
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }
}

/// Returns a store wrapper that records `side` (Calico or Margay) as the author of its commits, without waiting for
/// turns.
pub(crate) fn noting(inner: &Arc<dyn Store>, side: Side, authors: &Authors, commits: &Commits) -> Arc<dyn Store> {
    let (inner, authors, commits) = (Arc::clone(inner), Arc::clone(authors), Arc::clone(commits));
    Arc::new(InTurn { inner, actor: 0, table: None, side, authors, commits })
}

/// A closure that runs an actor's operations on the given store. The future that an actor's closure returns resolves to
/// the outcome of the operations, as text.
pub(crate) type Work = Box<dyn FnOnce(Arc<dyn Store>) -> Pin<Box<dyn Future<Output = String> + Send>> + Send>;

/// An actor of a run: its side (Calico or Margay), and what it does with the store.
pub(crate) struct Actor {
    pub(crate) side: Side,
    pub(crate) work: Work,
}

impl Actor {
    pub(crate) fn new<F>(side: Side, work: impl FnOnce(Arc<dyn Store>) -> F + Send + 'static) -> Self
    where
        F: Future<Output = String> + Send + 'static,
    {
        Self { side, work: Box::new(move |store| Box::pin(work(store))) }
    }
}

/// A decision in a run: which actor makes the next call, or that all unfinished actors halt for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    Next(usize),
    Die,
}

/// The result of a run: each decision with its number of alternatives, and the outcome of each actor that finished.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) choices: Vec<(usize, usize)>,
    pub(crate) order: Vec<Choice>,
    pub(crate) outcomes: Vec<Option<String>>,
    /// False if the run was stopped because another run has the same result.
    pub(crate) is_new: bool,
}

/// Runs the actors in turns, one store call at a time. Replays the decisions in `prefix`; every later decision takes
/// its first alternative.
pub(crate) async fn play(store: &Arc<dyn Store>, authors: &Authors, actors: Vec<Actor>, prefix: &[usize]) -> Run {
    let count = actors.len();
    let sides: Vec<Side> = actors.iter().map(|actor| actor.side).collect();
    let table = Arc::new(Table {
        states: Mutex::new(vec![State::Running; count]),
        calls: Mutex::new(vec![Call::default(); count]),
        turns: (0..count).map(|_| Notify::new()).collect(),
        changed: Notify::new(),
    });
    let tasks: Vec<JoinHandle<String>> = actors
        .into_iter()
        .enumerate()
        .map(|(number, actor)| {
            let table = Arc::clone(&table);
            let own = InTurn {
                inner: Arc::clone(store),
                actor: number,
                table: Some(Arc::clone(&table)),
                side: actor.side,
                authors: Arc::clone(authors),
                commits: Commits::default(),
            };
            tokio::spawn(async move {
                // The value `_done` marks the actor as done when its work ends, even by a panic.
                let _done = Leaving(Arc::clone(&table), number);
                (actor.work)(Arc::new(own)).await
            })
        })
        .collect();

    let mut run = Run { choices: Vec::new(), order: Vec::new(), outcomes: Vec::new(), is_new: true };
    let mut asleep: Vec<usize> = Vec::new();
    loop {
        let states = table.quiet().await;
        let waiting: Vec<usize> = (0..count).filter(|actor| states[*actor] == State::Waiting).collect();
        if waiting.is_empty() {
            break;
        }
        let awake = waiting.iter().filter(|actor| !asleep.contains(actor));
        let mut possible: Vec<Choice> = awake.map(|actor| Choice::Next(*actor)).collect();
        // Only actors that run Calico's client may halt for ever; actors that run Margay always finish.
        if waiting.iter().all(|actor| sides[*actor] == Side::Calicos) {
            possible.push(Choice::Die);
        }
        if possible.is_empty() {
            run.is_new = false;
            break;
        }
        let chosen = prefix.get(run.choices.len()).copied().unwrap_or(0);
        run.choices.push((chosen, possible.len()));
        run.order.push(possible[chosen]);
        let Choice::Next(actor) = possible[chosen] else { break };
        // Sleep sets: once another run has tried an actor's next call at this point, the actor sleeps until a store
        // call runs that does not commute with the actor's own call.
        let calls = table.calls.lock().unwrap().clone();
        asleep.extend(possible[..chosen].iter().filter_map(|choice| match choice {
            Choice::Next(actor) => Some(*actor),
            Choice::Die => None,
        }));
        asleep.retain(|other| calls[*other].commutes_with(&calls[actor]));
        table.set(actor, State::Running);
        table.turns[actor].notify_one();
    }
    for (task, state) in tasks.into_iter().zip(table.quiet().await) {
        run.outcomes.push(if state == State::Done {
            Some(task.await.unwrap())
        } else {
            task.abort();
            None
        });
    }
    run
}

impl Table {
    /// Waits until each actor has finished or waits for its turn. Returns whether each actor has finished or waits.
    async fn quiet(&self) -> Vec<State> {
        loop {
            let states = self.states.lock().unwrap().clone();
            if !states.contains(&State::Running) {
                return states;
            }
            self.changed.notified().await;
        }
    }
}

struct Leaving(Arc<Table>, usize);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.set(self.1, State::Done);
    }
}

/// Runs every combination of decisions, one run after another. Returns the number of complete runs, without runs that
/// were stopped because they repeat another run.
pub(crate) async fn explore(mut run: impl AsyncFnMut(Vec<usize>) -> Run) -> usize {
    let (mut prefix, mut runs) = (Vec::new(), 0);
    loop {
        let Run { mut choices, is_new, .. } = run(prefix).await;
        runs += usize::from(is_new);
        while choices.last().is_some_and(|(chosen, of)| chosen + 1 == *of) {
            choices.pop();
        }
        let Some(last) = choices.last_mut() else { return runs };
        last.0 += 1;
        prefix = choices.into_iter().map(|(chosen, _)| chosen).collect();
    }
}
