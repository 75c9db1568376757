#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! `verb` has the requests, the answers, and the work on an open store. `allocator` has `Served`, which asks the daemon and falls back
//! on `Alone`, which opens the store; `session` keeps it open over several steps of one call. The rest is what a node remembers in
//! `/run`: hints, pending commits, and whether it may write.

mod allocator;
mod error;
mod hints;
mod host_lock;
mod intents;
mod rights;
mod session;
mod verb;
mod whole_file;

pub use allocator::{Allocator, Alone, Served, is_no_store};
pub use error::{CniError, Code, Failure, Result, Rules, explain};
pub use host_lock::HostLock;
pub use intents::{FileIntents, INTENTS_FOLDER};
pub use rights::Rights;
pub use session::{LEAST, Session, StoreAt, ipam_on};
pub use verb::{Add, Answer, Asked, Check, Checked, Collected, Del, Gc, Quarantine, Verb};
