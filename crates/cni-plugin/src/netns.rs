//! Whether a network namespace is the plugin's own.

use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use agent::{CniError, Code};

/// The namespace that this thread is in.
pub(crate) const OWN: &str = "/proc/thread-self/ns/net";

/// True if `path` leads to the namespace that `own` leads to. A path that leads nowhere is nobody's namespace: runtimes
/// keep it after the namespace is gone.
///
/// The path is not opened, since it may be anything, a pipe for one.
pub(crate) fn is_own(path: &Path, own: &Path) -> bool {
    let Ok(theirs) = fs::metadata(path) else { return false };
    fs::metadata(own).is_ok_and(|ours| (theirs.st_dev(), theirs.st_ino()) == (ours.st_dev(), ours.st_ino()))
}

/// The error for a container that is to live in the plugin's own namespace.
pub(crate) fn own_netns_error() -> CniError {
    CniError::new(Code::InvalidNetns, "plugin's netns and netns from CNI_NETNS should not be the same")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_own_one_is_the_own_one() {
        let own = Path::new(OWN);
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(OWN, &link).unwrap();
        assert!(is_own(Path::new("/proc/self/ns/net"), own));
        assert!(is_own(&link, own));
        for other in ["/proc/self/ns/uts", "/no/such/file", "/", "a\0b", ""] {
            assert!(!is_own(Path::new(other), own), "{other:?}");
        }
    }
}
