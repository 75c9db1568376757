//! Reserves disk space that only releases of addresses may use: the file `ballast`.
//!
//! The file `ballast` is created together with the store, and its disk blocks are really allocated. A release that
//! finds the disk full shortens the file `ballast` by one step and tries again, until the release succeeds or the file
//! is empty. When a release has succeeded, the unused part of the freed space is given back to `ballast` at once,
//! before other programs can take it. When the store is next opened for a purpose other than a release, the missing
//! part of `ballast` is restored if the disk has room. Checking the file `ballast` usually costs only one stat call: if
//! `ballast` is shorter than its full size, a part of the reserved space was used up. If a process is killed while it
//! changes the file `ballast`, the file is either too short or complete, without any other effect.

use std::fs::{self, File, Metadata};
use std::io::{self, Read as _, Seek as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::geteuid;

use super::errors::read_only;
use super::folder;
use kv::ErrorKind;
use kv_mvcc::SpaceReserve;

const RESERVED_BYTES: u64 = 1 << 20;
/// Number of bytes of reserved space that one step frees. Freeing one such part of the reserved space is enough to open
/// a store and release an address, with either engine.
const RELEASE_STEP_BYTES: u64 = 128 << 10;
/// Number of bytes of reserved space that are restored in one step.
const REFILL_STEP_BYTES: u64 = 8 << 10;
/// Minimum number of free bytes on the disk; below it the disk counts as full, because an ordinary commit might not
/// fit.
const MIN_FREE_BYTES: u64 = 64 << 10;
/// The length in bytes of the file `ballast` if its content had to be written, because the file system cannot allocate
/// blocks otherwise. A file system that cannot allocate blocks without writing may report the number of allocated
/// blocks late or never.
const WRITTEN_FILE_BYTES: u64 = RESERVED_BYTES + 1;
/// The unit of `st_blocks` in bytes, regardless of the file system's block size.
const BLOCK_BYTES: u64 = 512;

/// The disk space that a store reserves for releases of addresses (the file `ballast`).
#[derive(Debug)]
pub(crate) struct ReservedSpace {
    path: PathBuf,
    /// True while a part of the reserved space is freed and not restored yet.
    is_cut: AtomicBool,
}

impl ReservedSpace {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, is_cut: AtomicBool::new(false) }
    }

    /// Allocates the missing part of the file `ballast` again, until the file has its full size or the disk is full.
    pub(crate) fn refill(&self) {
        if self.is_cut.swap(false, Ordering::Relaxed) {
            // If the disk has no room now, the next opening of the store restores the missing part of `ballast`.
            let _ = self.grow();
        }
    }

    fn grow(&self) -> io::Result<()> {
        let file = folder::open(&self.path)?;
        let mut length = file.metadata()?.len();
        while length < RESERVED_BYTES {
            let crumb = REFILL_STEP_BYTES.min(RESERVED_BYTES - length);
            fallocate(&file, FallocateFlags::empty(), length.cast_signed(), crumb.cast_signed())?;
            length += crumb;
        }
        Ok(())
    }

    /// Restores the file `ballast` to its full size; after an error, the file has its previous length.
    fn fill(&self) -> io::Result<()> {
        let mut file = folder::open_or_create(&self.path)?;
        let before = file.metadata()?.len();
        let filled = allocate(&file).or_else(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Err(error),
            _ => write(&mut file),
        });
        if filled.is_err() {
            // Restoring `ballast` failed, so the blocks allocated so far are freed for other programs.
            let _ = file.set_len(before);
        }
        filled
    }
}

