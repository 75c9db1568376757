//! A disk for tests, in user space, that loses unsynced data when its power is cut.
//!
//! A [`Disk`] is a file system in memory that is mounted by FUSE, so that real programs can use it. The disk keeps a
//! visible and a durable version of all files and folders, and the changes between the two versions. After
//! [`Disk::cut`] every request to the disk fails, and [`Disk::after_cut`] returns one of the images that a real disk
//! could contain at that point:
//!
//! - **Content.** Each sector of 512 bytes survives independently of other sectors, in any version that it had since
//!   the last sync of its file.
//! - **Lengths.** The length of a file is metadata of the file. Of the changes to a file's length since the last sync,
//!   the first ones survive: none, some or all. A sector beyond the surviving length of its file is lost. If a file's
//!   length survives without the file's sectors, these sectors contain zeros, as on file systems that never expose
//!   deleted data. Both `fsync` and `fdatasync` make a file's content and length durable.
//! - **Names.** Creating, removing or renaming a file is a change to the file's folder. A sync of the folder makes the
//!   folder's changes durable; a sync of the file itself does not. Of the unsynced changes to a folder, the first ones
//!   or none survive, independently of other folders: see [`Folders`]. A rename is one change, which survives or is
//!   lost as a whole.
//! - **Modes and owners** of files and folders are durable immediately. After a power cut, a file's modification time
//!   is either the durable or the newest one.
//!
//! A disk can be told to ignore syncs: see [`Syncs`]. Hard links, symbolic links, renames between folders and writable
//! shared memory maps are not supported and return errors. Removed files stay in memory while the disk is mounted, so
//! use a disk for minutes, not for days.
//!
//! The kernel itself manages file locks, so `flock`, POSIX locks and OFD locks all work on the mounted disk.

mod changes;
mod disk;
mod serve;
mod trial;

pub use changes::{Cut, Folders};
pub use disk::{Disk, Image, Syncs};
pub use serve::Mounted;
pub use trial::{Test, main};
