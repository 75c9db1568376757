//! A real etcd: the way in which its adapter's own tests start one.

#[path = "../../backend-etcd/tests/support/server.rs"]
mod support;

pub(crate) use support::Etcd;

/// An etcd as a long run needs it: history is given up, and there is room.
pub(crate) fn start() -> std::io::Result<Etcd> {
    let arguments =
        ["--auto-compaction-mode=revision", "--auto-compaction-retention=5000", "--quota-backend-bytes=8589934592"];
    Etcd::start_with("http", &arguments.map(str::to_owned))
}
