//! Who holds a store: for the message of somebody who waited in vain.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long to look: a host may run thousands of processes, and whoever asks has waited enough.
const PATIENCE: Duration = Duration::from_millis(300);

/// The process that has the turn in the queue `path`, as `12345 (margay-ipam)`, if it can be told.
///
/// The kernel's lock list does not name the owner of such a lock, but each open file's page under /proc shows the
/// locks that it holds. The holder is the one with the lowest write lock. Other users' processes are only seen by root.
pub(super) fn find(path: &Path) -> Option<String> {
    let queue = fs::metadata(path).ok()?;
    let started = Instant::now();
    let mut first: Option<(u64, u32)> = None;
    for process in fs::read_dir("/proc").ok()?.flatten() {
        if started.elapsed() > PATIENCE {
            // Who was found so far may only be waiting, and nobody is to end the wrong process.
            return None;
        }
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        for file in files.flatten() {
            // The name first: asking for more may hang on a file of a dead network file system.
            let is_queue = fs::read_link(file.path()).is_ok_and(|link| link.file_name() == path.file_name())
                && fs::metadata(file.path()).is_ok_and(|file| (file.dev(), file.ino()) == (queue.dev(), queue.ino()));
            if !is_queue {
                continue;
            }
            let info = fs::read_to_string(process.path().join("fdinfo").join(file.file_name())).unwrap_or_default();
            let Some(ticket) = ticket(&info) else { continue };
            if first.is_none_or(|(lowest, _)| ticket < lowest) {
                first = Some((ticket, pid));
            }
        }
    }
    let (_, pid) = first?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(format!("{pid} ({})", name.trim()))
}

/// The byte on which an open file holds a write lock, from lines such as
/// `lock: 1: OFDLCK ADVISORY  WRITE -1 fe:00:131 7 7`.
fn ticket(info: &str) -> Option<u64> {
    info.lines().find_map(|line| {
        let mut words = line.strip_prefix("lock:")?.split_whitespace();
        if !words.any(|word| word == "OFDLCK") || !words.any(|word| word == "WRITE") {
            return None;
        }
        words.nth(2)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_write_lock_is_a_ticket() {
        let info = "pos:\t0\nflags:\t02100002\nlock:\t1: OFDLCK ADVISORY  READ -1 fe:00:131 0 6\n\
                    lock:\t2: OFDLCK ADVISORY  WRITE -1 fe:00:131 7 7\n";
        assert_eq!(ticket(info), Some(7));
        assert_eq!(ticket("lock:\t1: FLOCK  ADVISORY  WRITE 99 fe:00:131 0 EOF\n"), None);
        assert_eq!(ticket("pos:\t0\n"), None);
    }
}
