//! The parts that the tests of this crate share. Parts that other crates use as well are in files that know nothing of
//! this one.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod certificates;
pub(crate) mod harness;
mod room;
mod server;
mod tls;
pub(crate) mod users;

pub(crate) use server::*;
