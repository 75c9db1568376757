//! Replaces the engine of the pages' stores, if another engine is under test.

use datastore::Location;

use crate::tested::{drivers, instead};

/// The engines that the pages use.
const OF_THE_BOOK: [&str; 2] = ["sled", "redb"];

/// The text of a page with the engine under test.
pub(crate) fn text(text: &str) -> String {
    match instead() {
        Some(engine) => OF_THE_BOOK.iter().fold(text.to_owned(), |text, name| text.replace(name, engine)),
        None => text.to_owned(),
    }
}

/// A store that a page uses, on the engine under test.
pub(crate) fn location(engine: &str, path: &str) -> Location {
    drivers().of_engine(&text(engine), text(path)).unwrap()
}

/// The command of a page. The engine under test is not the default of any program, so a command without a store gets
/// its URL.
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

/// The output that a page expects. With another engine the store is given by URL, so no `store:` line is printed.
pub(crate) fn expected(page: &str) -> &str {
    match (instead(), page.split_once('\n')) {
        (Some(_), Some((first, rest))) if first.starts_with("store: ") => rest,
        _ => page,
    }
}
