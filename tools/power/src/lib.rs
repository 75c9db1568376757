//! A disk in user space that forgets what was not synced when its power is cut.
//!
//! A [`Disk`] is a file system in memory, mounted by FUSE, so that real programs run on it. It keeps two versions of
//! everything: what programs see, and what a sync has made durable, with the changes in between. After [`Disk::cut`]
//! every request fails, and [`Disk::after_cut`] gives one of the images that a real disk could hold then:
//!
//! - **Content.** Each sector of 512 bytes survives by itself, in any version that it had since its file was synced
//!   last.
//! - **Lengths.** The length of a file is metadata. Of its changes since the last sync, the first so many survive. A
//!   sector beyond the surviving length is gone. A length that survives without its sectors shows zeros, as on file
//!   systems that never show what was deleted. `fsync` and `fdatasync` both make content and length durable.
//! - **Names.** To make, remove or rename a file is a change to its folder. A sync of the folder makes it durable; a
//!   sync of the file does not. Of the changes that were not synced, the first so many survive, in each folder by
//!   itself, or none at all: see [`Folders`]. A rename is one change.
//! - **Modes and owners** are durable at once. The time of the last change is the old one or the new one.
//!
//! A disk can lie: see [`Syncs`]. There are no hard links and no symbolic links, no renames from one folder to another,
//! and no shared maps that can be written: a program that needs them gets an error. Nothing that was removed is
//! forgotten while the disk is mounted, so a disk is for minutes, not for days.
//!
//! The kernel keeps the locks: `flock`, POSIX locks and OFD locks all work.

mod changes;
mod disk;
mod serve;
mod trial;

pub use changes::{Cut, Folders};
pub use disk::{Disk, Image, Syncs};
pub use serve::Mounted;
pub use trial::{Test, main};
