#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! A store is an ordered map of keys to values in which every write has a revision.
//!
//! The semantics are etcd v3's; the numbered rules are in `SEMANTICS.md` beside this crate, and the crate
//! `conformance` turns each of them into a case. Three groups of people meet here:
//!
//! - **An author of a store** implements the four methods of [`Store`].
//! - **A user of a store** holds an `Arc<dyn Store>`, calls [`StoreExt`], and changes things through [`transact!`].
//! - **A test or a measurement** puts a wrapper of [`wrap`] around a store.

mod error;
mod key;
mod request;
mod store;
mod transact;
mod validate;
pub mod wrap;

pub use error::{Auth, Error, ErrorKind, InvalidArgument, Operation, Outcome, Result};
pub use key::{GrantOutcome, Key, Lease, LeaseId, Range, Revision, Value};
pub use request::{
    Batch, Compare, CompareOp, Content, Event, EventKind, Kv, Op, OpResult, Prev, Progress, RangeRequest,
    RangeResponse, Target, Txn, TxnRange, TxnResponse, WatchRequest,
};
pub use store::{ConditionalOutcome, Pages, Purpose, Snapshot, Store, StoreExt, WatchStream};
pub use transact::{
    Attempts, Committed, Deadline, MAX_CREATION_GUARDED_KEYS, MAX_GUARDED_KEYS, TransactOptions, Transaction,
};
pub use validate::{MAX_KEY_BYTES, MAX_REQUEST_BYTES, MAX_TXN_OPS, MAX_VALUE_BYTES};

/// The numbered rules of a store, as a page of Markdown.
pub const SEMANTICS: &str = include_str!("../SEMANTICS.md");
