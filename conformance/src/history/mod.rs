//! Records several clients' requests and the store's answers, and judges whether a correct store could return these
//! answers.
//!
//! A [`Recorder`] wraps a store and records every call and every event of every watch. A [`Replay`] compares the record
//! with the store's own log of changes. A [`Replay`] checks the log revision by revision, and reports the first
//! violation of one of the following rules.
//!
//! - Every acknowledged write is in the store's log exactly once, at its acknowledged revision, with its complete
//!   effect.
//! - A failed write with the outcome "not applied" is not in the store's log. A write with an unknown outcome is in the
//!   store's log at most once.
//! - Every read, and every transaction without effect, saw the state at the revision in its answer.
//! - The answer to a call is at least as new as all answers and watch events that arrived before the call began.
//! - Every watch delivered exactly those events of the store's log that match its request.
//!
//! The time to judge a history is linear in the number of its calls and events. Clients may write any values, and their
//! calls may fail, time out or be dropped at any moment. The check of a history is strictest if no client puts the same
//! value at a key twice, because each log entry then belongs to exactly one write.
//!
//! ```
//! # use std::sync::Arc;
//! # use conformance::history::{CallHistory, Recorder, Replay, read_log};
//! # use kv::{Range, Revision, Store, StoreExt};
//! # async fn judge(store: Arc<dyn Store>) -> Result<(), Box<dyn std::error::Error>> {
//! let before = store.list(Range::All).await?;
//! let history = Arc::new(CallHistory::new());
//! let client = Recorder::new(store.clone(), history.clone());
//! // Any number of recorders can share a history, in any number of tasks, around any wrapper that injects faults.
//! client.put("key", "value").await?;
//!
//! let last = store.put("end", "").await?;
//! let log = read_log(&store, Range::All, before.revision.next(), last).await?;
//! let summary = Replay::new(before.revision, before.kvs).among_others().judge(history.take(), &log)?;
//! assert_eq!(summary.acknowledged, 1);
//! # Ok(())
//! # }
//! ```

mod matching;
#[cfg(test)]
mod mutants;
mod order;
mod recorder;
mod replay;
mod streams;
mod suspects;
mod violation;
pub(crate) mod wgl;

pub use recorder::{Call, CallHistory, RecordedAnswer, RecordedPart, RecordedRequest, Recorder, Stream};
pub use replay::{Replay, Summary, read_log};
pub use violation::Violation;
