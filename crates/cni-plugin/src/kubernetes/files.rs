//! Files with the credentials of the plugin and of the servers that it trusts.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use agent::CniError;
use nix::libc::O_NONBLOCK;
use nix::unistd::geteuid;

use super::problem::Problem;

/// Far more than any of these files has, in bytes.
const MAX_BYTES: u64 = 1 << 20;
const KUBERNETES: &str =
    "with this file the plugin logs in to the Kubernetes API, or knows that API: only its owner may write to it";
const ETCD: &str = "with this file the plugin logs in to etcd, or knows that etcd: only its owner may write to it";
/// The bits of a mode with which others than the owner may write.
const WRITABLE: u32 = 0o022;

/// The content of such a file. A file that others may write to is refused: they could have the plugin run as somebody else, or
/// have it trust their server.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    let shown = path.display();
    let unreadable = |error: io::Error| {
        Problem::new(format!("cannot read {shown}: {error}"), "check kubernetes.kubeconfig, and that the file is there")
    };
    // A pipe would be waited for.
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path).map_err(unreadable)?;
    check(path, &file, KUBERNETES).map_err(unreadable)??;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Problem::new(
            format!("{shown} has more than {MAX_BYTES} bytes"),
            "check that it is the right file",
        ));
    }
    Ok(bytes)
}

/// The same check of a file with etcd's key or certificates, which others read. A file that cannot be opened is theirs to report.
pub(crate) fn check_owner(path: &Path) -> agent::Result<()> {
    let opened = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path);
    match opened.and_then(|file| check(path, &file, ETCD)) {
        Ok(Err(Problem { code, what, advice })) => Err(CniError::new(code, what).with_details(advice)),
        Ok(Ok(())) | Err(_) => Ok(()),
    }
}

fn check(path: &Path, file: &File, why: &str) -> io::Result<Result<(), Problem>> {
    let about = file.metadata()?;
    let (shown, owner) = (path.display(), about.uid());
    if !about.is_file() {
        return Err(io::Error::other("this is no file"));
    }
    let remedy = format!("chown root {shown} && chmod go-w {shown}");
    Ok(if about.mode() & WRITABLE != 0 {
        Err(Problem::new(format!("others than its owner may write to {shown}; run: chmod go-w {shown}"), why))
    } else if owner != 0 && owner != geteuid().as_raw() {
        Err(Problem::new(format!("{shown} belongs to the user {owner}; run: {remedy}"), why))
    } else {
        Ok(())
    })
}
