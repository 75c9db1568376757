//! The requests of several clients of a store and their answers, and whether the store may have answered so.
//!
//! A [`Recorder`] is a store around a store that writes down every call and every event of every watch. A [`Replay`]
//! takes the record and the store's own log, goes through the log revision by revision, and finds the first thing
//! that does not fit:
//!
//! - every write that was acknowledged is in the log exactly once, at the revision of its answer, with its whole
//!   effect;
//! - a write that was refused is not there, and one whose outcome is unknown is there once or not at all;
//! - every read, and every transaction that wrote nothing, got the state at the revision of its answer;
//! - what was answered, or seen by a watch, before a call began is not newer than that call's answer;
//! - every watch got exactly what the log has for it.
//!
//! The time that it takes grows with the length of the history and not faster. Calls may fail, time out or be dropped
//! in any way, and clients may write whatever they like. It distinguishes most if no two writes put the same value at
//! the same key: then it is certain which one of them an entry of the log is.
//!
//! ```
//! # use std::sync::Arc;
//! # use conformance::history::{CallHistory, Recorder, Replay, read_log};
//! # use kv::{Range, Revision, Store, StoreExt};
//! # async fn judge(store: Arc<dyn Store>) -> Result<(), Box<dyn std::error::Error>> {
//! let before = store.list(Range::All).await?;
//! let history = Arc::new(CallHistory::new());
//! let client = Recorder::new(store.clone(), history.clone());
//! // Any number of recorders on one history, in any number of tasks, around whatever breaks calls.
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
