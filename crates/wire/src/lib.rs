#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! The private socket of `margay serve`: its name, its frames, and what both ends do with a connection.
//!
//! A connection carries [frames](Frame). The daemon sends the first one, a [`Hello`]. The client compares it with the store
//! that it means, and goes on without the daemon if they differ. Then the client sends requests, one after the other. For each
//! request the daemon sends `Taken` at once, and an answer in the end; while a verb waits for its answer, also `Alive` every second, so that
//! the client can tell a busy daemon from a frozen one. [`keys`] are the requests of a
//! [`kv::Store`]; the requests of the plugin's verbs are the plugin's own.
//!
//! The client takes nothing from a daemon that runs as somebody else than root or the store's owner, and the daemon takes
//! nothing from a client that is neither.

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
