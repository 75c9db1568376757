//! Manages the folder of a store: the queue for the store lock, the store's identity, and the steps in which a store is
//! created.
//!
//! The file `store.id` contains the name of the engine and the id of the store. The file `store.id` is written last, so
//! a folder with this file contained a complete store at some time. If `store.id` exists but the engine has no rows,
//! the engine has lost its rows.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv::{ErrorKind, Result};
use kv_mvcc::journal::{DurableParts, JOURNAL_BYTES};
use uuid::Uuid;

use super::errors::StoreLabel;
use super::folder;
use super::open::{Create, Engine, OpenOptions};
use super::queue::{LockError, StoreLock};
use super::reserved_space::{ReservedSpace, check_disk};
use super::revision_file::{JournalFile, RevisionFile};

pub(crate) const QUEUE_FILE: &str = "queue";
const IDENTITY_DRAFT_FILE: &str = "store.new";
const CREATION_MARKER_FILE: &str = "creating";
pub(crate) const REVISION_FILE: &str = "head";
const RESERVED_SPACE_FILE: &str = "ballast";
const JOURNAL_FILE: &str = "journal";

/// The folder of a store, and the names of the engine's files in this folder.
#[derive(Debug)]
pub(crate) struct StoreFolder {
    pub(crate) label: StoreLabel,
    pub(crate) reserved_space: Arc<ReservedSpace>,
    engine: &'static str,
    pub(crate) entry: &'static str,
    files: &'static [&'static str],
}

