//! The file `store.id`: what the folder holds, and which store it is.
//!
//! It is written when all else is in place, so its being there says that a store was once complete. An engine that
//! opens empty beside it has lost its rows.

use std::fmt;
use std::fs;
use std::path::Path;

use uuid::Uuid;

/// The file.
pub(crate) const IDENTITY: &str = "store.id";

/// The layout that a new folder gets, and the newest that is read.
pub(crate) const FORMAT: u32 = 1;
/// The oldest layout that is read.
pub(crate) const OLDEST_FORMAT: u32 = 1;

/// True for a layout that this program reads.
pub(crate) fn is_known(format: u32) -> bool {
    (OLDEST_FORMAT..=FORMAT).contains(&format)
}

/// The content of `store.id`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The engine's name.
    pub(crate) engine: String,
    /// The layout of the folder.
    pub(crate) format: u32,
    /// The store's own id, which a row of its table repeats. Nil in a layout that is not ours.
    pub(crate) id: Uuid,
}

impl Identity {
    /// Of a store of `engine` in the layout that this program writes.
    pub(crate) fn new(engine: &str, id: Uuid) -> Self {
        Self { engine: engine.to_owned(), format: FORMAT, id }
    }

    /// Reads the file's text; `None` if it is damaged. A format that is not ours ends the reading: its lines may
    /// mean something else.
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

/// The engine that the file `store.id` in a folder names, also if the rest of that file is damaged; `None` if it names no engine.
pub fn engine_in(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.join(IDENTITY)).ok()?;
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
    fn it_reads_what_it_writes() {
        let identity = Identity::new("redb", Uuid::from_u128(7));
        let text = "engine redb\nformat 1\nid 00000000-0000-0000-0000-000000000007\n";
        assert_eq!(identity.to_string(), text);
        assert_eq!(Identity::parse(text), Some(identity));
    }

    #[test]
    fn damage_is_seen() {
        for text in ["", "\0\0\0\0", "engine redb\n", "engine redb\nformat 1\n", "engine redb\nformat 1\nid 7\n"] {
            assert_eq!(Identity::parse(text), None, "{text:?}");
        }
        let later = Identity::parse("engine redb\nformat 9\nshape round\n").unwrap();
        assert_eq!((later.engine.as_str(), later.format), ("redb", 9));
    }
}
