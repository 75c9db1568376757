//! The lock holder of a store, for the error of a process that waited in vain.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long to look: a host may run thousands of processes, and the caller has waited enough.
const PATIENCE: Duration = Duration::from_millis(300);

/// The process that has the lock in the queue `path`, as `12345 (margay-ipam)`, if it can be found.
///
/// The kernel's lock list does not name the owner of such a lock, but each open file's page under /proc shows the
/// locks that it holds. The holder is the one with the lowest write lock. Other users' processes are only seen by root.
pub(crate) fn find(path: &Path) -> Option<String> {
    find_among(Path::new("/proc"), path)
}

fn find_among(processes: &Path, path: &Path) -> Option<String> {
    let queue = fs::metadata(path).ok()?;
    let started = Instant::now();
    let (mut lowest, mut first) = (u64::MAX, Vec::new());
    for process in fs::read_dir(processes).ok()?.flatten() {
        if started.elapsed() > PATIENCE {
            // The process found so far may only be waiting, and nobody must end the wrong process.
            return None;
        }
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Some(ticket) = ticket_of(&process.path(), path, &queue) else { continue };
        if ticket < lowest {
            (lowest, first) = (ticket, Vec::new());
        }
        if ticket == lowest {
            first.push((pid, process.path()));
        }
    }
    // A process that was just being started shared its parent's open files, and is somebody else by now.
    first.into_iter().find_map(|(pid, process)| {
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        (ticket_of(&process, path, &queue) == Some(lowest)).then(|| format!("{pid} ({})", name.trim()))
    })
}

/// The lowest ticket that a process has in a queue.
fn ticket_of(process: &Path, path: &Path, queue: &Metadata) -> Option<u64> {
    let files = fs::read_dir(process.join("fd")).ok()?.flatten();
    let tickets = files.filter_map(|file| {
        // The name first: asking for more may hang on a file of a dead network file system.
        let is_queue = fs::read_link(file.path()).is_ok_and(|link| link.file_name() == path.file_name())
            && fs::metadata(file.path()).is_ok_and(|file| (file.dev(), file.ino()) == (queue.dev(), queue.ino()));
        let info = || fs::read_to_string(process.join("fdinfo").join(file.file_name())).ok();
        if is_queue { ticket(&info()?) } else { None }
    });
    tickets.min()
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
    #[test]
    fn a_process_that_has_just_been_started_by_the_holder_is_not_named() {
        let folder = tempfile::tempdir().unwrap();
        let queue = folder.path().join("queue");
        fs::write(&queue, "").unwrap();
        let process = |pid: &str, byte: u64| {
            let process = folder.path().join("proc").join(pid);
            fs::create_dir_all(process.join("fd")).unwrap();
            fs::create_dir_all(process.join("fdinfo")).unwrap();
            std::os::unix::fs::symlink(&queue, process.join("fd/3")).unwrap();
            let info = format!("lock:\t1: OFDLCK ADVISORY  WRITE -1 fe:00:131 {byte} {byte}\n");
            fs::write(process.join("fdinfo/3"), info).unwrap();
            process
        };
        let child = process("7", 0);
        fs::write(process("8", 1).join("comm"), "waiting\n").unwrap();
        // The test waits until it is a program of its own.
        let name = child.join("comm");
        nix::unistd::mkfifo(&name, nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut file = fs::File::options().write(true).open(&name).unwrap();
                fs::remove_file(child.join("fd/3")).unwrap();
                std::io::Write::write_all(&mut file, b"child\n").unwrap();
            });
            let found = find_among(&folder.path().join("proc"), &queue);
            assert_eq!(found, None, "nor one that waits");
        });
    }
}
