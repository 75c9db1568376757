//! What the tests of this crate share. The server alone is in a file that other crates use as well.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod certificates;
pub(crate) mod harness;
mod server;
pub(crate) mod users;

pub(crate) use server::*;