impl StoreFolder {
    pub(crate) fn new(engine: &dyn Engine, path: &Path) -> Self {
        // An engine that is reopened after a change of the working directory must find its files, so the path is made
        // absolute.
        let folder = std::path::absolute(path);
        let folder = folder.as_deref().unwrap_or(path).to_owned();
        let store = format!("{}://{}", engine.name(), folder.display());
        let reserved_space = Arc::new(ReservedSpace::new(folder.join(RESERVED_SPACE_FILE)));
        let label = StoreLabel { store, folder };
        Self { label, reserved_space, engine: engine.name(), entry: engine.entry(), files: engine.files() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.label.folder.join(name)
    }

    pub(crate) fn io<T>(&self, name: &str, result: io::Result<T>) -> Result<T> {
        result.map_err(|error| self.label.io(&self.path(name), error))
    }

    pub(crate) fn exists(&self, name: &str) -> Result<bool> {
        self.io(name, fs::exists(self.path(name)))
    }

    /// Waits for the store lock. If the options allow creating a store, `take_lock` first creates the folder and the
    /// queue file.
    pub(crate) fn take_lock(&self, options: &OpenOptions) -> Result<StoreLock> {
        self.check_file_system(options.create)?;
        let queue = self.path(QUEUE_FILE);
        let opener = match options.create {
            // A folder without a queue file may still contain a store whose queue file was lost.
            Create::Never
                if !self.exists(QUEUE_FILE)? && (self.exists(IDENTITY_FILE)? || self.exists(self.entry)?) =>
            {
                folder::open_or_create
            }
            Create::Never => folder::open,
            Create::IfMissing => {
                self.make_folder()?;
                folder::open_or_create
            }
        };
        StoreLock::take(&queue, options.wait, opener).map_err(|error| match error {
            LockError::Late => self.label.late(&queue, options.wait),
            LockError::Io(error) if error.kind() == io::ErrorKind::NotFound => self.label.missing(),
            LockError::Io(error) => self.label.io(&queue, error),
        })
    }

    /// Refuses a store folder on a file system that other machines share. For a folder that does not exist yet, the
    /// nearest existing parent folder is checked.
    fn check_file_system(&self, create: Create) -> Result<()> {
        let above = match create {
            Create::Never => 1,
            Create::IfMissing => usize::MAX,
        };
        let nearest = self.label.folder.ancestors().take(above).find_map(|path| folder::shared_file_system(path).ok());
        match nearest.flatten() {
            Some(name) => Err(self.label.shared_file_system(&name)),
            None => Ok(()),
        }
    }

    /// Creates the store's folder, or checks that an existing folder may become a store, so that a mistyped path cannot
    /// turn another program's folder into a store.
    fn make_folder(&self) -> Result<()> {
        let path = &self.label.folder;
        if !path.is_dir() {
            return folder::create(path).map_err(|error| self.label.io(path, error));
        }
        // A folder without a queue file may still contain a store (perhaps of a different engine) whose queue file was
        // lost.
        if self.exists(QUEUE_FILE)? || self.exists(IDENTITY_FILE)? {
            return Ok(());
        }
        self.may_become_a_store()?;
        self.io("", folder::restrict(path, folder::FOLDER_MODE))
    }

    /// Checks, without creating anything, whether a store with files of `bytes` bytes can be created in this folder.
    pub(crate) fn check_creatable(&self, bytes: u64) -> Result<()> {
        self.check_file_system(Create::IfMissing)?;
        let path = &self.label.folder;
        if path.is_dir() && !self.exists(QUEUE_FILE)? {
            self.may_become_a_store()?;
        }
        folder::could_create(path).map_err(|(there, error)| self.label.io(there, error))?;
        let there = path.ancestors().find(|above| above.is_dir()).unwrap_or(path);
        check_disk(there, bytes).map_err(|(kind, advice)| self.label.error(kind, advice))
    }

    /// Refuses a folder that contains another program's files. A folder that does not exist is accepted.
    fn may_become_a_store(&self) -> Result<()> {
        let entries = match fs::read_dir(&self.label.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => self.io("", entries)?,
        };
        for entry in entries {
            let name = self.io("", entry)?.file_name();
            let known = [
                QUEUE_FILE,
                IDENTITY_FILE,
                IDENTITY_DRAFT_FILE,
                CREATION_MARKER_FILE,
                REVISION_FILE,
                RESERVED_SPACE_FILE,
                JOURNAL_FILE,
                "lost+found",
            ]
            .into_iter()
            .chain([self.entry])
            .any(|known| name == known);
            if !known {
                return Err(self.label.foreign_folder(&name.to_string_lossy()));
            }
        }
        Ok(())
    }

    /// Determines whether the folder contains a store and whether that store is complete. The caller must hold the
    /// store lock.
    pub(crate) fn inspect(&self) -> Result<FolderContents> {
        let text = match fs::read(self.path(IDENTITY_FILE)) {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(self.label.io(&self.path(IDENTITY_FILE), error)),
        };
        match text {
            Some(text) => self.judge_complete(&text),
            None => self.judge_incomplete(),
        }
    }

    fn judge_complete(&self, text: &str) -> Result<FolderContents> {
        let identity = Identity::parse(text).ok_or_else(|| self.label.damaged("its file store.id cannot be read"))?;
        if identity.engine != self.engine {
            return Err(self.label.other_engine(&identity.engine));
        }
        if !(OLDEST_FOLDER_FORMAT..=FOLDER_FORMAT).contains(&identity.format) {
            return Err(self
                .label
                .error(ErrorKind::UnknownFormat { found: identity.format }, "a newer margay made it: use that one"));
        }
        for name in self.files {
            let length = match fs::metadata(self.path(name)) {
                Ok(metadata) if metadata.is_file() => metadata.len(),
                Ok(_) => 0,
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                Err(error) => return Err(self.label.io(&self.path(name), error)),
            };
            if length == 0 {
                return Err(self.label.damaged(&format!("its file {name} is missing or empty")));
            }
        }
        Ok(FolderContents::Complete(identity.id))
    }

    fn judge_incomplete(&self) -> Result<FolderContents> {
        let is_unfinished = self.exists(CREATION_MARKER_FILE)?;
        if !is_unfinished && self.exists(self.entry)? {
            return Ok(FolderContents::Unnamed);
        }
        // If the folder contains a store of an engine other than the requested one, this call fails. Creating a new
        // store in a folder with another engine's store, or reporting a missing store, would hide the existing store.
        self.may_become_a_store()?;
        Ok(if is_unfinished { FolderContents::Unfinished } else { FolderContents::Nothing })
    }

    /// Removes the files of interrupted attempts to create the store, and creates the creation marker.
    pub(crate) fn begin_creation(&self) -> Result<()> {
        // A killed process may have created the folder without syncing the parent folders.
        self.io("", folder::sync_above(&self.label.folder))?;
        let marker = self.path(CREATION_MARKER_FILE);
        self.io(CREATION_MARKER_FILE, folder::open_or_create(&marker).and_then(|file| file.sync_all()))?;
        self.io("", folder::sync(&self.label.folder))?;
        self.io(self.entry, folder::remove(&self.path(self.entry)))?;
        self.io(REVISION_FILE, folder::remove(&self.path(REVISION_FILE)))?;
        self.io(JOURNAL_FILE, folder::remove(&self.path(JOURNAL_FILE)))?;
        self.io(IDENTITY_DRAFT_FILE, folder::remove(&self.path(IDENTITY_DRAFT_FILE)))
    }

    pub(crate) fn open_revision_file(&self) -> Result<RevisionFile> {
        let files = self.files.iter().chain(&[JOURNAL_FILE]).map(|name| self.path(name)).collect();
        self.io(REVISION_FILE, RevisionFile::open(&self.path(REVISION_FILE), files))
    }

    /// Fails if a store that was created with a journal has none, or one that is too short. Replacing a lost journal by
    /// an empty one could hide that the newest commits are gone, because the file `head`, which records the newest
    /// revision, may be lost as well.
    pub(crate) fn check_journal(&self) -> Result<()> {
        match fs::metadata(self.path(JOURNAL_FILE)) {
            Ok(found) if found.is_file() && found.len() < JOURNAL_BYTES => {
                Err(self.label.damaged("its file journal is cut off, and with it its newest changes"))
            }
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(self.label.damaged("its file journal is missing, and with it its newest changes"))
            }
            Err(error) => Err(self.label.io(&self.path(JOURNAL_FILE), error)),
        }
    }

