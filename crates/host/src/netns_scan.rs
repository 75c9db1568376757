//! Finds all network namespaces of this machine and the addresses of the interfaces in them.
//!
//! A network namespace exists while a thread is in it, or while an open file or a mount refers to it. The scan visits
//! all threads and open files of all processes, and the mounts of every mount namespace. A helper thread enters each
//! network namespace, asks the kernel for the addresses in that namespace, and ends after the scan. If a security
//! module denies access to a process, the scan reads the world-readable address lists in the process's `/proc` folder
//! instead.
//!
//! The result of a scan must be complete: if an address is in no namespace, Margay may release the address. It does no
//! harm if a network namespace disappears during the scan, because its addresses disappear with it. If a network
//! namespace exists but cannot be entered, the whole scan fails with [`IncompleteScan`].
//!
//! In a container with its own process id (PID) namespace (LXC, kind, WSL), the scan covers only the namespaces that
//! were created inside that container. The field [`NetnsScan::within`] tells whether the scan ran in a container with
//! its own process id namespace.
//!
//! # The name of a network namespace
//!
//! The name of a network namespace, as recorded with an address, is the `DEVICE:INODE` of the namespace's file, for
//! example `4:4026532201`. A recording process outside of the initial PID namespace appends a slash and the inode of
//! its own PID namespace, as in `4:4026532201/4026532300`. Only a process that sees all processes of the recorded PID
//! namespace can tell whether the recorded network namespace still exists.
//!
//! The kernel may reuse the inode of a network namespace that no longer exists. If the inode is reused, the recorded
//! name of the old namespace looks alive: the address is kept too long, but it is never released too early. After a
//! reboot, names of network namespaces that were recorded before are meaningless.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::ifaddrs::getifaddrs;
use nix::sched::{CloneFlags, setns};
use nix::sys::stat::makedev;
use nix::sys::statfs::{NSFS_MAGIC, statfs};

use crate::machine::ip_of;

/// The inode of the machine's initial user namespace, which is the same in every kernel. Capabilities apply to the
/// whole machine only in the initial user namespace.
const FIRST_USER_NAMESPACE: &str = "user:[4026531837]";
/// A full scan needs CAP_SYS_ADMIN for entering namespaces, and CAP_SYS_PTRACE for seeing the namespaces of other
/// users' processes.
const NEEDED_CAPABILITIES: [(u32, &str); 2] = [(21, "CAP_SYS_ADMIN"), (19, "CAP_SYS_PTRACE")];

/// Minimum number of rounds of a scan; in each round the scan visits all processes. `/proc` is listed in ascending
/// order and a child process usually has a higher process id than its parent, so a round also visits children that
/// start during the round. Unless process ids wrap around, one round cannot miss a namespace, even if processes hand it
/// on. The second round finds the namespaces that a wrap-around of process ids hid from the first round. A scan repeats
/// its rounds as long as a round finds new namespaces.
const MIN_ROUNDS: usize = 2;
/// Time after which a scan gives up if every round has found new namespaces. On a machine that starts many containers,
/// almost every round of a scan finds new namespaces.
const SCAN_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of reasons in the error message of an incomplete scan.
const MAX_REASONS: usize = 3;

/// The reasons why a scan could not cover all network namespaces. After an incomplete scan, no address may be
/// considered unused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncompleteScan {
    reasons: Vec<String>,
}

impl IncompleteScan {
    fn new(reason: impl Into<String>) -> Self {
        Self { reasons: vec![reason.into()] }
    }
}

impl fmt::Display for IncompleteScan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not all network namespaces of this machine can be looked at: ")?;
        f.write_str(&self.reasons.get(..MAX_REASONS).unwrap_or(&self.reasons).join("; "))?;
        match self.reasons.len().saturating_sub(MAX_REASONS) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

impl std::error::Error for IncompleteScan {}

/// The result of a complete scan of all network namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetnsScan {
    /// The addresses of all interfaces in all network namespaces.
    pub addresses: BTreeSet<IpAddr>,
    /// The names of all network namespaces, as returned by [`network_namespace`], but without the slash and the inode
    /// of the process id namespace. `None` if this process cannot find out the name of a network namespace, because a
    /// security module denies access to all processes in that namespace.
    pub namespaces: Option<BTreeSet<String>>,
    /// The process id namespace to which the scan was limited; `None` for the machine's initial process id namespace.
    pub within: Option<String>,
}

