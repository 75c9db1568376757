//! The content of a disk while it has no power.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::SystemTime;

use crate::folder::Names;

/// The number of the folder that everything else is in.
pub(crate) const ROOT: u64 = 1;

/// The content of a disk while it has no power: folders and files, all of them durable.
#[derive(Clone, Debug)]
pub struct Image {
    pub(crate) nodes: BTreeMap<u64, Saved>,
    /// A number that nothing ever had.
    pub(crate) next: u64,
}

/// A file or a folder.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    pub(crate) about: About,
    pub(crate) content: Content,
}

/// The attributes of a file or a folder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// When it was changed last.
    pub(crate) changed: SystemTime,
}

#[derive(Clone, Debug)]
pub(crate) enum Content {
    File(Vec<u8>),
    Folder(Names),
}

impl Default for Image {
    /// An empty disk.
    fn default() -> Self {
        let about = About { mode: 0o755, uid: 0, gid: 0, changed: SystemTime::UNIX_EPOCH };
        let root = Saved { about, content: Content::Folder(Names::new()) };
        Self { nodes: [(ROOT, root)].into(), next: ROOT + 1 }
    }
}

impl Image {
    /// A disk with what is in this folder.
    ///
    /// # Errors
    /// Those of reading it; `Unsupported` for what is no folder and no file.
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

    /// Copies everything on it into a folder, which is made.
    ///
    /// # Errors
    /// Those of writing.
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
