//! The engine of the pages' stores: the pages' own, or another one in its place.

use datastore::Location;

use crate::tested::{drivers, instead};

/// The engines of the pages.
const OF_THE_BOOK: [&str; 2] = ["sled", "redb"];

/// A text of a page.
pub(crate) fn text(text: &str) -> String {
    match instead() {
        Some(engine) => OF_THE_BOOK.iter().fold(text.to_owned(), |text, name| text.replace(name, engine)),
        None => text.to_owned(),
    }
}

/// A store of a page.
pub(crate) fn location(engine: &str, path: &str) -> Location {
    drivers().of_engine(&text(engine), text(path)).unwrap()
}

/// A command of a page. Another engine is no program's default, so a command without a store gets its URL.
pub(crate) fn command(line: &str) -> String {
    let line = text(line);
    let names_one = ["://", "memory:", "--folder"].iter().any(|way| line.contains(way));
    match (instead(), line.strip_prefix("margay ")) {
        (Some(engine), Some(rest)) if !names_one => {
            format!("margay --store {engine}:///var/lib/margay/ipam.{engine} {rest}")
        }
        _ => line,
    }
}

/// The output that a page expects. A command does not report a store that it was given by URL.
pub(crate) fn expected(page: &str) -> &str {
    match (instead(), page.split_once('\n')) {
        (Some(_), Some((first, rest))) if first.starts_with("store: ") => rest,
        _ => page,
    }
}