/// Lets the file system allocate the blocks of the file without writing to the blocks.
fn allocate(file: &File) -> io::Result<()> {
    fallocate(file, FallocateFlags::empty(), 0, RESERVED_BYTES.cast_signed())?;
    file.set_len(RESERVED_BYTES)?;
    if is_whole(&file.metadata()?) { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// Writes random bytes, which no file system can compress, to the file.
fn write(file: &mut File) -> io::Result<()> {
    file.rewind()?;
    io::copy(&mut File::open("/dev/urandom")?.take(WRITTEN_FILE_BYTES), file)?;
    // Some file systems report a full disk only on a sync of the file.
    file.sync_all()
}

/// Checks that the disk of a folder is writable and has at least `bytes` bytes free.
pub(crate) fn check_disk(folder: &Path, bytes: u64) -> Result<(), (ErrorKind, String)> {
    // If the free space is unknown, the disk is assumed to have room; a commit to a full disk will fail anyway.
    let Ok(status) = statvfs(folder) else { return Ok(()) };
    if status.flags().contains(FsFlags::ST_RDONLY) {
        return Err((ErrorKind::Io, read_only(folder)));
    }
    let blocks = if geteuid().is_root() { status.blocks_free() } else { status.blocks_available() };
    let free = u128::from(blocks) * u128::from(status.fragment_size());
    if free >= u128::from(bytes) {
        return Ok(());
    }
    Err((ErrorKind::NoSpace, format!("{free} bytes are free on the disk of {}: free some space", folder.display())))
}

fn is_whole(metadata: &Metadata) -> bool {
    // In a copied store, the file `ballast` may have holes instead of allocated blocks.
    metadata.len() == WRITTEN_FILE_BYTES
        || (metadata.len() == RESERVED_BYTES && metadata.blocks() * BLOCK_BYTES >= RESERVED_BYTES)
}

impl SpaceReserve for ReservedSpace {
    fn restore(&self) -> Result<(), String> {
        match fs::metadata(&self.path) {
            Ok(metadata) if is_whole(&metadata) => Ok(()),
            Ok(_) => self.fill().map_err(|error| missing(&self.path, &error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A store also works without the file `ballast`: an earlier Margay version may have created the store,
                // or the disk had no room for the file.
                if let Err(error) = self.fill() {
                    tracing::debug!(
                        path = %self.path.display(),
                        %error,
                        "cannot create the file that reserves disk space; if the disk fills up, releasing an address \
                         can fail"
                    );
                    let _ = fs::remove_file(&self.path);
                }
                Ok(())
            }
            // If a process with access to the store cannot read the file `ballast`, the disk counts as not full; on a
            // full disk, a later write fails.
            Err(_) => Ok(()),
        }
    }

    fn check_room(&self) -> Result<(), (ErrorKind, String)> {
        check_disk(self.path.parent().unwrap_or(&self.path), MIN_FREE_BYTES)
    }

    fn is_short(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|metadata| !is_whole(&metadata))
    }

    fn release_part(&self) -> bool {
        let given_up = || -> io::Result<u64> {
            let file = folder::open(&self.path)?;
            let length = file.metadata()?.len().min(RESERVED_BYTES);
            let left = length.saturating_sub(RELEASE_STEP_BYTES);
            file.set_len(left)?;
            // On some file systems, blocks that were cut off from a file become free only once the file's new length is
            // durable.
            file.sync_all()?;
            self.is_cut.store(true, Ordering::Relaxed);
            tracing::warn!(
                path = %self.path.display(),
                left,
                "the disk is full; shrank the file that reserves disk space, so that addresses can be released"
            );
            Ok(length - left)
        };
        given_up().is_ok_and(|bytes| bytes > 0)
    }
}

fn missing(path: &Path, error: &io::Error) -> String {
    format!(
        "the disk was so full that releases used up a part of {}, which is kept for them, and it cannot be put back \
         ({error}): free some space, at least 1 MiB, and try again",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserved_space() -> (tempfile::TempDir, ReservedSpace) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ballast");
        (folder, ReservedSpace::new(path))
    }

    fn metadata(reserved_space: &ReservedSpace) -> Metadata {
        fs::metadata(&reserved_space.path).unwrap()
    }

    #[test]
    fn reserved_space_has_blocks_and_is_private() {
        let (_folder, reserved_space) = reserved_space();
        reserved_space.restore().unwrap();
        let made = metadata(&reserved_space);
        assert_eq!((made.len(), made.mode() & 0o7777), (RESERVED_BYTES, 0o600));
        assert!(made.blocks() * BLOCK_BYTES >= RESERVED_BYTES, "{} blocks", made.blocks());
    }

    #[test]
    fn reserved_space_is_given_up_in_pieces_and_restored() {
        let (_folder, reserved_space) = reserved_space();
        assert!(!reserved_space.release_part(), "there is none");
        reserved_space.restore().unwrap();
        let before = metadata(&reserved_space).blocks();
        for piece in 1..=RESERVED_BYTES / RELEASE_STEP_BYTES {
            assert!(reserved_space.release_part());
            assert_eq!(metadata(&reserved_space).len(), RESERVED_BYTES - piece * RELEASE_STEP_BYTES);
        }
        assert_eq!(metadata(&reserved_space).blocks(), 0);
        assert!(!reserved_space.release_part(), "nothing is left");
        reserved_space.restore().unwrap();
        assert_eq!((metadata(&reserved_space).len(), metadata(&reserved_space).blocks()), (RESERVED_BYTES, before));
    }

    #[test]
    fn reserved_space_is_taken_back_when_not_needed() {
        let (_folder, reserved_space) = reserved_space();
        reserved_space.restore().unwrap();
        assert!(reserved_space.release_part() && reserved_space.release_part());
        reserved_space.refill();
        assert!(is_whole(&metadata(&reserved_space)));
    }

    #[test]
    fn reserved_space_is_filled_when_copy_has_holes() {
        let (_folder, reserved_space) = reserved_space();
        File::create(&reserved_space.path).unwrap().set_len(RESERVED_BYTES).unwrap();
        assert!(!is_whole(&metadata(&reserved_space)));
        reserved_space.restore().unwrap();
        assert!(is_whole(&metadata(&reserved_space)));
    }

    #[test]
    fn reserved_space_is_written_when_blocks_cannot_be_allocated() {
        let (_folder, reserved_space) = reserved_space();
        let mut file = folder::open_or_create(&reserved_space.path).unwrap();
        write(&mut file).unwrap();
        assert_eq!(metadata(&reserved_space).len(), WRITTEN_FILE_BYTES);
        reserved_space.restore().unwrap();
        assert_eq!(metadata(&reserved_space).len(), WRITTEN_FILE_BYTES, "it is not made again");
        assert!(reserved_space.release_part());
        assert_eq!(metadata(&reserved_space).len(), RESERVED_BYTES - RELEASE_STEP_BYTES);
    }
}
