//! The place up to which the receiver of events has handled them.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kv::Revision;
use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};
use crate::output::whole_file;

/// A file with the last revision whose events were all handled.
#[derive(Debug)]
pub(crate) struct Cursor {
    path: PathBuf,
    saved: Saved,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Saved {
    /// The id of the store, or of the cluster; empty if it was not known.
    store: String,
    revision: i64,
}

impl Cursor {
    /// Reads the file; it need not be there.
    ///
    /// # Errors
    /// The file cannot be read, is none of ours, or is about another store than `store`.
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
        if let Some(saved) = saved.as_ref().filter(|saved| ![saved.store.as_str(), store].contains(&""))
            && saved.store != store
        {
            return Err(failed(format!("is about another store, {}, and this one is {store}", saved.store)));
        }
        let saved = saved.unwrap_or_else(|| Saved { store: store.to_owned(), revision: 0 });
        Ok(Self { path: path.to_owned(), saved })
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
        assert_eq!(Cursor::load(&path, "").unwrap().revision(), Some(Revision::new(7)), "a daemon does not say the id");
        let other = format!("{:?}", Cursor::load(&path, "b").unwrap_err());
        assert!(other.contains("is about another store, a, and this one is b"), "{other}");
        for garbage in ["", "{}", "[1", "{\"store\":\"a\",\"revision\":-1}"] {
            fs::write(&path, garbage).unwrap();
            let refused = format!("{:?}", Cursor::load(&path, "a").unwrap_err());
            assert!(refused.contains("is not one that margay watch has written"), "{garbage}: {refused}");
        }
    }
}
