#![doc = include_str!("../README.md")]
//!
//! # The contract
//!
//! Defines the trait [`Store`]: an ordered key-value map in which every write has a revision.
//!
//! Stores have the semantics of etcd v3. The file `SEMANTICS.md` of the crate `kv` lists the numbered rules, and the
//! crate `conformance` tests a store against each rule.
//!
//! - The **author of a store** implements the four methods of [`Store`].
//! - A **user of a store** has an `Arc<dyn Store>`, reads keys through [`StoreExt`], and changes keys with
//!   [`transact!`].
//! - A **test or a benchmark** puts a wrapper from [`wrap`] around a store.

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

/// The numbered rules that every store must follow, as Markdown text.
pub const SEMANTICS: &str = include_str!("../SEMANTICS.md");
