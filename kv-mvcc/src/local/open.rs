//! Opening and making a store on disk.

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv::{ErrorKind, Result};
use uuid::Uuid;

use super::errors::Place;
use super::folder;
use super::guarded::{Guarded, caught};
use super::identity::{FORMAT, Identity};
use super::queue::{Turn, TurnError};
use crate::table::Table;

const QUEUE: &str = "queue";
const IDENTITY: &str = "store.id";
const IDENTITY_DRAFT: &str = "store.new";
const MARKER: &str = "creating";

/// The engines there are, by name and by what they keep in the folder.
const ENGINES: [(&str, &str); 2] = [("redb", "db.redb"), ("sled", "sled")];

/// An engine that keeps a table in a store's folder.
pub trait Engine {
    /// Its name, which is also its `datastore_type`.
    fn name(&self) -> &'static str;

    /// The name of its one file or folder in the store's folder.
    fn entry(&self) -> &'static str;

    /// The files that hold its data and are never empty, relative to the store's folder.
    fn files(&self) -> &'static [&'static str];

    /// Opens the table at `entry`, an absolute path, and makes it if it is not there; `store` names it in errors.
    ///
    /// The caller has the turn at the store, catches panics, and refuses commits after a failed one.
    ///
    /// # Errors
    /// `Corrupt`, `Io`, `NoSpace`, `Locked`, `UnknownFormat`.
    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>>;
}

/// Whether a store that is not there is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Create {
    /// It is an error, and nothing is written.
    Never,
    /// It is made.
    IfMissing,
}

/// How to open a store on disk.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Whether a store that is not there is made.
    pub create: Create,
    /// How long to wait for the turn while other processes have the store.
    pub wait: Duration,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { create: Create::Never, wait: Duration::from_secs(10) }
    }
}

impl OpenOptions {
    /// With this answer to whether a missing store is made.
    #[must_use]
    pub fn with_create(mut self, create: Create) -> Self {
        self.create = create;
        self
    }

    /// With this limit on the wait for the turn.
    #[must_use]
    pub fn with_wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }
}

/// A table that is open, in a folder whose identity is still to be settled.
struct Prepared {
    folder: StoreFolder,
    table: Box<dyn Table>,
    expects: Expects,
}

/// What `store.id` said.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expects {
    /// This store and no other.
    This(Uuid),
    /// Nothing: it was lost, and what the table says counts.
    Any,
    /// Nothing: the store is new.
    New,
}

struct StoreFolder {
    place: Place,
    engine: &'static str,
    entry: &'static str,
    files: &'static [&'static str],
}

