#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! The private socket of `margay serve`: its name, its frames, and the rules for both ends of a connection.
//!
//! A connection carries [frames](Frame). The daemon sends the first one, a [`Hello`]. The client compares it with the
//! store that it wants, and continues without the daemon if they differ. Then the client sends requests, one after the
//! other. For each request the daemon sends `Taken` at once and an answer at the end. While a verb waits for its
//! answer, the daemon also sends `Alive` every second, so that the client can distinguish a busy daemon from a frozen
//! one. [`keys`] has the requests to a [`kv::Store`]. The requests for verbs are types of the plugin.
//!
//! Both ends check the user of the other process, which must be root or the store's owner.

mod client;
mod frame;
pub mod keys;
pub mod name;
pub mod peer;

pub use client::{DaemonConnection, FROZEN_TIMEOUT};
pub use frame::{
    FRAME_VERSION, FileId, Frame, FrameKind, Hello, MAX_ANSWER_BODY_BYTES, MAX_REQUEST_BODY_BYTES, StallReport,
    StoreIdentity, decode, encode, malformed,
};
