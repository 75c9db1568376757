//! The file `ballast`: room on the disk that only a release may use.
//!
//! It is made with the store, of blocks that are really allocated. A release that finds the disk full cuts a piece off and
//! tries again, a piece at a time, and takes back in the end what it did not need, so that other programs get as little of
//! the room as can be. The next opening for anything else puts back what is missing, if there is room; in the common case
//! that is one look at the file. A file that is short says that a part was used up. A process that is killed here leaves
//! it short or whole, and nothing else.

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
use kv_mvcc::Reserve;

/// How much is kept.
const BYTES: u64 = 1 << 20;
/// How much is given up at once: more than a release needs on either engine, opening included.
const PIECE: u64 = 128 << 10;
/// How much is taken back at once.
const CRUMB: u64 = 8 << 10;
/// With less than this a disk is full: a usual commit may have no room.
const USUAL: u64 = 64 << 10;
/// The length of a ballast that had to be written, since the file system could not just allocate it. That file system
/// may report its blocks late, or not at all.
const WRITTEN: u64 = BYTES + 1;
/// In which unit files tell how many blocks they have, whatever the file system's own is.
const BLOCK: u64 = 512;

/// The ballast of a store.
#[derive(Debug)]
pub(crate) struct Ballast {
    path: PathBuf,
    /// True once a piece was given up.
    is_cut: AtomicBool,
}

impl Ballast {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, is_cut: AtomicBool::new(false) }
    }

    /// Takes back what is left of the pieces that were given up, as far as there is room now.
    pub(crate) fn take_back(&self) {
        if self.is_cut.swap(false, Ordering::Relaxed) {
            // A part that cannot be restored now is restored when there is room.
            let _ = self.grow();
        }
    }

    fn grow(&self) -> io::Result<()> {
        let file = folder::open(&self.path)?;
        let mut length = file.metadata()?.len();
        while length < BYTES {
            let crumb = CRUMB.min(BYTES - length);
            fallocate(&file, FallocateFlags::empty(), length.cast_signed(), crumb.cast_signed())?;
            length += crumb;
        }
        Ok(())
    }

    /// Brings the file to its full size; if that fails, it is as long as before.
    fn fill(&self) -> io::Result<()> {
        let mut file = folder::open_or_create(&self.path)?;
        let before = file.metadata()?.len();
        let filled = allocate(&file).or_else(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Err(error),
            _ => write(&mut file),
        });
        if filled.is_err() {
            // The room allocated so far is missing elsewhere.
            let _ = file.set_len(before);
        }
        filled
    }
}

/// Has the file system allocate the blocks, without writing them.
fn allocate(file: &File) -> io::Result<()> {
    fallocate(file, FallocateFlags::empty(), 0, BYTES.cast_signed())?;
    file.set_len(BYTES)?;
    if is_whole(&file.metadata()?) { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// Writes what no file system can compress.
fn write(file: &mut File) -> io::Result<()> {
    file.rewind()?;
    io::copy(&mut File::open("/dev/urandom")?.take(WRITTEN), file)?;
    // Some find out only now that there is no room.
    file.sync_all()
}

/// Checks that the disk of a folder can be written to and has so many bytes free.
pub(crate) fn check_disk(folder: &Path, bytes: u64) -> Result<(), (ErrorKind, String)> {
    // Where the system does not tell, there is room until a commit has found none.
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
    // A copy of the file may have holes.
    metadata.len() == WRITTEN || (metadata.len() == BYTES && metadata.blocks() * BLOCK >= BYTES)
}

impl Reserve for Ballast {
    fn restore(&self) -> Result<(), String> {
        match fs::metadata(&self.path) {
            Ok(metadata) if is_whole(&metadata) => Ok(()),
            Ok(_) => self.fill().map_err(|error| missing(&self.path, &error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A store without one, of an earlier version or of a disk that had no room for it, works all the same.
                if let Err(error) = self.fill() {
                    tracing::debug!(path = %self.path.display(), %error, "no ballast");
                    let _ = fs::remove_file(&self.path);
                }
                Ok(())
            }
            // A process that may use the store but not this file learns from its writes how much room there is.
            Err(_) => Ok(()),
        }
    }

    fn check_room(&self) -> Result<(), (ErrorKind, String)> {
        check_disk(self.path.parent().unwrap_or(&self.path), USUAL)
    }

    fn give_up(&self) -> bool {
        let given_up = || -> io::Result<u64> {
            let file = folder::open(&self.path)?;
            let length = file.metadata()?.len().min(BYTES);
            let left = length.saturating_sub(PIECE);
            file.set_len(left)?;
            // On some file systems nobody can have the blocks before this is durable.
            file.sync_all()?;
            self.is_cut.store(true, Ordering::Relaxed);
            tracing::warn!(path = %self.path.display(), left, "the disk is full: a release uses a part of the ballast");
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

    fn ballast() -> (tempfile::TempDir, Ballast) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ballast");
        (folder, Ballast::new(path))
    }

    fn metadata(ballast: &Ballast) -> Metadata {
        fs::metadata(&ballast.path).unwrap()
    }

    #[test]
    fn reserved_space_has_blocks_and_is_private() {
        let (_folder, ballast) = ballast();
        ballast.restore().unwrap();
        let made = metadata(&ballast);
        assert_eq!((made.len(), made.mode() & 0o7777), (BYTES, 0o600));
        assert!(made.blocks() * BLOCK >= BYTES, "{} blocks", made.blocks());
    }

    #[test]
    fn reserved_space_is_given_up_in_pieces_and_restored() {
        let (_folder, ballast) = ballast();
        assert!(!ballast.give_up(), "there is none");
        ballast.restore().unwrap();
        let before = metadata(&ballast).blocks();
        for piece in 1..=BYTES / PIECE {
            assert!(ballast.give_up());
            assert_eq!(metadata(&ballast).len(), BYTES - piece * PIECE);
        }
        assert_eq!(metadata(&ballast).blocks(), 0);
        assert!(!ballast.give_up(), "nothing is left");
        ballast.restore().unwrap();
        assert_eq!((metadata(&ballast).len(), metadata(&ballast).blocks()), (BYTES, before));
    }

    #[test]
    fn reserved_space_is_taken_back_when_not_needed() {
        let (_folder, ballast) = ballast();
        ballast.restore().unwrap();
        assert!(ballast.give_up() && ballast.give_up());
        ballast.take_back();
        assert!(is_whole(&metadata(&ballast)));
    }

    #[test]
    fn reserved_space_is_filled_when_copy_has_holes() {
        let (_folder, ballast) = ballast();
        File::create(&ballast.path).unwrap().set_len(BYTES).unwrap();
        assert!(!is_whole(&metadata(&ballast)));
        ballast.restore().unwrap();
        assert!(is_whole(&metadata(&ballast)));
    }

    #[test]
    fn reserved_space_is_written_when_blocks_cannot_be_allocated() {
        let (_folder, ballast) = ballast();
        let mut file = folder::open_or_create(&ballast.path).unwrap();
        write(&mut file).unwrap();
        assert_eq!(metadata(&ballast).len(), WRITTEN);
        ballast.restore().unwrap();
        assert_eq!(metadata(&ballast).len(), WRITTEN, "it is not made again");
        assert!(ballast.give_up());
        assert_eq!(metadata(&ballast).len(), BYTES - PIECE);
    }
}