/// Scans every network namespace of the machine. The calling thread is blocked, usually for some milliseconds, and for
/// at most about three seconds while new namespaces are found.
///
/// # Errors
/// [`IncompleteScan`] if any network namespace could not be visited.
pub fn scan() -> Result<NetnsScan, IncompleteScan> {
    let within = check_visibility()?;
    // Run the scan in a thread of its own, because this thread enters other network namespaces and does not return to
    // its original one.
    let scanning = std::thread::Builder::new().name("namespaces".into()).spawn(move || {
        let mut search = NetnsSearch::default();
        let begun = Instant::now();
        for round in 1.. {
            let before = search.seen.len();
            search.scan_processes()?;
            if round >= MIN_ROUNDS && search.seen.len() == before {
                return search.into_scan(within);
            }
            if round >= MIN_ROUNDS && begun.elapsed() >= SCAN_TIMEOUT {
                break;
            }
        }
        Err(IncompleteScan::new("new ones keep turning up; try again"))
    });
    let scanning = scanning.map_err(|error| IncompleteScan::new(format!("no thread can be started: {error}")))?;
    scanning.join().unwrap_or_else(|_| Err(IncompleteScan::new("the thread that looks has failed")))
}

/// Checks that this process has access to all processes in its process id namespace. Returns the inode of this
/// process's process id namespace, or `None` for the machine's initial process id namespace.
///
/// A container with its own process id namespace may also have its own user namespace. All namespaces that are created
/// inside a container with its own user namespace belong to that user namespace. In a container with its own user
/// namespace, a scan cannot enter namespaces that were created outside of the container, and reports them as failures.
fn check_visibility() -> Result<Option<String>, IncompleteScan> {
    let within = match process_view() {
        None => {
            return Err(IncompleteScan::new(
                "this process has no /proc of its own; mount one, or run margay on the node, outside of containers",
            ));
        }
        Some(ProcessView::Container(inode)) => Some(inode),
        Some(ProcessView::Machine) => {
            let users = fs::read_link("/proc/self/ns/user");
            if !users.is_ok_and(|link| link.as_os_str() == FIRST_USER_NAMESPACE) {
                return Err(IncompleteScan::new(
                    "this process has other users than the machine; run it as root, and not in a container",
                ));
            }
            None
        }
    };
    let status = fs::read_to_string("/proc/self/status")
        .map_err(|error| IncompleteScan::new(format!("/proc/self/status cannot be read: {error}")))?;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let missing = NEEDED_CAPABILITIES.iter().filter(|(bit, _)| effective & (1 << bit) == 0);
    let missing: Vec<&str> = missing.map(|(_, name)| *name).collect();
    if missing.is_empty() {
        return Ok(within);
    }
    Err(IncompleteScan::new(format!("{} missing; run it as root", missing.join(" and "))))
}

/// The namespaces, names and addresses that a scan has found so far, and its failures.
#[derive(Debug, Default)]
struct NetnsSearch {
    /// Inodes of the network namespaces that the scan has entered. The inode alone identifies a namespace, because all
    /// namespaces are files on one file system of the kernel.
    seen: BTreeSet<u64>,
    names: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
    /// Inodes that identify network namespaces by their address lists (see [`listing_inode`]). The set `entered` is for
    /// namespaces that the scan has entered, and the set `shielded` for namespaces of threads to which access was
    /// denied. Each network namespace has its own address list. An inode in both sets means that the scan entered the
    /// namespace of an inaccessible thread through another thread, file or mount.
    entered: BTreeSet<u64>,
    shielded: BTreeSet<u64>,
    /// Network namespaces that could not be visited. The inode of an unvisited namespace is kept if known, because the
    /// scan may still enter the namespace through another thread, file or mount.
    obstacles: Vec<(Option<u64>, String)>,
}

