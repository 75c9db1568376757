//! On which file systems a store can be: on those of this machine.
//!
//! The queue in front of a store is made of file locks. File systems that several machines share keep such locks for each
//! machine, or lose them with a connection, and some do so without a word. Two processes would then have the store at once.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::stat::{major, minor};
use nix::sys::statfs::statfs;

/// File systems that machines share, by the number that the kernel gives each kind (`f_type` in statfs(2)).
const SHARED: [(u32, &str); 19] = [
    (0x6969, "NFS"),
    (0x0102_1997, "9p"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x517b, "SMB"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x564c, "NCP"),
    (0x7461_636f, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x2003_0528, "OrangeFS"),
    (0x1983_0326, "BeeGFS"),
    (0x786f_4256, "a shared folder of VirtualBox"),
    (0x7c7c_6673, "a shared folder of Parallels"),
    (0xbacb_acbc, "a shared folder of VMware"),
];

/// Programs in user space make file systems of this kind, local ones and others; only their names tell.
const FUSE: u32 = 0x6573_5546;

/// Those of them that machines share. Others, such as fuse-overlayfs and virtiofs, are taken for local.
const SHARED_FUSE: [&str; 16] = [
    "sshfs",
    "glusterfs",
    "ceph",
    "ceph-fuse",
    "s3fs",
    "goofys",
    "rclone",
    "gcsfuse",
    "blobfuse",
    "blobfuse2",
    "juicefs",
    "seaweedfs",
    "mfs",
    "curlftpfs",
    "davfs",
    "smbnetfs",
];

/// The name of the file system that `path` is on, if machines share it; `None` also if the kind is unknown.
///
/// # Errors
/// `NotFound` if there is nothing at `path`.
pub(crate) fn shared(path: &Path) -> io::Result<Option<String>> {
    let kind = match statfs(path) {
        Ok(status) => status.filesystem_type().0,
        Err(nix::errno::Errno::ENOENT) => return Err(io::ErrorKind::NotFound.into()),
        Err(_) => return Ok(None),
    };
    #[allow(clippy::cast_possible_truncation, reason = "the numbers have 32 bits, the type is each platform's own")]
    let kind = kind as u32;
    Ok(if kind == FUSE { shared_fuse(path) } else { shared_kind(kind).map(str::to_owned) })
}

fn shared_kind(kind: u32) -> Option<&'static str> {
    SHARED.iter().find(|(shared, _)| *shared == kind).map(|(_, name)| *name)
}

fn shared_fuse(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.dev();
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    fuse_type(&mounts, &format!("{}:{}", major(device), minor(device))).filter(|name| is_shared_fuse(name))
}

/// The type of the file system on a device, from lines such as
/// `36 35 0:42 / /mnt rw,noatime master:1 - fuse.sshfs host:/folder rw`.
fn fuse_type(mounts: &str, device: &str) -> Option<String> {
    mounts.lines().find_map(|line| {
        let (place, what) = line.split_once(" - ")?;
        (place.split(' ').nth(2)? == device).then(|| what.split(' ').next().map(str::to_owned))?
    })
}

fn is_shared_fuse(name: &str) -> bool {
    name.strip_prefix("fuse.").is_some_and(|name| SHARED_FUSE.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_of_several_machines_are_told_by_their_number() {
        let rows = [
            (0x6969, Some("NFS")),
            (0x0102_1997, Some("9p")),
            (0xff53_4d42, Some("CIFS")),
            (0xfe53_4d42, Some("SMB")),
            (0x00c3_6400, Some("Ceph")),
            (0x0bd0_0bd0, Some("Lustre")),
            // ext4, xfs, btrfs, tmpfs, overlay, f2fs, zfs.
            (0xef53, None),
            (0x5846_5342, None),
            (0x9123_683e, None),
            (0x0102_1994, None),
            (0x794c_7630, None),
            (0xf2f5_2010, None),
            (0x2fc1_2fc1, None),
        ];
        for (kind, name) in rows {
            assert_eq!(shared_kind(kind), name, "{kind:#x}");
        }
    }

    #[test]
    fn file_systems_in_user_space_are_told_by_their_name() {
        let mounts = "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
                      36 25 0:42 / /mnt/a\\040b rw master:1 - fuse.sshfs host:/folder rw,user_id=0\n\
                      37 25 0:43 / /home rw - virtiofs home rw\n38 25 0:44 / /var rw - fuse.fuse-overlayfs x rw\n";
        let rows = [
            ("8:1", Some("ext4"), false),
            ("0:42", Some("fuse.sshfs"), true),
            ("0:43", Some("virtiofs"), false),
            ("0:44", Some("fuse.fuse-overlayfs"), false),
            ("0:45", None, false),
        ];
        for (device, name, shared) in rows {
            let found = fuse_type(mounts, device);
            assert_eq!(found.as_deref(), name, "{device}");
            assert_eq!(found.is_some_and(|name| is_shared_fuse(&name)), shared, "{device}");
        }
    }

    #[test]
    fn what_is_here_is_local_and_what_is_missing_is_said_to_be() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(shared(folder.path()).unwrap(), None);
        assert_eq!(shared(Path::new("/proc")).unwrap(), None);
        let missing = shared(&folder.path().join("x")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
