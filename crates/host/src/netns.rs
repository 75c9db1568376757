//! The name of a network namespace, as it is recorded with an address.
//!
//! The name is `DEVICE:INODE` of the file by which the kernel shows the namespace, for example `4:4026532201`. Where the
//! process that records it runs in a process id namespace of its own (LXC, kind, WSL), a slash and the inode of that one
//! follow: `4:4026532201/4026532300`. Only a process that sees all processes of that one can tell whether the network
//! namespace is still there.
//!
//! The kernel uses an inode again after a namespace has gone. A name that leads to another namespace by now looks alive,
//! which keeps an address for too long and never frees it too early. After a reboot a name means nothing.

use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use nix::sys::statfs::{NSFS_MAGIC, statfs};

/// The inode of the first process id namespace of a kernel. Only in there are all processes to be seen.
const FIRST_PID_NAMESPACE: u64 = 4_026_531_836;

/// The name of a namespace by what its file has.
pub(crate) fn name(device: u64, inode: u64) -> String {
    format!("{device}:{inode}")
}

/// The name of the network namespace that a path leads to, as this process records it; `None` for a path that leads to no
/// namespace. The path is not opened, since it may be anything, a pipe for one.
pub fn network_namespace(path: &Path) -> Option<String> {
    let kind = statfs(path).ok()?.filesystem_type();
    let about = fs::metadata(path).ok().filter(|_| kind == NSFS_MAGIC)?;
    let name = name(about.st_dev(), about.st_ino());
    match pid_namespace()? {
        FIRST_PID_NAMESPACE => Some(name),
        own => Some(format!("{name}/{own}")),
    }
}

/// The inode of the process id namespace of this process.
fn pid_namespace() -> Option<u64> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// How far this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It sees every process of the machine.
    Machine,
    /// It sees the processes of this process id namespace, which is not the machine's first.
    Container(String),
}

/// How far this process sees; `None` if it has no /proc of its own.
pub(crate) fn reach() -> Option<Reach> {
    Some(match pid_namespace()? {
        FIRST_PID_NAMESPACE => Reach::Machine,
        own => Reach::Container(own.to_string()),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_a_name_and_nothing_else_has_one() {
        let own = network_namespace(Path::new("/proc/thread-self/ns/net")).unwrap();
        let link = fs::read_link("/proc/thread-self/ns/net").unwrap();
        let inode = link.to_str().unwrap().trim_start_matches("net:[").trim_end_matches(']').to_owned();
        assert_eq!(own.split_once(':').unwrap().1.split('/').next().unwrap(), inode, "{own}");
        for other in ["/no/such/file", "/", "/proc/self/status", "/dev/null", "a\0b", ""] {
            assert_eq!(network_namespace(Path::new(other)), None, "{other:?}");
        }
    }
}
