//! Which addresses the interfaces in any network namespace of this machine hold.
//!
//! A namespace lives as long as a thread is in it, or a file or a mount leads to it. So all threads of all processes, the
//! open files of all processes, and the mounts in every mount namespace are gone through. Each namespace is entered by a
//! thread that ends afterwards, and the kernel is asked for its addresses. Where a process is shielded from everybody, the
//! lists that the kernel shows to everybody take the place of that.
//!
//! What comes out is evidence against whoever holds an address in a store, so it must be whole. A namespace that goes
//! while it is looked for is fine: what was in it is gone too. One that is there and may not be entered makes the whole
//! look worthless, and that is what is said.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::ifaddrs::getifaddrs;
use nix::sched::{CloneFlags, setns};

use crate::listed::addresses_of;
use crate::mounts::{net_inode, network_namespaces};

/// The inode of the first process id namespace of a kernel. Only in there are all processes to be seen.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
/// The inode of the first user namespace of a kernel. Only there do capabilities reach everything.
const FIRST_USER_NAMESPACE: &str = "user:[4026531837]";
/// CAP_SYS_ADMIN, to enter namespaces, and CAP_SYS_PTRACE, to see those of other users' processes.
const NEEDED_CAPABILITIES: [(u32, &str); 2] = [(21, "CAP_SYS_ADMIN"), (19, "CAP_SYS_PTRACE")];

/// A process that is started by one that was seen already has a higher number, and a listing is in order; only when the
/// numbers begin anew can a namespace pass from hand to hand unseen. So a second round is made, and more while new ones turn up.
const FEWEST_ROUNDS: usize = 2;
const MOST_ROUNDS: usize = 6;
/// How many reasons are told.
const MOST_REASONS: usize = 3;

/// Not everything could be looked at, so nothing can be said of any address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blind {
    reasons: Vec<String>,
}

impl Blind {
    fn new(reason: impl Into<String>) -> Self {
        Self { reasons: vec![reason.into()] }
    }
}

impl fmt::Display for Blind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not all network namespaces of this machine can be looked at: ")?;
        f.write_str(&self.reasons.get(..MOST_REASONS).unwrap_or(&self.reasons).join("; "))?;
        match self.reasons.len().saturating_sub(MOST_REASONS) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

impl std::error::Error for Blind {}

/// The addresses that interfaces in any network namespace hold. Blocks the thread, for some milliseconds on a usual machine.
///
/// # Errors
/// [`Blind`] if anything could not be looked at.
pub fn look() -> Result<BTreeSet<IpAddr>, Blind> {
    can_see_everything()?;
    // The thread goes from namespace to namespace and never comes back.
    let looking = std::thread::Builder::new().name("namespaces".into()).spawn(|| {
        let mut search = Search::default();
        for round in 1..=MOST_ROUNDS {
            let before = search.seen.len();
            search.round()?;
            if round >= FEWEST_ROUNDS && search.seen.len() == before {
                return search.outcome();
            }
        }
        Err(Blind::new("new ones keep turning up; try again"))
    });
    let looking = looking.map_err(|error| Blind::new(format!("no thread can be started: {error}")))?;
    looking.join().unwrap_or_else(|_| Err(Blind::new("the thread that looks has failed")))
}

/// Whether this process can see everything at all.
fn can_see_everything() -> Result<(), Blind> {
    let link = |name: &str| fs::read_link(Path::new("/proc/self/ns").join(name));
    let is = |name: &str, first: &str| link(name).is_ok_and(|link| link.as_os_str() == first);
    if !is("pid", FIRST_PID_NAMESPACE) || !is("user", FIRST_USER_NAMESPACE) {
        return Err(Blind::new(
            "this process runs in a container or has no /proc of its own; run it on the machine itself",
        ));
    }
    let status = fs::read_to_string("/proc/self/status")
        .map_err(|error| Blind::new(format!("/proc/self/status cannot be read: {error}")))?;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let missing = NEEDED_CAPABILITIES.iter().filter(|(bit, _)| effective & (1 << bit) == 0);
    let missing: Vec<&str> = missing.map(|(_, name)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Blind::new(format!("{} missing; run it as root", missing.join(" and "))))
}

/// What has been found so far.
#[derive(Debug, Default)]
struct Search {
    /// Namespaces that were looked at, by inode: all of them are on one file system of the kernel's.
    seen: BTreeSet<u64>,
    addresses: BTreeSet<IpAddr>,
    /// What stood in the way, with the namespace where it is known: another way may lead there.
    obstacles: Vec<(Option<u64>, String)>,
}