    /// Opens the journal. Creates a missing journal for a new store, and for a store of an earlier Margay version.
    /// Fails if the file `head` mentions a journal record or checkpoint but the journal is missing.
    pub(crate) fn open_journal(&self, revision_file: Arc<RevisionFile>) -> Result<JournalFile> {
        if !self.exists(JOURNAL_FILE)? && revision_file.noted() != DurableParts::default() {
            return Err(self.label.damaged("its file journal is missing"));
        }
        self.io(JOURNAL_FILE, JournalFile::open(&self.path(JOURNAL_FILE), revision_file))
    }

    /// Writes the file `store.id`, which is the last step of creating a store.
    pub(crate) fn name(&self, id: Uuid) -> Result<()> {
        self.io(self.entry, folder::sync_all(&self.path(self.entry)))?;
        let identity = Identity::new(self.engine, id);
        self.io(IDENTITY_FILE, folder::write(&self.path(IDENTITY_FILE), &identity.to_string()))
    }

    /// Removes the creation marker, which marks a store whose creation is not finished. While the creation marker
    /// exists, the name `store.id` might not be durable: the process that wrote `store.id` may have been killed before
    /// it synced the folder.
    pub(crate) fn remove_marker(&self) -> Result<()> {
        if !self.exists(CREATION_MARKER_FILE)? {
            return Ok(());
        }
        self.io("", folder::sync(&self.label.folder))?;
        self.io(CREATION_MARKER_FILE, folder::remove(&self.path(CREATION_MARKER_FILE)))
    }
}

/// The content of a store's folder, as [`StoreFolder::inspect`] finds it.
pub(crate) enum FolderContents {
    Nothing,
    /// The folder contains a store that no process has used, because its creation was interrupted.
    Unfinished,
    /// The folder contains the engine's files, but no file `store.id`.
    Unnamed,
    Complete(Uuid),
}

pub(crate) const IDENTITY_FILE: &str = "store.id";

/// The layout version of newly created store folders, and the newest layout version that this program reads.
pub(crate) const FOLDER_FORMAT: u32 = 1;
/// The oldest layout version of a store folder that this program reads.
const OLDEST_FOLDER_FORMAT: u32 = 1;

/// Returns true if this program can read store folders of the layout version `format`.
pub(crate) fn is_known(format: u32) -> bool {
    (OLDEST_FOLDER_FORMAT..=FOLDER_FORMAT).contains(&format)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) engine: String,
    pub(crate) format: u32,
    /// The store's id, which a row of the store's table also contains. The id is the nil UUID if the folder's layout is
    /// unknown and `store.id` contains no id.
    pub(crate) id: Uuid,
}

impl Identity {
    /// Creates the identity of a store of `engine` in the newest folder layout.
    pub(crate) fn new(engine: &str, id: Uuid) -> Self {
        Self { engine: engine.to_owned(), format: FOLDER_FORMAT, id }
    }

    /// Parses the content of the file `store.id`; `None` if it is damaged. A `store.id` of an unknown layout version
    /// need not contain an id, because its lines may have a different meaning.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut engine = None;
        let mut format = None;
        let mut id = None;
        for line in text.lines() {
            match line.split_once(' ')? {
                ("engine", value) => engine = Some(value.to_owned()),
                ("format", value) => format = Some(value.parse().ok()?),
                ("id", value) => id = value.parse().ok(),
                _ => {}
            }
        }
        let (engine, format) = (engine?, format?);
        if !is_known(format) {
            return Some(Self { engine, format, id: id.unwrap_or_default() });
        }
        Some(Self { engine, format, id: id? })
    }
}

/// Returns the engine that the file `store.id` in a folder names, even if the rest of the file is damaged; `None` if
/// the file is missing or names no engine.
pub fn engine_in(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.join(IDENTITY_FILE)).ok()?;
    text.lines().find_map(|line| line.strip_prefix("engine ")).map(|engine| engine.trim().to_owned())
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "engine {}", self.engine)?;
        writeln!(f, "format {}", self.format)?;
        writeln!(f, "id {}", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_folder_id_is_read_as_written() {
        let identity = Identity::new("redb", Uuid::from_u128(7));
        let text = "engine redb\nformat 1\nid 00000000-0000-0000-0000-000000000007\n";
        assert_eq!(identity.to_string(), text);
        assert_eq!(Identity::parse(text), Some(identity));
    }

    #[test]
    fn store_folder_damage_is_seen() {
        for text in ["", "\0\0\0\0", "engine redb\n", "engine redb\nformat 1\n", "engine redb\nformat 1\nid 7\n"] {
            assert_eq!(Identity::parse(text), None, "{text:?}");
        }
        let later = Identity::parse("engine redb\nformat 9\nshape round\n").unwrap();
        assert_eq!((later.engine.as_str(), later.format), ("redb", 9));
    }
}
