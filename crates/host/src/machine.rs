//! Reads the machine's boot id, the node's name, and clocks that are independent of the system time.

use std::fs::{self, File};
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::SockaddrStorage;
use nix::time::{ClockId, clock_gettime};

/// Calico's file that contains the node's name, which Margay also reads by default.
pub const NODENAME_FILE: &str = "/var/lib/calico/nodename";

/// The files that Felix and BIRD create on a machine on which Calico's node agent runs: the MTU of the network, BIRD's
/// control sockets, the states of endpoints, and the control group for eBPF. The first file survives a reboot.
const FELIX_FILES: [&str; 5] = [
    "/var/lib/calico/mtu",
    "/var/run/calico/bird.ctl",
    "/var/run/calico/bird6.ctl",
    "/var/run/calico/endpoint-status",
    "/var/run/calico/cgroup",
];

/// Number of characters of the boot id that are stored with each address.
const SHORT_BOOT_CHARS: usize = 8;
/// Maximum size in bytes of a file that contains a node's name.
const MAX_NAME_FILE_BYTES: u64 = 4096;

/// The IP address in a socket address; `None` for address families other than IPv4 and IPv6.
pub(crate) fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
}

/// The kernel's id of this boot; `None` if the id cannot be read.
pub fn boot_id() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned())
}

/// The first 8 characters of a boot id, which are stored with each address; `None` if the id is shorter. For why 8
/// characters of the boot id are enough, see the attribute `margay.io/boot` in `ipam-core`.
pub fn short_boot(id: &str) -> Option<String> {
    let short: String = id.trim().chars().take(SHORT_BOOT_CHARS).collect();
    (short.chars().count() == SHORT_BOOT_CHARS).then_some(short)
}

/// The kernel's host name; empty if the machine has no host name.
pub fn hostname() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The time since boot, including any time in which the machine was suspended.
pub fn uptime() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_BOOTTIME).ok().map(Duration::from)
}

/// The time since boot, without any time in which the machine was suspended, and independent of changes to the system
/// clock.
pub fn running() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_MONOTONIC).ok().map(Duration::from)
}

/// The sources from which a node's name can come, as in Calico. A source whose node name is empty is skipped.
#[derive(Clone, Copy, Debug)]
pub struct NodeNames<'a> {
    /// The node name in the configuration.
    pub given: &'a str,
    /// The path of a file that contains the node name.
    pub file: &'a Path,
    /// The node name from a field that old configurations use.
    pub former: &'a str,
    /// The machine's host name.
    pub hostname: &'a str,
}

impl NodeNames<'_> {
    /// Returns the first node name that is not empty. The node's name comes from the first of these sources: the
    /// configured name, the node name file, the `hostname` field of old configurations, the host name in lower case.
    /// Returns an empty string if none of the sources has a node name.
    ///
    /// White space around a node name is removed: a file that was written by hand ends with a newline, and no node name
    /// contains white space. Zero bytes around a node name are also removed, because a power cut can leave zero bytes
    /// in a file.
    pub fn choose(&self) -> String {
        let sources: [&dyn Fn() -> String; 4] = [
            &|| self.given.to_owned(),
            &|| read_name(self.file).unwrap_or_default(),
            &|| self.former.to_owned(),
            &|| self.hostname.to_lowercase(),
        ];
        let is_around = |c: char| c.is_whitespace() || c == '\0';
        let names = sources.into_iter().map(|name| name().trim_matches(is_around).to_owned());
        names.into_iter().find(|name| !name.is_empty()).unwrap_or_default()
    }
}

/// Returns this machine's node name, which is `given`, or the result of [`NodeNames::choose`] if `given` is empty.
pub fn node_name(given: &str) -> String {
    NodeNames { given, file: Path::new(NODENAME_FILE), former: "", hostname: &hostname() }.choose()
}

/// Returns a file that shows that Calico's agent Felix runs on this machine; `None` if there is no such file.
///
/// The node name file alone shows nothing, because `margay node register` writes it, too. Without the node name file,
/// Calico's node agent has never started, so a file that a person has written, such as the MTU file, does not count.
pub fn felix_file() -> Option<PathBuf> {
    felix_file_in(Path::new("/"))
}

fn felix_file_in(root: &Path) -> Option<PathBuf> {
    let is_there = |path: &&str| root.join(path.trim_start_matches('/')).exists();
    is_there(&NODENAME_FILE).then(|| FELIX_FILES.into_iter().find(is_there).map(PathBuf::from)).flatten()
}

/// Reads a file that should contain a node's name. A file longer than [`MAX_NAME_FILE_BYTES`] counts as empty, because
/// the configuration could name a file without an end, such as a device.
fn read_name(file: &Path) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    let read = File::open(file)?.take(MAX_NAME_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    let fits = u64::try_from(read).is_ok_and(|read| read <= MAX_NAME_FILE_BYTES);
    let text = String::from_utf8_lossy(&bytes);
    // Some editors write a byte order mark at the start of a text file.
    Ok(if fits { text.trim_start_matches('\u{feff}').to_owned() } else { String::new() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn boot_id_has_eight_characters_or_none() {
        assert_eq!(short_boot("191b29e2-6a5a-43ab-90d5-e4a2f05417e4\n").as_deref(), Some("191b29e2"));
        assert_eq!(short_boot("short"), None);
        assert_eq!(short_boot(""), None);
        assert!(short_boot(&boot_id().unwrap()).is_some(), "this machine has a boot id");
    }

    #[test]
    fn uptime_is_at_least_as_long_as_boot_ran() {
        let ran = running().unwrap();
        assert!(ran > Duration::ZERO && uptime().unwrap() >= ran);
    }

    #[test]
    fn felix_is_recognized_by_its_own_files() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        write("var/lib/calico/mtu");
        assert_eq!(felix_file_in(root.path()), None, "the MTU file alone may be a person's");
        write("var/lib/calico/nodename");
        assert_eq!(felix_file_in(root.path()), Some("/var/lib/calico/mtu".into()));
        fs::remove_file(root.path().join("var/lib/calico/mtu")).unwrap();
        // The plugins themselves create the lock file.
        write("var/run/calico/ipam.lock");
        assert_eq!(felix_file_in(root.path()), None);
        write("var/run/calico/bird.ctl");
        assert_eq!(felix_file_in(root.path()), Some("/var/run/calico/bird.ctl".into()));
    }

    #[test]
    fn node_names_are_looked_for_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let (full, blank, endless) =
            (write("full", b"\xef\xbb\xbf node7\n"), write("blank", b" \n"), write("e", &[b'a'; 1 << 20]));
        let name = |given, file: &Path, former| NodeNames { given, file, former, hostname: "Host-1 " }.choose();
        assert_eq!(name("n1", &full, "Old"), "n1");
        assert_eq!(name("", &full, "Old"), "node7");
        assert_eq!(name(" ", &blank, "Old"), "Old");
        assert_eq!(name("", &write("marked", b"\xef\xbb\xbfnode7\n"), ""), "node7");
        assert_eq!(name("", &write("zeros", &[0; 9]), "Old"), "Old");
        assert_eq!(name("", folder.path(), ""), "host-1");
        assert_eq!(name("", Path::new("/no/such/file"), ""), "host-1");
        assert_eq!(name("", &endless, ""), "host-1", "a file of 1 MiB was read as a name");
    }
}
