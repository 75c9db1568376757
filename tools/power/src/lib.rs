//! A disk for tests, in user space, that loses unsynced data when its power is cut.
//!
//! A [`Disk`] is a file system in memory that is mounted by FUSE, so that real programs can use it. The disk keeps a
//! visible and a durable version of all files and folders, and the changes between both. After [`Disk::cut`], every
//! request to the disk fails. [`Disk::after_cut`] returns one of the images that a real disk could contain after the
//! power cut:
//!
//! - **Content.** Each sector of 512 bytes survives independently, in any version that it had since the last sync of
//!   its file.
//! - **Lengths.** A random number of the oldest changes to a file's length since the last sync survives: none, some or
//!   all. File content beyond the surviving length is lost. Within the surviving length of a file, a lost sector reads
//!   as zeros, as on file systems that never expose deleted data. Both `fsync` and `fdatasync` make a file's content
//!   and length durable.
//! - **Names.** Creating, removing or renaming a file is a change to the file's folder. Only a sync of the folder makes
//!   a change of the folder durable, not a sync of the file. [`Folders`] says which unsynced changes to a folder
//!   survive, independently of other folders. A rename survives a power cut or is lost as a whole.
//! - **Modes and owners** of files and folders are durable immediately. After a power cut, a file has either its
//!   durable or its newest modification time.
//!
//! A disk can be told to ignore syncs: see [`Syncs`]. Hard links, symbolic links, renames between folders and writable
//! shared memory maps are not supported and return errors. Removed files stay in memory while the disk is mounted, so
//! use a disk for minutes, not for days.
//!
//! The kernel manages file locks by itself, so `flock`, POSIX locks and OFD locks all work on the mounted disk.

mod changes;
mod disk;
mod serve;
mod trial;

pub use changes::{Cut, Folders};
pub use disk::{Disk, Image, Syncs};
pub use serve::Mounted;
pub use trial::{Test, main};
