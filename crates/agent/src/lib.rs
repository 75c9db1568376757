#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! The module `verb` has the verbs' requests and answers, and carries out each verb on an open store. The module
//! `allocator` has `DaemonAllocator`, which sends verbs to the daemon, and the fallback `DirectAllocator`, which opens
//! the store. The module `session` keeps the store open for all steps of one call. Three other modules read and write a
//! node's files in `/run`: `hints`, `pending_commits`, and `rights` (whether the node may write).

mod allocator;
mod error;
mod hints;
mod host_lock;
mod pending_commits;
mod rights;
mod session;
mod verb;
mod whole_file;

pub use allocator::{Allocator, DaemonAllocator, DirectAllocator, is_no_store};
pub use error::{CniError, Code, NetworkRules, Result, VerbFailure, explain};
pub use host_lock::HostLock;
pub use pending_commits::{PENDING_COMMITS_FOLDER, PendingCommitFolder};
pub use rights::WriteRights;
pub use session::{MIN_STEP_BUDGET, Session, StoreAccess, ipam_for_store};
pub use verb::{Add, Answer, Check, CheckAnswer, Del, Gc, GcSummary, Quarantine, Verb, VerbRequest};