impl NetnsSearch {
    /// Visits the network namespaces of every process, in one round.
    fn scan_processes(&mut self) -> Result<(), IncompleteScan> {
        self.obstacles.clear();
        self.shielded.clear();
        let mut mount_namespaces = BTreeSet::new();
        let processes =
            fs::read_dir("/proc").map_err(|error| IncompleteScan::new(format!("/proc cannot be read: {error}")))?;
        for process in processes {
            let process = process.map_err(|error| IncompleteScan::new(format!("/proc cannot be read: {error}")))?;
            if process.file_name().as_bytes().iter().all(u8::is_ascii_digit) {
                self.visit_process(&process.path(), &mut mount_namespaces);
            }
        }
        Ok(())
    }

    /// Visits the network namespaces of a process: the namespaces of its threads, of its open files, and of the mounts
    /// that its threads see.
    fn visit_process(&mut self, process: &Path, mount_namespaces: &mut BTreeSet<PathBuf>) {
        for thread in self.list_paths(&process.join("task")) {
            self.visit_thread(&thread);
            match fs::read_link(thread.join("ns/mnt")) {
                Ok(namespace) => {
                    if !mount_namespaces.contains(&namespace) && self.visit_mounts(&thread) {
                        mount_namespaces.insert(namespace);
                    }
                }
                // The thread's list of mounts may be readable although the link to its mount namespace is not.
                Err(_) => {
                    self.visit_mounts(&thread);
                }
            }
        }
        // If the open files of a process cannot be listed, the scan still counts as complete, because it is rare that
        // only an open file keeps a network namespace alive.
        for file in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            if let Some(inode) = network_link(&file.path()).ok().flatten() {
                self.visit_namespace(inode, &file.path());
            }
        }
    }

    fn visit_thread(&mut self, thread: &Path) {
        let link = thread.join("ns/net");
        match network_link(&link) {
            Ok(Some(inode)) => self.visit_namespace(inode, &link),
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => self.visit_shielded_thread(thread),
            Err(error) => self.add_obstacle(None, &link, &error),
        }
    }

    /// Reads the address lists in `/proc` of a thread whose network namespace cannot be entered.
    fn visit_shielded_thread(&mut self, thread: &Path) {
        let listed = addresses_of(thread).and_then(|addresses| Ok((addresses, listing_inode(thread)?)));
        match listed {
            Ok((addresses, listing)) => {
                self.addresses.extend(addresses);
                self.shielded.insert(listing);
            }
            Err(error) => self.add_obstacle(None, thread, &error),
        }
    }

    /// Lists a folder in a process's `/proc` folder. The scan is incomplete if a folder in `/proc/PID` cannot be
    /// listed.
    fn list_paths(&mut self, folder: &Path) -> Vec<PathBuf> {
        let listed = fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
        listed.unwrap_or_else(|error| {
            self.add_obstacle(None, folder, &error);
            Vec::new()
        })
    }

    /// Visits the network namespaces that are mounted in the mount namespace of a thread. Returns false if the thread's
    /// `mountinfo` file could not be read.
    fn visit_mounts(&mut self, thread: &Path) -> bool {
        let list = thread.join("mountinfo");
        match fs::read(&list) {
            Ok(text) => {
                for mounted in network_namespaces(&text) {
                    // A mounted network namespace exists even if another mount covers its mount point, so that no path
                    // leads to the namespace.
                    self.names.insert(namespace_name(mounted.device, mounted.inode));
                    let below_root = mounted.at.strip_prefix("/").unwrap_or(&mounted.at);
                    self.visit_namespace(mounted.inode, &thread.join("root").join(below_root));
                }
                true
            }
            // The kernel returns `EINVAL` (`InvalidInput`) if the process is a zombie.
            Err(error) if error.kind() == ErrorKind::InvalidInput => false,
            Err(error) => {
                self.add_obstacle(None, &list, &error);
                false
            }
        }
    }

    /// Enters a network namespace and records its addresses, unless the scan has entered that namespace before.
    fn visit_namespace(&mut self, inode: u64, path: &Path) {
        if self.seen.contains(&inode) {
            return;
        }
        match enter_namespace(inode, path) {
            Ok(found) => {
                self.seen.insert(inode);
                self.names.insert(found.name);
                self.entered.insert(found.listing);
                self.addresses.extend(found.addresses);
            }
            Err(error) => self.add_obstacle(Some(inode), path, &error),
        }
    }

    /// Records that a network namespace could not be visited, unless the visited process has ended meanwhile.
    fn add_obstacle(&mut self, inode: Option<u64>, path: &Path, error: &io::Error) {
        let gone = error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH);
        if !gone {
            self.obstacles.push((inode, format!("{}: {error}", path.display())));
        }
    }

    fn into_scan(self, within: Option<String>) -> Result<NetnsScan, IncompleteScan> {
        let seen = self.seen;
        let unseen = |inode: &Option<u64>| inode.is_none_or(|inode| !seen.contains(&inode));
        let reasons: Vec<String> =
            self.obstacles.into_iter().filter(|(inode, _)| unseen(inode)).map(|(_, reason)| reason).collect();
        if !reasons.is_empty() {
            return Err(IncompleteScan { reasons });
        }
        let namespaces = self.shielded.is_subset(&self.entered).then_some(self.names);
        Ok(NetnsScan { addresses: self.addresses, namespaces, within })
    }
}

