//! Namespaces that are mounted somewhere, as runtimes keep them alive: `/run/netns/x`, `/run/docker/netns/y`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use nix::sys::stat::makedev;

/// A namespace that a mount keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// The device of the file system of all namespaces.
    pub(crate) device: u64,
    /// Its inode, as in [`net_inode`].
    pub(crate) inode: u64,
    /// Where it is mounted, below the root of the process whose list it stands in.
    pub(crate) at: PathBuf,
}

/// The inode in the text by which the kernel names a network namespace, `net:[4026531840]`; `None` for all other texts.
pub(crate) fn net_inode(text: &[u8]) -> Option<u64> {
    let number = text.strip_prefix(b"net:[")?.strip_suffix(b"]")?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// The network namespaces in the text of a `mountinfo` file. Proc(5) has the fields: the third is the device as
/// `major:minor`, the fourth the root of the mount, which for a namespace is its name, the fifth the mount point; the file
/// system's type follows the lone `-`.
pub(crate) fn network_namespaces(mountinfo: &[u8]) -> Vec<Mounted> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(network_namespace).collect()
}

fn network_namespace(line: &[u8]) -> Option<Mounted> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let dash = fields.iter().position(|field| *field == b"-")?;
    if fields.get(dash + 1) != Some(&&b"nsfs"[..]) {
        return None;
    }
    let (major, minor) = std::str::from_utf8(fields.get(2)?).ok()?.split_once(':')?;
    let device = makedev(major.parse().ok()?, minor.parse().ok()?);
    Some(Mounted {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_found_among_other_mounts() {
        let text = b"22 1 0:21 / /proc rw,nosuid shared:5 - proc proc rw\n\
            36 24 0:4 net:[4026532281] /run/netns/blue rw shared:7 - nsfs nsfs rw\n\
            37 24 0:4 net:[4026532282] /run/a\\040b\\134c rw - nsfs nsfs rw\n\
            38 24 0:4 uts:[4026532283] /run/uts rw - nsfs nsfs rw\n\
            39 24 0:4 net:[7] /not/of/this/kind rw - tmpfs tmpfs rw\n\
            40 24 0:4 short\n";
        let found = network_namespaces(text);
        let expected = [(4_026_532_281, "/run/netns/blue"), (4_026_532_282, "/run/a b\\c")];
        assert_eq!(found, expected.map(|(inode, at)| Mounted { device: 4, inode, at: at.into() }));
    }

    #[test]
    fn only_network_namespaces_have_the_name_of_one() {
        assert_eq!(net_inode(b"net:[12]"), Some(12));
        for other in [&b"uts:[12]"[..], b"net:[x]", b"net:[12] (deleted)", b"", b"socket:[12]"] {
            assert_eq!(net_inode(other), None);
        }
    }
}
