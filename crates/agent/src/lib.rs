#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! `verb` has the requests, the answers, and the work on an open store. `allocator` has `DaemonAllocator`, which asks
//! the daemon, and its fallback `DirectAllocator`, which opens the store. `session` keeps the store open over several
//! steps of one call. The other modules are for a node's files in `/run`: hints, pending commits, and whether the node
//! may write.

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
