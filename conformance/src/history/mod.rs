//! Records the requests of several clients and their answers, and judges whether a correct store could have given these
//! answers.
//!
//! A [`Recorder`] wraps a store and records every call and every event of every watch. A [`Replay`] takes the record
//! and the store's own log. The replay goes through the log revision by revision and reports the first violation of
//! these rules:
//!
//! - Every acknowledged write is in the log exactly once, at the revision of its answer, with its complete effect.
//! - A write with the outcome "not applied" is not in the log. A write with an unknown outcome is in the log at most
//!   once.
//! - Every read, and every transaction without effect, saw the state at the revision of its answer.
//! - The answer to a call is not older than any answer or watch event that arrived before the call began.
//! - Every watch delivered exactly the matching events of the log.
//!
//! The time to judge a history is linear in its length. Calls may fail, time out or be dropped at any moment, and
//! clients may write any values. The check is strictest if no value is put twice at the same key, because each entry
//! of the log then belongs to exactly one write.
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