/// The inode of the network namespace to which a link in `/proc` leads; `None` if the link leads to anything else.
fn network_link(link: &Path) -> io::Result<Option<u64>> {
    Ok(net_inode(fs::read_link(link)?.as_os_str().as_bytes()))
}

#[derive(Debug)]
struct EnteredNetns {
    name: String,
    listing: u64,
    addresses: BTreeSet<IpAddr>,
}

/// Moves this thread into the network namespace at a path, and returns the addresses in that namespace.
fn enter_namespace(inode: u64, path: &Path) -> io::Result<EnteredNetns> {
    let namespace = open(path)?;
    let about = namespace.metadata()?;
    if about.ino() != inode {
        // After the scan had found the path, another file replaced the namespace's file, or another mount covered the
        // file.
        return Err(io::Error::other("another file is in the way"));
    }
    setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?;
    let addresses = getifaddrs()?.filter_map(|interface| ip_of(&interface.address?));
    let listing = listing_inode(Path::new("/proc/thread-self"))?;
    Ok(EnteredNetns { name: namespace_name(about.dev(), inode), listing, addresses: addresses.collect() })
}

/// Opens a network namespace's file without blocking, because the path may meanwhile lead to a pipe without a writer.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags((OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).bits()).open(path)
}

/// The inode of the machine's initial process id namespace, the only one in which all processes of the machine are
/// visible.
const FIRST_PID_NAMESPACE: u64 = 4_026_531_836;

fn namespace_name(device: u64, inode: u64) -> String {
    format!("{device}:{inode}")
}

/// The name of the network namespace at a path, in the form that is recorded with an address; `None` if the path does
/// not lead to a network namespace. The file at the path is not opened, because the path may lead to any file, for
/// example a pipe.
pub fn network_namespace(path: &Path) -> Option<String> {
    let kind = statfs(path).ok()?.filesystem_type();
    let about = fs::metadata(path).ok().filter(|_| kind == NSFS_MAGIC)?;
    let name = namespace_name(about.dev(), about.ino());
    match pid_namespace()? {
        FIRST_PID_NAMESPACE => Some(name),
        own => Some(format!("{name}/{own}")),
    }
}

fn pid_namespace() -> Option<u64> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// Which processes of the machine this process can see.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ProcessView {
    /// This process can see every process of the machine.
    Machine,
    /// This process can see only the processes of its process id namespace, which is not the machine's initial one. The
    /// variant `Container` holds the inode of that process id namespace.
    Container(String),
}

/// Returns which processes this process can see; `None` if `/proc` is not mounted for the process's own process id
/// namespace.
fn process_view() -> Option<ProcessView> {
    Some(match pid_namespace()? {
        FIRST_PID_NAMESPACE => ProcessView::Machine,
        own => ProcessView::Container(own.to_string()),
    })
}

