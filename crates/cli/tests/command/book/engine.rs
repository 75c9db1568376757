//! Replaces the store engine in the book's pages if another engine is under test.

use datastore::Location;

use crate::tested::{drivers, instead};

/// The store engines that the book's pages use.
const OF_THE_BOOK: [&str; 2] = ["sled", "redb"];

/// Returns the text of a page after replacing every store engine in it by the engine under test.
pub(crate) fn text(text: &str) -> String {
    match instead() {
        Some(engine) => OF_THE_BOOK.iter().fold(text.to_owned(), |text, name| text.replace(name, engine)),
        None => text.to_owned(),
    }
}

/// Returns the location of a store that a page uses, on the engine under test.
pub(crate) fn location(engine: &str, path: &str) -> Location {
    drivers().of_engine(&text(engine), text(path)).unwrap()
}

/// Rewrites a command in a page so that it uses the store engine under test. No program uses the engine under test by
/// default, so the store's URL is added to a command that names no store.
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

/// Returns the command output that a page of the book shows. A test on another engine names the store by URL, and
/// `margay` then prints no `store:` line, so this line is removed from the page's output.
pub(crate) fn expected(page: &str) -> &str {
    match (instead(), page.split_once('\n')) {
        (Some(_), Some((first, rest))) if first.starts_with("store: ") => rest,
        _ => page,
    }
}
