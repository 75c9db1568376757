//! Looking through a store and mending it, on the in-memory store.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod damages;
mod endpoints;
mod own;
#[path = "../allocator/world.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod world;
