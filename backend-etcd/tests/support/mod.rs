//! Provides helpers that the tests of `backend-etcd` share.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod harness;
pub(crate) mod tls;
pub(crate) mod users;

pub(crate) use testkit::server::*;
