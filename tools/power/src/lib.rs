//! A disk in user space that forgets unsynced data when its power is cut.
//!
//! A [`Disk`] is a file system in memory that is mounted with FUSE, so that real programs can use it. The disk keeps a
//! visible and a durable version of all content, with the changes in between. After [`Disk::cut`] every request fails,
//! and [`Disk::after_cut`] returns one of the images that a real disk could hold at that point:
//!
//! - **Content.** Each sector of 512 bytes survives independently, in any version that the sector had since the last
//!   sync of its file.
//! - **Lengths.** The length of a file is metadata. A prefix of the changes to the length since the last sync survives.
//!   A sector beyond the surviving length is lost. A length that survives without its sectors shows zeros, as on file
//!   systems that never expose deleted data. `fsync` and `fdatasync` both make content and length durable.
//! - **Names.** Creating, removing or renaming a file is a change to the file's folder. A sync of the folder makes the
//!   change durable; a sync of the file does not. In each folder independently, a prefix of the unsynced changes
//!   survives, or no change at all: see [`Folders`]. A rename is one change.
//! - **Modes and owners** are durable immediately. The time of a file's last change is either the old or the new time.
//!
//! A disk can ignore syncs: see [`Syncs`]. Hard links, symbolic links, renames between folders and writable shared maps
//! are not supported and return errors. Removed files stay in memory while the disk is mounted, so a disk is meant for
//! minutes of use, not for days.
//!
//! The kernel manages file locks: `flock`, POSIX locks and OFD locks all work on the disk.

mod changes;
mod disk;
mod serve;
mod trial;

pub use changes::{Cut, Folders};
pub use disk::{Disk, Image, Syncs};
pub use serve::Mounted;
pub use trial::{Test, main};
