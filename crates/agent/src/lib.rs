#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! The module `verb` defines the requests and answers of the CNI verbs, and carries out each verb on an open store. The
//! module `allocator` contains `DaemonAllocator`, which sends verbs to the daemon, and the fallback `DirectAllocator`,
//! which opens the store itself. The module `session` keeps the store open for all steps of one plugin call. The
//! modules that read and write a node's files in `/run` are `hints`, `pending_commits`, and `rights` (whether the node
//! may write to etcd).

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