/// A mount of a network namespace, from a `mountinfo` file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NetnsMount {
    /// The device number of the kernel's file system of namespaces.
    device: u64,
    inode: u64,
    /// The path of the mount point, relative to the root of the process whose `mountinfo` lists the mount.
    at: PathBuf,
}

/// Parses the inode in the kernel's notation for a network namespace, `net:[4026531840]`; `None` if the string has
/// another form.
fn net_inode(text: &[u8]) -> Option<u64> {
    let number = text.strip_prefix(b"net:[")?.strip_suffix(b"]")?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Parses the mounts of network namespaces in a `mountinfo` file (see proc(5)). The third field of a `mountinfo` line
/// is the device number as `major:minor`. The fourth field of a `mountinfo` line is the mount's root; for a mounted
/// network namespace, it is the namespace's name. The fifth field of a `mountinfo` line is the mount point. In a
/// `mountinfo` line, the type of the mounted file system is the field after `-`.
fn network_namespaces(mountinfo: &[u8]) -> Vec<NetnsMount> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(parse_mount).collect()
}

fn parse_mount(line: &[u8]) -> Option<NetnsMount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let dash = fields.iter().position(|field| *field == b"-")?;
    if fields.get(dash + 1) != Some(&&b"nsfs"[..]) {
        return None;
    }
    let (major, minor) = std::str::from_utf8(fields.get(2)?).ok()?.split_once(':')?;
    let device = makedev(major.parse().ok()?, minor.parse().ok()?);
    Some(NetnsMount {
        device,
        inode: net_inode(fields.get(3)?)?,
        at: PathBuf::from(OsString::from_vec(unescape(fields.get(4)?))),
    })
}

/// Decodes the octal escapes (`\040`) that `mountinfo` uses for spaces, tabs, newlines and backslashes.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let digits = after.get(..3).filter(|digits| digits.iter().all(|digit| (b'0'..=b'7').contains(digit)));
        if let (b'\\', Some(digits)) = (first, digits) {
            let value = digits.iter().fold(0_u32, |value, digit| value * 8 + u32::from(digit - b'0'));
            plain.push(u8::try_from(value).unwrap_or(b'?'));
            rest = after.get(3..).unwrap_or_default();
        } else {
            plain.push(*first);
            rest = after;
        }
    }
    plain
}

