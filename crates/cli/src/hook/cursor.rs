//! The place up to which the receiver of events has handled them.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kv::Revision;
use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};
use crate::output::whole_file;

/// The time between two writes that only record that nothing has happened.
const PAUSE: Duration = Duration::from_secs(10);

/// A file with the last revision whose events were all handled.
#[derive(Debug)]
pub(crate) struct Cursor {
    path: PathBuf,
    saved: Saved,
    /// The revision up to which there was nothing more to handle, perhaps not in the file yet.
    reached: Revision,
    written: Instant,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Saved {
    /// The id of the store, or of the cluster; empty in the cursors of earlier versions beside a daemon.
    store: String,
    revision: i64,
    /// Why no watch goes on at this cursor any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

impl Cursor {
    /// Reads the file; it need not be there. A cursor without a store's id becomes one of this store.
    ///
    /// # Errors
    /// The file cannot be read, is none of ours, is about another store than `store`, or was refused before.
    pub(crate) fn load(path: &Path, store: &str) -> Result<Self> {
        let advice = "remove the file to begin with what is in use now, or name another one";
        let failed = |why: String| Failure::new(format!("the cursor {} {why}", path.display())).hint(advice);
        let saved = match fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(failed(format!("cannot be read: {error}"))),
            Ok(bytes) => Some(
                serde_json::from_slice::<Saved>(&bytes)
                    .ok()
                    .filter(|saved| saved.revision > 0)
                    .ok_or_else(|| failed("is not one that margay watch has written".to_owned()))?,
            ),
        };
        let unused = Saved { store: store.to_owned(), revision: 0, refused: None };
        let mut saved = saved.unwrap_or(unused);
        if saved.store.is_empty() {
            store.clone_into(&mut saved.store);
        } else if !store.is_empty() && saved.store != store {
            return Err(failed(format!("is about another store, {}, and this one is {store}", saved.store)));
        }
        if let Some(why) = &saved.refused {
            return Err(failed(format!("was refused before: {why}")));
        }
        Ok(Self { path: path.to_owned(), saved, reached: Revision::UNSET, written: Instant::now() })
    }

    /// The last revision that was handled; `None` at the first run.
    pub(crate) fn revision(&self) -> Option<Revision> {
        Some(Revision::new(self.saved.revision)).filter(|revision| revision.is_set())
    }

    /// Records that all up to this revision was handled.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn save(&mut self, revision: Revision) -> Result<()> {
        if revision.get() <= self.saved.revision {
            return Ok(());
        }
        self.saved.revision = revision.get();
        self.written = Instant::now();
        self.write()
    }

    /// Records that there was nothing to handle up to this revision: in the file only now and then, since a busy cluster
    /// gets there twice a second, and when the watch ends ([`Self::finish`]).
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn reach(&mut self, revision: Revision) -> Result<()> {
        self.reached = self.reached.max(revision);
        if self.written.elapsed() < PAUSE { Ok(()) } else { self.finish() }
    }

    /// Writes what was reached.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.save(self.reached)
    }

    /// Records that the store does not go on at this cursor. Otherwise a later start could skip events: the store's revision
    /// grows, and passes the cursor.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn refuse(&mut self, why: &str) -> Result<()> {
        // The revision that was reached may not be in the file yet.
        self.saved.revision = self.saved.revision.max(self.reached.get());
        if self.revision().is_none() {
            return Ok(());
        }
        self.saved.refused = Some(why.to_owned());
        self.write()
    }

    fn write(&self) -> Result<()> {
        let text = serde_json::to_string(&self.saved).map_err(|error| Failure::new(format!("JSON: {error}")))?;
        whole_file(&self.path, &(text + "\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_only_goes_forward_and_is_one_stores() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cursor");
        let mut cursor = Cursor::load(&path, "a").unwrap();
        assert_eq!(cursor.revision(), None);
        cursor.save(Revision::new(7)).unwrap();
        cursor.save(Revision::new(5)).unwrap();
        assert_eq!(Cursor::load(&path, "a").unwrap().revision(), Some(Revision::new(7)));
        cursor.reach(Revision::new(6)).unwrap();
        cursor.reach(Revision::new(8)).unwrap();
        assert_eq!(Cursor::load(&path, "a").unwrap().revision(), Some(Revision::new(7)), "a write for nothing");
        cursor.finish().unwrap();
        assert_eq!(Cursor::load(&path, "a").unwrap().revision(), Some(Revision::new(8)));
        let other = format!("{:?}", Cursor::load(&path, "b").unwrap_err());
        assert!(other.contains("is about another store, a, and this one is b"), "{other}");
        // The cursor of an earlier version.
        fs::write(&path, r#"{"store":"","revision":7}"#).unwrap();
        Cursor::load(&path, "a").unwrap().save(Revision::new(8)).unwrap();
        assert!(Cursor::load(&path, "b").is_err());
        Cursor::load(&path, "a").unwrap().refuse("it went back").unwrap();
        let refused = format!("{:?}", Cursor::load(&path, "a").unwrap_err());
        assert!(refused.contains("was refused before: it went back"), "{refused}");
        let first = folder.path().join("first");
        let mut cursor = Cursor::load(&first, "a").unwrap();
        cursor.refuse("it went back").unwrap();
        assert!(!first.exists(), "nothing was reached");
        cursor.reach(Revision::new(7)).unwrap();
        cursor.refuse("it went back").unwrap();
        cursor.finish().unwrap();
        assert!(Cursor::load(&first, "a").is_err(), "a refusal at the first run");
        for garbage in ["", "{}", "[1", "{\"store\":\"a\",\"revision\":-1}"] {
            fs::write(&path, garbage).unwrap();
            let refused = format!("{:?}", Cursor::load(&path, "a").unwrap_err());
            assert!(refused.contains("is not one that margay watch has written"), "{garbage}: {refused}");
        }
    }
}