impl Search {
    /// Goes through everything once.
    fn round(&mut self) -> Result<(), Blind> {
        self.obstacles.clear();
        let mut mount_namespaces = BTreeSet::new();
        let processes = fs::read_dir("/proc").map_err(|error| Blind::new(format!("/proc cannot be read: {error}")))?;
        for process in processes {
            let process = process.map_err(|error| Blind::new(format!("/proc cannot be read: {error}")))?;
            if process.file_name().as_bytes().iter().all(u8::is_ascii_digit) {
                self.process(&process.path(), &mut mount_namespaces);
            }
        }
        Ok(())
    }

    /// The namespaces of a process: those of its threads, those that it has open, and those that are mounted where it is.
    fn process(&mut self, process: &Path, mount_namespaces: &mut BTreeSet<PathBuf>) {
        for thread in self.entries(&process.join("task")) {
            self.thread(&thread);
            match fs::read_link(thread.join("ns/mnt")) {
                Ok(namespace) => {
                    if !mount_namespaces.contains(&namespace) && self.mounts(&thread) {
                        mount_namespaces.insert(namespace);
                    }
                }
                // The list of mounts may be there for everybody all the same.
                Err(_) => {
                    self.mounts(&thread);
                }
            }
        }
        // That nobody is in a namespace and only a file leads there is rare enough that a process whose files are shielded
        // is not held against the look.
        for file in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            if let Some(inode) = network_link(&file.path()).ok().flatten() {
                self.visit(inode, &file.path());
            }
        }
    }

    /// The namespace that a thread is in.
    fn thread(&mut self, thread: &Path) {
        let link = thread.join("ns/net");
        match network_link(&link) {
            Ok(Some(inode)) => self.visit(inode, &link),
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => match addresses_of(thread) {
                Ok(addresses) => self.addresses.extend(addresses),
                Err(error) => self.obstacle(None, &link, &error),
            },
            Err(error) => self.obstacle(None, &link, &error),
        }
    }

    /// The paths in a folder of a process.
    fn entries(&mut self, folder: &Path) -> Vec<PathBuf> {
        let listed = fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
        listed.unwrap_or_else(|error| {
            self.obstacle(None, folder, &error);
            Vec::new()
        })
    }

    /// The namespaces in the mount namespace of a thread. False if the thread was gone before they were read.
    fn mounts(&mut self, thread: &Path) -> bool {
        let list = thread.join("mountinfo");
        match fs::read(&list) {
            Ok(text) => {
                for mounted in network_namespaces(&text) {
                    let below_root = mounted.at.strip_prefix("/").unwrap_or(&mounted.at);
                    self.visit(mounted.inode, &thread.join("root").join(below_root));
                }
                true
            }
            // So says the kernel of a process that has ended and that nobody has waited for.
            Err(error) if error.kind() == ErrorKind::InvalidInput => false,
            Err(error) => {
                self.obstacle(None, &list, &error);
                false
            }
        }
    }

    /// Enters a namespace that was not seen yet, and notes its addresses.
    fn visit(&mut self, inode: u64, path: &Path) {
        if self.seen.contains(&inode) {
            return;
        }
        match addresses_in(inode, path) {
            Ok(found) => {
                self.seen.insert(inode);
                self.addresses.extend(found);
            }
            Err(error) => self.obstacle(Some(inode), path, &error),
        }
    }

    /// Notes what stood in the way. What has gone meanwhile does not.
    fn obstacle(&mut self, inode: Option<u64>, path: &Path, error: &io::Error) {
        let gone = error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH);
        if !gone {
            self.obstacles.push((inode, format!("{}: {error}", path.display())));
        }
    }

    fn outcome(self) -> Result<BTreeSet<IpAddr>, Blind> {
        let seen = self.seen;
        let unseen = |inode: &Option<u64>| inode.is_none_or(|inode| !seen.contains(&inode));
        let reasons: Vec<String> =
            self.obstacles.into_iter().filter(|(inode, _)| unseen(inode)).map(|(_, reason)| reason).collect();
        if reasons.is_empty() { Ok(self.addresses) } else { Err(Blind { reasons }) }
    }
}

/// The inode of the network namespace that a link of the kernel's leads to; `None` if it leads elsewhere.
fn network_link(link: &Path) -> io::Result<Option<u64>> {
    Ok(net_inode(fs::read_link(link)?.as_os_str().as_bytes()))
}

/// Enters the namespace that a path leads to, and asks for its addresses.
fn addresses_in(inode: u64, path: &Path) -> io::Result<BTreeSet<IpAddr>> {
    let namespace = open(path)?;
    if namespace.metadata()?.ino() != inode {
        // Something else is in its place by now, or has been mounted over it.
        return Err(io::Error::other("another file is in the way"));
    }
    setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?;
    let addresses = getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    });
    Ok(addresses.collect())
}

/// Opens what should be a namespace. It may have become a pipe, whose other end nobody has opened.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags((OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).bits()).open(path)
}
