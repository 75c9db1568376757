#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! `verb` has the requests, the answers, and the work on an open store. `served` asks the daemon, and falls back on `alone`, which
//! opens the store; `session` keeps it open over several steps of one call. The rest is what a node remembers in `/run`: hints,
//! pending commits, and whether it may write.

mod allocator;
mod alone;
mod error;
mod failure;
mod hints;
mod host_lock;
mod intents;
mod ipam;
mod rights;
mod served;
mod session;
mod sight;
mod store_at;
mod verb;
mod whole_file;

pub use allocator::Allocator;
pub use alone::{Alone, is_no_store};
pub use error::{CniError, Code, Result};
pub use failure::{Failure, Rules, explain};
pub use host_lock::HostLock;
pub use intents::{FileIntents, INTENTS_FOLDER};
pub use ipam::ipam_on;
pub use rights::Rights;
pub use served::Served;
pub use session::Session;
pub use store_at::{LEAST, StoreAt};
pub use verb::{Add, Answer, Asked, Check, Checked, Collected, Del, Gc, Quarantine, Verb};
