//! Implements the test disk: its files and folders, its power, how it treats syncs, and its image after a power cut.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::changes::{Cut, File, Folder, Luck, Names};
use crate::serve::Mounted;

/// How the test disk treats a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syncs {
    /// A sync makes all changes to the synced file or folder durable.
    Kept,
    /// A sync reports success, but makes no change durable.
    Ignored,
    /// Syncs of folders report success, but make no change durable; syncs of files work normally.
    IgnoredForFolders,
}

/// A file system in memory whose power can be cut. Clones of a `Disk` share the same disk.
#[derive(Clone, Debug)]
pub struct Disk {
    pub(crate) state: Arc<Mutex<State>>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) nodes: BTreeMap<u64, Node>,
    pub(crate) next: u64,
    /// For each open folder, by file handle: the entries that the folder had when it was opened.
    pub(crate) listings: BTreeMap<u64, Vec<(u64, OsString)>>,
    syncs: Syncs,
    power: Power,
    operations: u64,
    /// True while the test disk does not answer syncs.
    hangs: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Power {
    On,
    /// The power is cut after this many further operations that are changes or syncs.
    Left(u64),
    Cut,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) about: About,
    durable_time: SystemTime,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    File(File),
    Folder(Folder),
}

impl Node {
    /// Creates a file or folder whose content or entries are not durable yet.
    pub(crate) fn new(about: About, kind: Kind) -> Self {
        Self { about, durable_time: about.changed, kind }
    }

    pub(crate) fn touch(&mut self) {
        self.about.changed = SystemTime::now();
    }
}

impl Disk {
    /// Creates a disk with the files and folders of a disk image.
    #[must_use]
    pub fn new(image: Image, syncs: Syncs) -> Self {
        let node = |saved: Saved| {
            let kind = match saved.content {
                Content::File(bytes) => Kind::File(File::durable(bytes)),
                Content::Folder(names) => Kind::Folder(Folder::durable(names)),
            };
            Node::new(saved.about, kind)
        };
        let nodes = image.nodes.into_iter().map(|(number, saved)| (number, node(saved))).collect();
        let listings = BTreeMap::new();
        let state = State { nodes, next: image.next, listings, syncs, power: Power::On, operations: 0, hangs: false };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Mounts the disk on an existing folder by FUSE, which needs root.
    ///
    /// # Errors
    /// Any I/O error of opening `/dev/fuse` or of mounting.
    pub fn mount(&self, at: &Path) -> io::Result<Mounted> {
        Mounted::new(self, at)
    }

    /// Cuts the disk's power after the given number of further operations, of which only changes of the disk and syncs
    /// are counted.
    pub fn cut_after(&self, operations: u64) {
        let mut state = self.state();
        if state.power != Power::Cut {
            state.power = Power::Left(operations);
        }
    }

    /// Cuts the disk's power immediately.
    pub fn cut(&self) {
        self.state().power = Power::Cut;
    }

    /// Restores the power, with the disk's content as if the power had not been cut. Operations that failed while the
    /// power was cut had no effect. By cutting and then restoring the power, a test can kill a program after an exact
    /// number of disk operations.
    pub fn undo_cut(&self) {
        self.state().power = Power::On;
    }

    /// Makes all syncs wait until [`go_on`](Self::go_on) is called or the power is cut. While its syncs hang, the disk
    /// answers every other request.
    pub fn hang(&self) {
        self.state().hangs = true;
    }

    /// Ends the effect of [`hang`](Self::hang): the disk carries out the waiting syncs.
    pub fn go_on(&self) {
        self.state().hangs = false;
    }

    /// Returns true if the disk's power is cut.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.state().power == Power::Cut
    }