/// Reads the addresses in a thread's network namespace from the files in the thread's `/proc` folder.
fn addresses_of(thread: &Path) -> io::Result<BTreeSet<IpAddr>> {
    let read = |name: &str| fs::read_to_string(thread.join("net").join(name));
    let mut addresses: BTreeSet<IpAddr> = parse_fib_trie(&read("fib_trie")?).collect();
    match read("if_inet6") {
        Ok(text) => addresses.extend(parse_if_inet6(&text)),
        // If the file `if_inet6` does not exist, the kernel has no IPv6. If `if_inet6` is missing, the thread has not
        // ended: for an ended thread, reading `fib_trie` would have failed before.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(addresses)
}

/// The inode of `net/dev` in a thread's `/proc` folder. The inode of `net/dev` identifies the thread's network
/// namespace while the namespace exists, and can be read without privileges.
fn listing_inode(thread: &Path) -> io::Result<u64> {
    fs::metadata(thread.join("net/dev")).map(|about| about.ino())
}

/// Parses the machine's own addresses in the file `fib_trie`. In `fib_trie`, each of the machine's addresses takes two
/// lines: a line that ends with the address, and then a line `/32 host LOCAL`.
fn parse_fib_trie(text: &str) -> impl Iterator<Item = IpAddr> {
    let mut last = None;
    text.lines().filter_map(move |line| {
        if let Some((_, leaf)) = line.split_once("|-- ") {
            last = leaf.trim().parse::<Ipv4Addr>().ok();
            return None;
        }
        last.filter(|_| line.trim() == "/32 host LOCAL").map(IpAddr::V4)
    })
}

/// Parses the addresses in the file `if_inet6`: each line starts with an address of 32 hexadecimal digits.
fn parse_if_inet6(text: &str) -> impl Iterator<Item = IpAddr> {
    text.lines().filter_map(|line| {
        let digits = line.split_whitespace().next().filter(|digits| digits.len() == 32)?;
        u128::from_str_radix(digits, 16).ok().map(|bits| IpAddr::V6(Ipv6Addr::from(bits)))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    /// Tests that an inaccessible thread makes the scan incomplete only if the scan cannot enter the thread's network
    /// namespace in another way.
    #[test]
    fn scan_is_incomplete_when_shielded_thread_hides_names() {
        let own = Path::new("/proc/thread-self");
        let mut search = NetnsSearch::default();
        search.visit_shielded_thread(own);
        assert!(search.addresses.contains(&"127.0.0.1".parse().unwrap()));
        assert_eq!(search.into_scan(None).unwrap().namespaces, None);

        let entering = std::thread::spawn(|| {
            let mut search = NetnsSearch::default();
            search.visit_thread(own);
            search.visit_shielded_thread(own);
            search.into_scan(None)
        });
        let sight = entering.join().unwrap().unwrap();
        let own = network_namespace(Path::new("/proc/thread-self/ns/net")).unwrap();
        assert_eq!(sight.namespaces, Some([own].into()));
    }

    #[test]
    fn netns_has_name_and_nothing_else_does() {
        let own = network_namespace(Path::new("/proc/thread-self/ns/net")).unwrap();
        let link = fs::read_link("/proc/thread-self/ns/net").unwrap();
        let inode = link.to_str().unwrap().trim_start_matches("net:[").trim_end_matches(']').to_owned();
        assert_eq!(own.split_once(':').unwrap().1.split('/').next().unwrap(), inode, "{own}");
        for other in ["/no/such/file", "/", "/proc/self/status", "/dev/null", "a\0b", ""] {
            assert_eq!(network_namespace(Path::new(other)), None, "{other:?}");
        }
    }

    #[test]
    fn netns_is_found_among_other_mounts() {
        let text = b"22 1 0:21 / /proc rw,nosuid shared:5 - proc proc rw\n\
            36 24 0:4 net:[4026532281] /run/netns/blue rw shared:7 - nsfs nsfs rw\n\
            37 24 0:4 net:[4026532282] /run/a\\040b\\134c rw - nsfs nsfs rw\n\
            38 24 0:4 uts:[4026532283] /run/uts rw - nsfs nsfs rw\n\
            39 24 0:4 net:[7] /not/of/this/kind rw - tmpfs tmpfs rw\n\
            40 24 0:4 short\n";
        let found = network_namespaces(text);
        let expected = [(4_026_532_281, "/run/netns/blue"), (4_026_532_282, "/run/a b\\c")];
        assert_eq!(found, expected.map(|(inode, at)| NetnsMount { device: 4, inode, at: at.into() }));
    }

    #[test]
    fn netns_name_is_only_of_network_namespaces() {
        assert_eq!(net_inode(b"net:[12]"), Some(12));
        for other in [&b"uts:[12]"[..], b"net:[x]", b"net:[12] (deleted)", b"", b"socket:[12]"] {
            assert_eq!(net_inode(other), None);
        }
    }

    #[test]
    fn local_addresses_are_told_from_networks_and_broadcasts() {
        let text = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     +-- 10.0.0.0/24 2 0 2\n\
            \x20       |-- 10.0.0.0\n           /24 link UNICAST\n        |-- 10.0.0.5\n           /32 host LOCAL\n\
            \x20       |-- 10.0.0.255\n           /32 link BROADCAST\n     |-- 127.0.0.0\n        /8 host LOCAL\n";
        assert_eq!(parse_fib_trie(text).collect::<Vec<_>>(), ["10.0.0.5".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn ipv6_addresses_have_32_digits() {
        let text = "fd000000000000000000000000000002 04 40 00 82     eth0\n00000000000000000000000000000001 01 80 10 80 lo\nx\n";
        let expected: [IpAddr; 2] = ["fd00::2".parse().unwrap(), "::1".parse().unwrap()];
        assert_eq!(parse_if_inet6(text).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn local_addresses_of_this_machine_are_listed() {
        assert!(addresses_of(Path::new("/proc/thread-self")).unwrap().contains(&"127.0.0.1".parse().unwrap()));
    }
}
