//! Creates folders and files that survive a power loss and that only their owner can read. This module also detects
//! file systems that several machines share, on which a store must not be.
//!
//! The queue in front of a store consists of file locks. A file system that several machines share may keep locks per
//! machine, or silently lose locks when a connection breaks. Without reliable locks, two processes could have the store
//! open at the same time.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use nix::sys::stat::{major, minor};
use nix::sys::statfs::statfs;
use rustix::fs::{Access, Dir, Mode, OFlags, access, openat};

const FILE_MODE: u32 = 0o600;
pub(crate) const FOLDER_MODE: u32 = 0o700;
/// The mode of missing parent folders that are created for a store's folder.
const PARENT_MODE: u32 = 0o755;

/// Creates a store's folder and its missing parent folders. Does not change an existing store folder.
pub(crate) fn create(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = parent(path) {
        create_parents(parent)?;
    }
    create_one(path, FOLDER_MODE)
}

/// Fails if [`create`] would fail for a reason that can be seen without creating anything. The result contains the
/// error and the path that causes the error.
pub(crate) fn could_create(path: &Path) -> Result<(), (&Path, io::Error)> {
    let there = path.ancestors().find(|above| above.symlink_metadata().is_ok()).unwrap_or(path);
    if !there.is_dir() {
        return Err((there, io::ErrorKind::NotADirectory.into()));
    }
    access(there, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| (there, error.into()))
}

fn create_parents(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = parent(path) {
        create_parents(parent)?;
    }
    create_one(path, PARENT_MODE)
}

fn create_one(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        // The umask may have removed bits from the new folder's mode, so the mode is set again.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(mode))?,
        // If the folder exists now, another process has created the folder first. If a file exists at the path, the
        // function returns the error `AlreadyExists`.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        Err(error) => return Err(error),
    }
    sync(path)?;
    match parent(path) {
        Some(parent) => sync(parent),
        None => Ok(()),
    }
}

/// Returns the parent folder of a path; for a path without a slash, the current folder.
fn parent(path: &Path) -> Option<&Path> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Some(Path::new(".")),
        parent => parent,
    }
}

/// Syncs a folder, so that the names of its entries are durable.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Syncs the parent folders of `path`, so that their names are durable. Skips parent folders on other file systems, and
/// parent folders that this user may not read.
pub(crate) fn sync_above(path: &Path) -> io::Result<()> {
    let device = fs::metadata(path)?.dev();
    for above in path.ancestors().skip(1) {
        if fs::metadata(above)?.dev() != device {
            break;
        }
        match sync(above) {
            // A parent folder that this user cannot read is skipped, because another user has created it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            result => result?,
        }
    }
    Ok(())
}

pub(crate) fn open_or_create(path: &Path) -> io::Result<File> {
    let file = options().create(true).truncate(false).open(path)?;
    restrict(path, FILE_MODE)?;
    Ok(file)
}

pub(crate) fn open(path: &Path) -> io::Result<File> {
    options().open(path)
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(FILE_MODE);
    options
}

/// Writes a small file atomically: after a crash, the file has its complete old or its complete new content.
pub(crate) fn write(path: &Path, content: &str) -> io::Result<()> {
    let draft = path.with_extension("new");
    let mut file = options().create(true).truncate(true).open(&draft)?;
    file.write_all(content.as_bytes())?;
    file.sync_all()?;
    restrict(&draft, FILE_MODE)?;
    fs::rename(&draft, path)?;
    match parent(path) {
        Some(parent) => sync(parent),
        None => Ok(()),
    }
}

/// Sets the modes of `path` and of everything under it to the modes of a store's files and folders.
pub(crate) fn restrict_all(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return restrict(path, FILE_MODE);
    }
    restrict(path, FOLDER_MODE)?;
    for entry in fs::read_dir(path)? {
        match restrict_all(&entry?.path()) {
            // The engine may remove one of its files between the listing of the folder and `restrict_all`.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
    }
    Ok(())
}

/// Syncs the names and contents of `path` and of everything under it.
pub(crate) fn sync_all(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        for entry in fs::read_dir(path)? {
            sync_all(&entry?.path())?;
        }
    }
    sync(path)
}

/// Changes the mode of a path unless the path already has this mode. Only the owner of a path and root can change its
/// mode.
pub(crate) fn restrict(path: &Path, mode: u32) -> io::Result<()> {
    if fs::metadata(path)?.permissions().mode() & 0o7777 == mode {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Gives all files that root created in a store's folder to the folder's owner, who could not use the store otherwise.
///
/// While `give_to_owner` runs, the folder's owner could put anything into the folder, for example a link to a system
/// file. For safety, `give_to_owner` follows no symbolic links, and changes only folders and plain files without
/// further hard links.
pub(crate) fn give_to_owner(folder: &Path) -> io::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let folder = File::open(folder)?;
    let owner = folder.metadata()?;
    if owner.uid() == 0 { Ok(()) } else { give_all(&folder, &owner) }
}

fn give_all(folder: &File, owner: &fs::Metadata) -> io::Result<()> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // An entry that cannot be opened is a symbolic link, or a file that the engine has removed by now.
        let Ok(file) = openat(folder, name, flags, Mode::empty()) else { continue };
        let file = File::from(file);
        let found = file.metadata()?;
        if found.uid() == 0 && (found.is_dir() || found.is_file() && found.nlink() == 1) {
            fchown(&file, Some(owner.uid()), Some(owner.gid()))?;
        }
        if found.is_dir() {
            give_all(&file, owner)?;
        }
    }
    Ok(())
}

