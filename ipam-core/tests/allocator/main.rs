//! Tests the allocator on the in-memory store.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod affinity;
mod assign;
mod bridge;
mod census;
mod check;
mod clocks;
mod concurrent;
mod crowded;
mod ensure;
mod estate;
mod every_verb;
mod explain;
mod fallback;
mod gc;
mod given;
mod handle;
mod hints;
mod intents;
mod lost;
mod networks;
mod overlap;
mod overlap_random;
mod owners;
mod prefixes;
mod quarantine;
mod quotas;
mod reach;
mod release;
mod retire;
mod scale;
mod settings;
mod sticky;
mod together;
mod vm;
mod would;

use testkit::world;
