//! Folders and files that are there after a power loss, and that only their owner can read.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use rustix::fs::{Access, Dir, Mode, OFlags, access, openat};

/// Of a store's files.
pub(crate) const FILE_MODE: u32 = 0o600;
/// Of a store's folders.
pub(crate) const FOLDER_MODE: u32 = 0o700;
/// Of the folders above it that had to be made.
const PARENT_MODE: u32 = 0o755;

/// Makes a store's folder and what is missing above it. A folder that is there stays as it is.
pub(crate) fn create(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = parent(path) {
        create_parents(parent)?;
    }
    create_one(path, FOLDER_MODE)
}

/// Fails where [`create`] would, as far as is known without making anything; with the path that is in the way.
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
        // Also if the umask removed rights.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(mode))?,
        // Somebody else was quicker; but a file is no folder.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        Err(error) => return Err(error),
    }
    sync(path)?;
    match parent(path) {
        Some(parent) => sync(parent),
        None => Ok(()),
    }
}

/// The folder that a path is in; the current one for a bare name.
fn parent(path: &Path) -> Option<&Path> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Some(Path::new(".")),
        parent => parent,
    }
}

/// Makes a folder's list of names durable.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Makes the names of a folder, and of those above it on its file system, durable, as far as one may.
pub(crate) fn sync_above(path: &Path) -> io::Result<()> {
    let device = fs::metadata(path)?.dev();
    for above in path.ancestors().skip(1) {
        if fs::metadata(above)?.dev() != device {
            break;
        }
        match sync(above) {
            // A folder that this user may not even read was made by somebody else.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            result => result?,
        }
    }
    Ok(())
}

/// Opens a file for reading and writing, and makes it if it is not there.
pub(crate) fn open_or_create(path: &Path) -> io::Result<File> {
    let file = options().create(true).truncate(false).open(path)?;
    restrict(path, FILE_MODE)?;
    Ok(file)
}

/// Opens a file that is there for reading and writing.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    options().open(path)
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(FILE_MODE);
    options
}

/// Writes a small file so that after a crash it is there in full or not at all.
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

/// Gives everything in and below `path` the mode of a store's files and folders.
pub(crate) fn restrict_all(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return restrict(path, FILE_MODE);
    }
    restrict(path, FOLDER_MODE)?;
    for entry in fs::read_dir(path)? {
        match restrict_all(&entry?.path()) {
            // An engine may clear away a file of its own meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
    }
    Ok(())
}

/// Makes the names and contents of everything in and below `path` durable.
pub(crate) fn sync_all(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        for entry in fs::read_dir(path)? {
            sync_all(&entry?.path())?;
        }
    }
    sync(path)
}

/// Sets a mode if it is another one. Only its owner and root can.
pub(crate) fn restrict(path: &Path, mode: u32) -> io::Result<()> {
    if fs::metadata(path)?.permissions().mode() & 0o7777 == mode {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Gives what root has made in a store's folder to the owner of the folder, who could not use the store otherwise.
///
/// The owner may put anything into the folder meanwhile. So only plain files without another name are given away, and no link
/// is followed.
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
        // A link, or a file that an engine has cleared away.
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

/// Removes a file or a folder with all that is in it, if it is there.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn the_store_is_private_and_its_parents_are_not() {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("a/b/store");
        create(&store).unwrap();
        create(&store).unwrap();
        assert_eq!(mode(&store), 0o700);
        assert_eq!(mode(&root.path().join("a")), 0o755);
        assert_eq!(mode(&root.path().join("a/b")), 0o755);
    }

    #[test]
    fn what_is_above_a_folder_is_synced_up_to_the_file_system() {
        let root = tempfile::tempdir().unwrap();
        sync_above(root.path()).unwrap();
        sync_above(Path::new("/proc")).unwrap();
        assert_eq!(sync_above(&root.path().join("missing")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_folder_that_is_there_keeps_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("store");
        fs::create_dir(&store).unwrap();
        fs::set_permissions(&store, Permissions::from_mode(0o750)).unwrap();
        create(&store).unwrap();
        assert_eq!(mode(&store), 0o750);
    }

    #[test]
    fn a_file_in_the_way_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("file"), "x").unwrap();
        assert!(create(&root.path().join("file")).is_err());
        assert!(create(&root.path().join("file/store")).is_err());
    }

    #[test]
    fn a_written_file_replaces_the_old_one_and_leaves_no_draft() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("store.id");
        write(&path, "one").unwrap();
        write(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn restricting_reaches_everything() {
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
}
