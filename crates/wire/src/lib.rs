#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! Implements the private socket of `margay serve`: the socket's name, the frames, and the client's end of a
//! connection.
//!
//! A connection carries [frames](Frame). The daemon sends the first frame, a [`Hello`]. The client compares the `Hello`
//! with the store that the client wants, and continues without the daemon if the two differ. If the daemon serves the
//! wanted store, the client sends requests, one after the other. For each request the daemon immediately sends the
//! frame `Taken`, and sends an answer once the request is complete. While a CNI verb waits for its answer, the daemon
//! also sends the frame `Alive` every second. The frames `Taken` and `Alive` let the client distinguish a busy daemon
//! from a frozen daemon. The module [`keys`] defines the requests to a [`kv::Store`]. The plugin's crate defines the
//! types of the requests for CNI verbs.
//!
//! Each end checks the user of the process at the other end: the user must be root or the store's owner.

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
