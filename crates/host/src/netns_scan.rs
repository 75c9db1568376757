//! Which network namespaces this machine has, and which addresses the interfaces in them hold.
//!
//! A namespace lives as long as a thread is in it, or a file or a mount leads to it. So all threads of all processes, the
//! open files of all processes, and the mounts in every mount namespace are gone through. Each namespace is entered by a
//! thread that ends afterwards, and the kernel is asked for its addresses. Where a process is shielded from everybody, the
//! lists that the kernel shows to everybody take the place of that.
//!
//! The result is evidence against the holder of an address in a store, so it must be complete. A namespace that goes
//! while it is looked for is fine: what was in it is gone too. One that is there and may not be entered makes the whole
//! look worthless, and that is what is said.
//!
//! In a container with processes of its own (LXC, kind, WSL) the look is whole for the namespaces that were made in there,
//! and says nothing of others: [`NetnsScan::within`] tells.
//!
//! # The name of a network namespace
//!
//! The name that is recorded with an address is `DEVICE:INODE` of the file by which the kernel shows the namespace, for example
//! `4:4026532201`. Where the process that records it runs in a process id namespace of its own, a slash and the inode of that
//! one follow: `4:4026532201/4026532300`. Only a process that sees all processes of that one can tell whether the network
//! namespace is still there.
//!
//! The kernel uses an inode again after a namespace has gone. A name that leads to another namespace by now looks alive,
//! which keeps an address for too long and never frees it too early. After a reboot a name means nothing.

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

/// The inode of the first user namespace of a kernel. Only there do capabilities reach everything.
const FIRST_USER_NAMESPACE: &str = "user:[4026531837]";
/// CAP_SYS_ADMIN, to enter namespaces, and CAP_SYS_PTRACE, to see those of other users' processes.
const NEEDED_CAPABILITIES: [(u32, &str); 2] = [(21, "CAP_SYS_ADMIN"), (19, "CAP_SYS_PTRACE")];

/// A process that is started by one that was seen already has a higher number, and a listing is in order; only when the
/// numbers begin anew can a namespace pass from hand to hand unseen. So a second round is made, and more while new ones turn up.
const MIN_ROUNDS: usize = 2;
/// A machine that starts many containers has new namespaces in most rounds. So long a scan waits for a round without any.
const SCAN_TIMEOUT: Duration = Duration::from_secs(3);
/// The number of reasons in a report.
const MAX_REASONS: usize = 3;

/// Not everything could be looked at, so nothing can be said of any address.
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

/// The findings of a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetnsScan {
    /// The addresses that interfaces hold.
    pub addresses: BTreeSet<IpAddr>,
    /// The names of all network namespaces, as [`network_namespace`] gives them, without what
    /// may follow a slash. `None` if one of them has no name for this process: a security module shields all processes
    /// that are in it.
    pub namespaces: Option<BTreeSet<String>>,
    /// The process id namespace in which the look was made, unless that is the machine's first. Nothing outside was seen.
    pub within: Option<String>,
}