    /// Runs the closure `work`, unless the disk's power is cut. The power cannot be cut while `work` runs, so `work`
    /// must not wait for an operation on the disk.
    pub fn before_cut<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let state = self.state();
        (state.power != Power::Cut).then(work)
    }

    /// Returns how many operations so far were changes of the disk or syncs.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Returns the paths of the files and folders with unsynced changes, where `/` is the root folder of the disk.
    #[must_use]
    pub fn unsynced(&self) -> Vec<PathBuf> {
        let state = self.state();
        let mut unsynced = Vec::new();
        let mut found = vec![(ROOT, PathBuf::from("/"))];
        while let Some((number, path)) = found.pop() {
            let is_unsynced = match state.nodes.get(&number).map(|node| &node.kind) {
                Some(Kind::File(file)) => file.is_unsynced(),
                Some(Kind::Folder(folder)) => {
                    found.extend(folder.names().iter().map(|(name, number)| (*number, path.join(name))));
                    folder.is_unsynced()
                }
                None => false,
            };
            if is_unsynced {
                unsynced.push(path);
            }
        }
        unsynced
    }

    /// Draws at random the disk image that remains after the power cut `cut`.
    #[must_use]
    pub fn after_cut(&self, cut: Cut) -> Image {
        let state = self.state();
        let mut luck = Luck::new(cut);
        let mut left = BTreeMap::new();
        let mut found = vec![ROOT];
        while let Some(number) = found.pop() {
            let Some(node) = state.nodes.get(&number) else { continue };
            let content = match &node.kind {
                Kind::File(file) => Content::File(file.after_cut(&mut luck)),
                Kind::Folder(folder) => {
                    let names = folder.after_cut(&mut luck);
                    found.extend(names.values());
                    Content::Folder(names)
                }
            };
            let mut about = node.about;
            if !luck.of_time() {
                about.changed = node.durable_time;
            }
            left.insert(number, Saved { about, content });
        }
        Image { nodes: left, next: state.next }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    pub(crate) fn is_on(&self) -> bool {
        self.power != Power::Cut
    }

    /// Returns true while the disk has power but does not answer syncs.
    pub(crate) fn hangs(&self) -> bool {
        self.hangs && self.is_on()
    }

    /// Counts an operation, which is a change of the disk or a sync. Returns false if the disk's power is off, or if
    /// counting the operation cuts the power.
    pub(crate) fn begin(&mut self) -> bool {
        match &mut self.power {
            Power::Cut => return false,
            Power::Left(0) => {
                self.power = Power::Cut;
                return false;
            }
            Power::Left(left) => *left -= 1,
            Power::On => {}
        }
        self.operations += 1;
        true
    }

    /// Makes the changes to the file or folder `number` durable, unless the disk ignores the sync.
    pub(crate) fn sync(&mut self, number: u64) {
        let syncs = self.syncs;
        let Some(node) = self.nodes.get_mut(&number) else { return };
        match (&mut node.kind, syncs) {
            (_, Syncs::Ignored) | (Kind::Folder(_), Syncs::IgnoredForFolders) => return,
            (Kind::File(file), _) => file.sync(),
            (Kind::Folder(folder), _) => folder.sync(),
        }
        node.durable_time = node.about.changed;
    }

    /// Adds a file or folder that is in no folder yet, and returns its inode number.
    pub(crate) fn add(&mut self, node: Node) -> u64 {
        let number = self.next;
        self.next += 1;
        self.nodes.insert(number, node);
        number
    }

    pub(crate) fn file(&mut self, number: u64) -> Option<&mut File> {
        match &mut self.nodes.get_mut(&number)?.kind {
            Kind::File(file) => Some(file),
            Kind::Folder(_) => None,
        }
    }

    pub(crate) fn folder(&mut self, number: u64) -> Option<&mut Folder> {
        match &mut self.nodes.get_mut(&number)?.kind {
            Kind::Folder(folder) => Some(folder),
            Kind::File(_) => None,
        }
    }
}

/// The inode number of the test disk's root folder.
const ROOT: u64 = 1;

/// The content of a test disk whose power is cut: files and folders that are all durable.
#[derive(Clone, Debug)]
pub struct Image {
    pub(crate) nodes: BTreeMap<u64, Saved>,
    /// The next inode number that is not in use.
    pub(crate) next: u64,
}

/// A file or a folder in a disk image.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    pub(crate) about: About,
    pub(crate) content: Content,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) changed: SystemTime,
}

#[derive(Clone, Debug)]
pub(crate) enum Content {
    File(Vec<u8>),
    Folder(Names),
}

impl Default for Image {
    fn default() -> Self {
        let about = About { mode: 0o755, uid: 0, gid: 0, changed: SystemTime::UNIX_EPOCH };
        let root = Saved { about, content: Content::Folder(Names::new()) };
        Self { nodes: [(ROOT, root)].into(), next: ROOT + 1 }
    }
}

impl Image {
    /// Reads an image from a folder of the host and its subfolders.
    ///
    /// # Errors
    /// `Unsupported` if the folder contains anything but files and folders; any I/O error of reading.
    pub fn of_folder(path: &Path) -> io::Result<Self> {
        let mut image = Self { nodes: BTreeMap::new(), next: ROOT + 1 };
        image.take_in(path, ROOT)?;
        Ok(image)
    }

    fn take_in(&mut self, path: &Path, number: u64) -> io::Result<()> {
        let metadata = fs::symlink_metadata(path)?;
        let mode = u16::try_from(metadata.mode() & 0o7777).unwrap_or_default();
        let about = About { mode, uid: metadata.uid(), gid: metadata.gid(), changed: metadata.modified()? };
        let content = if metadata.is_dir() {
            let mut names = Names::new();
            for entry in fs::read_dir(path)? {
                let (entry, number) = (entry?, self.next);
                self.next += 1;
                names.insert(entry.file_name(), number);
                self.take_in(&entry.path(), number)?;
            }
            Content::Folder(names)
        } else if metadata.is_file() {
            Content::File(fs::read(path)?)
        } else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        self.nodes.insert(number, Saved { about, content });
        Ok(())
    }

    /// Writes the files and folders of this image to a folder on the host that does not exist yet.
    ///
    /// # Errors
    /// Any I/O error of writing to the host's folder.
    pub fn copy_to(&self, path: &Path) -> io::Result<()> {
        self.copy_node(ROOT, path)
    }

    fn copy_node(&self, number: u64, path: &Path) -> io::Result<()> {
        let node = self.nodes.get(&number).ok_or(io::ErrorKind::NotFound)?;
        let mode = u32::from(node.about.mode);
        match &node.content {
            Content::File(bytes) => {
                OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?.write_all(bytes)
            }
            Content::Folder(names) => {
                DirBuilder::new().mode(mode).create(path)?;
                names.iter().try_for_each(|(name, number)| self.copy_node(*number, &path.join(name)))
            }
        }
    }
}
