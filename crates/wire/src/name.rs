//! Derives the name of a daemon's socket from the location of the daemon's store.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// The folder of the daemons' sockets.
pub const SOCKET_FOLDER: &str = "/run/margay/serve";
/// Maximum length of a socket's name in bytes. A hash replaces a name that exceeds this maximum, because the whole path
/// of a socket has at most 107 bytes.
const MAX_NAME_BYTES: usize = 60;

/// Returns the path of the socket with this name.
pub fn socket(name: &str) -> PathBuf {
    Path::new(SOCKET_FOLDER).join(format!("{name}.sock"))
}

/// Returns the socket's name for an embedded store in this folder, in the spelling of `systemd-escape --path`. The
/// folder must be an absolute path without symbolic links.
pub fn of_folder(folder: &Path) -> String {
    let name = escaped(folder);
    if name.len() <= MAX_NAME_BYTES { name } else { hashed("store", folder.as_os_str()) }
}

/// Returns the socket's name for a cluster with this login: see
/// [`StoreIdentity::Cluster`](crate::StoreIdentity::Cluster).
pub fn of_cluster(access: &str) -> String {
    hashed("etcd", OsStr::new(access))
}

/// Spells a path like the unit names of systemd (systemd.unit(5), "String Escaping for Inclusion in Unit Names").
fn escaped(path: &Path) -> String {
    let mut name = String::new();
    for component in path.components() {
        let Component::Normal(component) = component else { continue };
        if !name.is_empty() {
            name.push('-');
        }
        for byte in component.as_bytes() {
            match byte {
                b'.' if name.is_empty() => name.push_str("\\x2e"),
                b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b':' | b'_' | b'.' => name.push(char::from(*byte)),
                _ => _ = write!(name, "\\x{byte:02x}"),
            }
        }
    }
    if name.is_empty() { "-".to_owned() } else { name }
}

/// Returns a socket's name that consists of a kind and the 16 hexadecimal digits of a 64-bit FNV-1a hash. If the
/// sockets of two stores get the same name, the daemon's greeting distinguishes the stores.
fn hashed(kind: &str, text: &OsStr) -> String {
    let hash = text
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{kind}-{hash:016x}")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn names_match_systemd() {
        for (path, name) in [
            ("/var/lib/margay/ipam.sled", "var-lib-margay-ipam.sled"),
            ("/srv//my stores/a-b/", "srv-my\\x20stores-a\\x2db"),
            ("/.hidden/.x", "\\x2ehidden-.x"),
            ("/", "-"),
            ("/ä", "\\xc3\\xa4"),
        ] {
            assert_eq!(of_folder(Path::new(path)), name, "{path}");
            // The test compares the socket's name with the output of `systemd-escape`, if this program is installed.
            if let Ok(said) = Command::new("systemd-escape").args(["--path", path]).output() {
                assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), name, "{path}");
            }
        }
    }

    #[test]
    fn names_are_hashed_when_long() {
        let long = |last: &str| of_folder(&Path::new("/").join("x".repeat(70)).join(last));
        assert_eq!((long("a").len(), long("a") == long("b")), (22, false));
        assert!(socket(&long("a")).as_os_str().len() <= 107);
        assert_eq!(of_folder(&Path::new("/").join("x".repeat(60))).len(), 60);
    }

    #[test]
    fn names_differ_for_each_way_into_cluster() {
        let names = [of_cluster("a b"), of_cluster("a b "), of_cluster("b a")];
        for (place, name) in names.iter().enumerate() {
            assert!(!names[..place].contains(name) && name.starts_with("etcd-"), "{names:?}");
        }
    }
}
