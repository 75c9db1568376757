//! Real etcd servers.

use std::net::SocketAddr;

pub(crate) use testkit::server::Etcd;

/// An address on which nobody listens.
pub(crate) fn free_address() -> std::io::Result<SocketAddr> {
    testkit::server::dead_address()
}

/// An etcd as a long run needs it: history is given up, and there is room.
pub(crate) fn start() -> std::io::Result<Etcd> {
    let arguments =
        ["--auto-compaction-mode=revision", "--auto-compaction-retention=5000", "--quota-backend-bytes=8589934592"];
    Etcd::start_with("http", &arguments.map(str::to_owned))
}
