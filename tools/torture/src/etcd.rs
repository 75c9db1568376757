//! A real etcd: the way in which its adapter's own tests start one.

#[path = "../../../backend-etcd/tests/support/server.rs"]
mod support;

use std::net::SocketAddr;

pub(crate) use support::Etcd;

/// An address on which nobody listens.
pub(crate) fn free_address() -> std::io::Result<SocketAddr> {
    support::dead_address()
}

/// An etcd as a long run needs it: history is given up, and there is room.
pub(crate) fn start() -> std::io::Result<Etcd> {
    let arguments =
        ["--auto-compaction-mode=revision", "--auto-compaction-retention=5000", "--quota-backend-bytes=8589934592"];
    Etcd::start_with("http", &arguments.map(str::to_owned))
}
