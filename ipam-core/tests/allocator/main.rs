//! The allocator's verbs on the in-memory store.

mod assign;
mod bridge;
mod concurrent;
mod release;
mod world;