impl StoreFolder {
    fn new(engine: &dyn Engine, path: &Path) -> Result<Self> {
        // A later change of the working folder must not lead a reopened engine astray.
        let folder = std::path::absolute(path);
        let folder = folder.as_deref().unwrap_or(path).to_owned();
        let store = format!("{}://{}", engine.name(), folder.display());
        Ok(Self { place: Place { store, folder }, engine: engine.name(), entry: engine.entry(), files: engine.files() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.folder.join(name)
    }

    fn io<T>(&self, name: &str, result: io::Result<T>) -> Result<T> {
        result.map_err(|error| self.place.io(&self.path(name), error))
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.io(name, fs::exists(self.path(name)))
    }

    /// Waits for the turn; the folder and the queue are made first if they may be.
    fn take_turn(&self, options: &OpenOptions) -> Result<Turn> {
        let queue = self.path(QUEUE);
        let opener = match options.create {
            Create::Never => folder::open,
            Create::IfMissing => {
                self.make_folder()?;
                folder::open_or_create
            }
        };
        Turn::take(&queue, options.wait, opener).map_err(|error| match error {
            TurnError::Late => self.place.late(&queue, options.wait),
            TurnError::Io(error) if error.kind() == io::ErrorKind::NotFound => self.place.missing(),
            TurnError::Io(error) => self.place.io(&queue, error),
        })
    }

    /// Makes the folder, or sees to it that the one that is there may become a store: a slip of the pen must not turn
    /// somebody's folder into one.
    fn make_folder(&self) -> Result<()> {
        let path = &self.place.folder;
        if !path.is_dir() {
            return folder::create(path).map_err(|error| self.place.io(path, error));
        }
        if self.exists(QUEUE)? {
            return Ok(());
        }
        for entry in self.io("", fs::read_dir(path))? {
            let name = self.io("", entry)?.file_name();
            let known = [QUEUE, IDENTITY, IDENTITY_DRAFT, MARKER, "lost+found"]
                .into_iter()
                .chain(ENGINES.map(|(_, entry)| entry))
                .any(|known| name == known);
            if !known {
                return Err(self.place.foreign_folder(&name.to_string_lossy()));
            }
        }
        self.io("", folder::restrict(path, folder::FOLDER_MODE))
    }

    /// What is in the folder, once we have the turn.
    fn look(&self) -> Result<Found> {
        let text = match fs::read(self.path(IDENTITY)) {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(self.place.io(&self.path(IDENTITY), error)),
        };
        match text {
            Some(text) => self.look_at_complete(&text),
            None => self.look_at_incomplete(),
        }
    }

    fn look_at_complete(&self, text: &str) -> Result<Found> {
        let identity = Identity::parse(text).ok_or_else(|| self.place.damaged("its file store.id cannot be read"))?;
        if identity.engine != self.engine {
            return Err(self.place.other_engine(&identity.engine));
        }
        if identity.format != FORMAT {
            return Err(self
                .place
                .error(ErrorKind::UnknownFormat { found: identity.format }, "a newer margay made it: use that one"));
        }
        for name in self.files {
            let length = match fs::metadata(self.path(name)) {
                Ok(metadata) if metadata.is_file() => metadata.len(),
                Ok(_) => 0,
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                Err(error) => return Err(self.place.io(&self.path(name), error)),
            };
            if length == 0 {
                return Err(self.place.damaged(&format!("its file {name} is missing or empty")));
            }
        }
        Ok(Found::Complete(identity.id))
    }

    fn look_at_incomplete(&self) -> Result<Found> {
        for (engine, entry) in ENGINES {
            if engine != self.engine && self.exists(entry)? {
                return Err(self.place.other_engine(engine));
            }
        }
        if self.exists(MARKER)? {
            return Ok(Found::Unfinished);
        }
        if self.exists(self.entry)? { Ok(Found::Unnamed) } else { Ok(Found::Nothing) }
    }

    /// Leaves the folder as if nothing had been there, but for a mark that says so.
    fn begin_creation(&self) -> Result<()> {
        let marker = self.path(MARKER);
        self.io(MARKER, folder::open_or_create(&marker).and_then(|file| file.sync_all()))?;
        self.io("", folder::sync(&self.place.folder))?;
        self.io(self.entry, folder::remove(&self.path(self.entry)))?;
        self.io(IDENTITY_DRAFT, folder::remove(&self.path(IDENTITY_DRAFT)))
    }

    /// Writes the identity, the last step of a creation.
    fn name(&self, id: Uuid) -> Result<()> {
        self.io(self.entry, folder::sync_all(&self.path(self.entry)))?;
        let identity = Identity::new(self.engine, id);
        self.io(IDENTITY, folder::write(&self.path(IDENTITY), &identity.to_string()))
    }

    fn remove_marker(&self) -> Result<()> {
        self.io(MARKER, folder::remove(&self.path(MARKER)))
    }
}

/// What is in a store's folder.
enum Found {
    /// Nothing.
    Nothing,
    /// A creation that did not come to its end. Nobody has used that store yet.
    Unfinished,
    /// An engine's files without `store.id`.
    Unnamed,
    /// A store with this id.
    Complete(Uuid),
}

/// Waits for the turn and opens the table, or makes it.
fn prepare(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<Prepared> {
    let folder = StoreFolder::new(engine, path)?;
    let turn = folder.take_turn(options)?;
    let expects = match (folder.look()?, options.create) {
        (Found::Complete(id), _) => Expects::This(id),
        (Found::Unnamed, _) => Expects::Any,
        (Found::Nothing | Found::Unfinished, Create::Never) => return Err(folder.place.missing()),
        (Found::Nothing | Found::Unfinished, Create::IfMissing) => {
            folder.begin_creation()?;
            Expects::New
        }
    };
    let entry = folder.path(engine.entry());
    let table = caught(&folder.place, kv::Operation::Open, || engine.open(&entry, &folder.place.store))?;
    let table: Box<dyn Table> = Box::new(Guarded::new(table, folder.place.clone(), turn));
    let restricted = folder::restrict_all(&entry);
    if expects == Expects::New {
        folder.io(engine.entry(), restricted)?;
    }
    if expects != Expects::New && is_empty(&*table)? {
        return Err(folder.place.damaged("all its rows are gone"));
    }
    Ok(Prepared { folder, table, expects })
}

fn is_empty(table: &dyn Table) -> Result<bool> {
    let mut empty = true;
    // Rows begin with an ASCII letter.
    table.view()?.scan(&[], &[0xff], &mut |_, _| {
        empty = false;
        ControlFlow::Break(())
    })?;
    Ok(empty)
}

/// Compares the id that the table's rows give with what the folder says, or writes it there.
fn settle(folder: &StoreFolder, expects: Expects, id: Uuid) -> Result<()> {
    match expects {
        Expects::This(expected) if expected != id => {
            return Err(folder.place.damaged("its file store.id belongs to another store"));
        }
        Expects::This(_) => {}
        Expects::Any | Expects::New => folder.name(id)?,
    }
    if folder.exists(MARKER)? { folder.remove_marker() } else { Ok(()) }
}