/// Removes a file, or a folder with its content. Succeeds if nothing exists at the path.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let result = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// File systems that several machines can share, each with the kernel's number for its type (`f_type` in statfs(2)).
const SHARED_KINDS: [(u32, &str); 19] = [
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

/// The number by which the kernel identifies all FUSE file systems. Only the type name of a FUSE file system shows
/// whether several machines can share it.
const FUSE_KIND: u32 = 0x6573_5546;

/// The type names of FUSE file systems that several machines can share. Other FUSE file systems, such as fuse-overlayfs
/// and virtiofs, count as local.
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

/// Returns the name of the file system at `path` if several machines can share it; `None` for a local file system and
/// for one of unknown type.
///
/// # Errors
/// `NotFound` if no file or folder exists at `path`.
pub(crate) fn shared_file_system(path: &Path) -> io::Result<Option<String>> {
    let kind = match statfs(path) {
        Ok(status) => status.filesystem_type().0,
        Err(nix::errno::Errno::ENOENT) => return Err(io::ErrorKind::NotFound.into()),
        Err(_) => return Ok(None),
    };
    #[allow(clippy::cast_possible_truncation, reason = "the numbers have 32 bits, the type is each platform's own")]
    let kind = kind as u32;
    Ok(if kind == FUSE_KIND { shared_fuse(path) } else { shared_kind(kind).map(str::to_owned) })
}

fn shared_kind(kind: u32) -> Option<&'static str> {
    SHARED_KINDS.iter().find(|(shared, _)| *shared == kind).map(|(_, name)| *name)
}

fn shared_fuse(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.dev();
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    fuse_type(&mounts, &format!("{}:{}", major(device), minor(device))).filter(|name| is_shared_fuse(name))
}

/// Returns the type of the file system on a device, parsed from mountinfo lines such as `36 35 0:42 / /mnt rw,noatime
/// master:1 - fuse.sshfs host:/folder rw`.
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

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn folder_of_store_is_private_but_not_its_parents() {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("a/b/store");
        create(&store).unwrap();
        create(&store).unwrap();
        assert_eq!(mode(&store), 0o700);
        assert_eq!(mode(&root.path().join("a")), 0o755);
        assert_eq!(mode(&root.path().join("a/b")), 0o755);
    }

    #[test]
    fn folder_parents_are_synced_up_to_file_system() {
        let root = tempfile::tempdir().unwrap();
        sync_above(root.path()).unwrap();
        sync_above(Path::new("/proc")).unwrap();
        assert_eq!(sync_above(&root.path().join("missing")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn folder_keeps_its_mode_when_it_exists() {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("store");
        fs::create_dir(&store).unwrap();
        fs::set_permissions(&store, Permissions::from_mode(0o750)).unwrap();
        create(&store).unwrap();
        assert_eq!(mode(&store), 0o750);
    }

    #[test]
    fn folder_is_error_when_file_is_in_its_way() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("file"), "x").unwrap();
        assert!(create(&root.path().join("file")).is_err());
        assert!(create(&root.path().join("file/store")).is_err());
    }

    #[test]
    fn file_replacement_leaves_no_draft() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("store.id");
        write(&path, "one").unwrap();
        write(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn folder_restriction_reaches_everything() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sled");
        fs::create_dir_all(folder.join("blobs")).unwrap();
        fs::write(folder.join("db"), "x").unwrap();
        fs::set_permissions(folder.join("db"), Permissions::from_mode(0o666)).unwrap();
        restrict_all(&folder).unwrap();
        assert_eq!((mode(&folder), mode(&folder.join("blobs")), mode(&folder.join("db"))), (0o700, 0o700, 0o600));
        sync_all(&folder).unwrap();
        remove(&folder).unwrap();
        remove(&folder).unwrap();
        assert!(!folder.exists());
    }

    #[test]
    fn file_systems_shared_by_machines_are_known_by_number() {
        let rows = [
            (0x6969, Some("NFS")),
            (0x0102_1997, Some("9p")),
            (0xff53_4d42, Some("CIFS")),
            (0xfe53_4d42, Some("SMB")),
            (0x00c3_6400, Some("Ceph")),
            (0x0bd0_0bd0, Some("Lustre")),
            // The `f_type` values from here on belong to local file systems: ext4, xfs, btrfs, tmpfs, overlay, f2fs and
            // zfs.
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
    fn file_systems_in_user_space_are_known_by_name() {
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
    fn file_system_here_is_local_and_missing_path_is_told() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(shared_file_system(folder.path()).unwrap(), None);
        assert_eq!(shared_file_system(Path::new("/proc")).unwrap(), None);
        let missing = shared_file_system(&folder.path().join("x")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