/// Looks at every network namespace. Blocks the thread, for some milliseconds on a usual machine, and for three seconds
/// at most where new namespaces keep turning up.
///
/// # Errors
/// [`IncompleteScan`] if anything could not be looked at.
pub fn scan() -> Result<NetnsScan, IncompleteScan> {
    let within = check_visibility()?;
    // The thread goes from namespace to namespace and never comes back.
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

/// Whether this process can see everything that there is in its process id namespace, and which one that is, unless it is
/// the machine's first.
///
/// A container with processes of its own may have users of its own too: all that is in there belongs to them, or else it
/// cannot be entered, which the search says.
fn check_visibility() -> Result<Option<String>, IncompleteScan> {
    let within = match process_view() {
        None => {
            return Err(IncompleteScan::new(
                "this process has no /proc of its own; mount one, or run it on the machine itself",
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

/// The addresses found so far.
#[derive(Debug, Default)]
struct NetnsSearch {
    /// Namespaces that were looked at, by inode: all of them are on one file system of the kernel's.
    seen: BTreeSet<u64>,
    names: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
    /// The lists of the namespaces that were entered, and of those that threads are in which may not be touched. Each
    /// namespace has a list of its own, so these tell whether a thread's namespace is one that was entered.
    entered: BTreeSet<u64>,
    shielded: BTreeSet<u64>,
    /// The obstacle, with the namespace where it is known: another way may lead there.
    obstacles: Vec<(Option<u64>, String)>,
}

impl NetnsSearch {
    /// Goes through everything once.
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

    /// The namespaces of a process: those of its threads, those that it has open, and those that are mounted where it is.
    fn visit_process(&mut self, process: &Path, mount_namespaces: &mut BTreeSet<PathBuf>) {
        for thread in self.list_paths(&process.join("task")) {
            self.visit_thread(&thread);
            match fs::read_link(thread.join("ns/mnt")) {
                Ok(namespace) => {
                    if !mount_namespaces.contains(&namespace) && self.visit_mounts(&thread) {
                        mount_namespaces.insert(namespace);
                    }
                }
                // The list of mounts may be there for everybody all the same.
                Err(_) => {
                    self.visit_mounts(&thread);
                }
            }
        }
        // That nobody is in a namespace and only a file leads there is rare enough that a process whose files are shielded
        // is not held against the look.
        for file in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            if let Some(inode) = network_link(&file.path()).ok().flatten() {
                self.visit_namespace(inode, &file.path());
            }
        }
    }

    /// The namespace that a thread is in.
    fn visit_thread(&mut self, thread: &Path) {
        let link = thread.join("ns/net");
        match network_link(&link) {
            Ok(Some(inode)) => self.visit_namespace(inode, &link),
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => self.visit_shielded_thread(thread),
            Err(error) => self.add_obstacle(None, &link, &error),
        }
    }

    /// The namespace of a thread that may not be touched.
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

    /// The paths in a folder of a process.
    fn list_paths(&mut self, folder: &Path) -> Vec<PathBuf> {
        let listed = fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
        listed.unwrap_or_else(|error| {
            self.add_obstacle(None, folder, &error);
            Vec::new()
        })
    }

    /// The namespaces in the mount namespace of a thread. False if the thread was gone before they were read.
    fn visit_mounts(&mut self, thread: &Path) -> bool {
        let list = thread.join("mountinfo");
        match fs::read(&list) {
            Ok(text) => {
                for mounted in network_namespaces(&text) {
                    // It is there also if something else is mounted above it, so that no path leads to it.
                    self.names.insert(namespace_name(mounted.device, mounted.inode));
                    let below_root = mounted.at.strip_prefix("/").unwrap_or(&mounted.at);
                    self.visit_namespace(mounted.inode, &thread.join("root").join(below_root));
                }
                true
            }
            // So says the kernel of a process that has ended and that nobody has waited for.
            Err(error) if error.kind() == ErrorKind::InvalidInput => false,
            Err(error) => {
                self.add_obstacle(None, &list, &error);
                false
            }
        }
    }

    /// Enters a namespace that was not seen yet, and notes its addresses.
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

    /// Notes what stood in the way. A process that has gone meanwhile does not.
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

/// The inode of the network namespace that a link of the kernel's leads to; `None` if it leads elsewhere.
fn network_link(link: &Path) -> io::Result<Option<u64>> {
    Ok(net_inode(fs::read_link(link)?.as_os_str().as_bytes()))
}

/// A namespace that was entered.
#[derive(Debug)]
struct EnteredNetns {
    name: String,
    listing: u64,
    addresses: BTreeSet<IpAddr>,
}

/// Enters the namespace that a path leads to, and asks for its addresses.
fn enter_namespace(inode: u64, path: &Path) -> io::Result<EnteredNetns> {
    let namespace = open(path)?;
    let about = namespace.metadata()?;
    if about.ino() != inode {
        // Something else is in its place by now, or has been mounted over it.
        return Err(io::Error::other("another file is in the way"));
    }
    setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?;
    let addresses = getifaddrs()?.filter_map(|interface| ip_of(&interface.address?));
    let listing = listing_inode(Path::new("/proc/thread-self"))?;
    Ok(EnteredNetns { name: namespace_name(about.dev(), inode), listing, addresses: addresses.collect() })
}

/// Opens what should be a namespace. It may have become a pipe, whose other end nobody has opened.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags((OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).bits()).open(path)
}

/// The inode of the first process id namespace of a kernel. Only in there are all processes to be seen.
const FIRST_PID_NAMESPACE: u64 = 4_026_531_836;

/// The name of a namespace by what its file has.
fn namespace_name(device: u64, inode: u64) -> String {
    format!("{device}:{inode}")
}

/// The name of the network namespace that a path leads to, as this process records it; `None` for a path that leads to no
/// namespace. The path is not opened, since it may be anything, a pipe for one.
pub fn network_namespace(path: &Path) -> Option<String> {
    let kind = statfs(path).ok()?.filesystem_type();
    let about = fs::metadata(path).ok().filter(|_| kind == NSFS_MAGIC)?;
    let name = namespace_name(about.dev(), about.ino());
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
enum ProcessView {
    /// It sees every process of the machine.
    Machine,
    /// It sees the processes of this process id namespace, which is not the machine's first.
    Container(String),
}

/// How far this process sees; `None` if it has no /proc of its own.
fn process_view() -> Option<ProcessView> {
    Some(match pid_namespace()? {
        FIRST_PID_NAMESPACE => ProcessView::Machine,
        own => ProcessView::Container(own.to_string()),
    })
}

/// A namespace that a mount keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NetnsMount {
    /// The device of the file system of all namespaces.
    device: u64,
    /// Its inode, as in [`net_inode`].
    inode: u64,
    /// Where it is mounted, below the root of the process whose list it stands in.
    at: PathBuf,
}

/// The inode in the text by which the kernel names a network namespace, `net:[4026531840]`; `None` for all other texts.
fn net_inode(text: &[u8]) -> Option<u64> {
    let number = text.strip_prefix(b"net:[")?.strip_suffix(b"]")?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// The network namespaces in the text of a `mountinfo` file. Proc(5) has the fields: the third is the device as
/// `major:minor`, the fourth the root of the mount, which for a namespace is its name, the fifth the mount point; the file
/// system's type follows the lone `-`.
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

/// Takes back the escapes of blanks, tabs, line ends and backslashes: a backslash and three octal digits.
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

/// The addresses in the network namespace of a thread, by its folder in /proc.
fn addresses_of(thread: &Path) -> io::Result<BTreeSet<IpAddr>> {
    let read = |name: &str| fs::read_to_string(thread.join("net").join(name));
    let mut addresses: BTreeSet<IpAddr> = parse_fib_trie(&read("fib_trie")?).collect();
    match read("if_inet6") {
        Ok(text) => addresses.extend(parse_if_inet6(&text)),
        // A kernel without IPv6; a thread that has gone had no IPv4 either.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(addresses)
}

/// The mark that tells the lists of one network namespace from those of all others at the same time: the inode of
/// one of its lists. Everybody may ask for it.
fn listing_inode(thread: &Path) -> io::Result<u64> {
    fs::metadata(thread.join("net/dev")).map(|about| about.ino())
}

/// The local addresses in `fib_trie`: a line that ends with the address, and after it one with `/32 host LOCAL`.
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

/// `if_inet6`: a line for each address, which comes first, in 32 digits.
fn parse_if_inet6(text: &str) -> impl Iterator<Item = IpAddr> {
    text.lines().filter_map(|line| {
        let digits = line.split_whitespace().next().filter(|digits| digits.len() == 32)?;
        u128::from_str_radix(digits, 16).ok().map(|bits| IpAddr::V6(Ipv6Addr::from(bits)))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    /// Whether a process of a namespace that was entered is shielded makes no difference. One of another namespace does.
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
