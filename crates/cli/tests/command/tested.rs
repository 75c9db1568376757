//! Names the programs that the book's tests run and the stores that they use. `examples/plugged` runs the tests of the
//! book with other programs and stores.

use std::path::{Path, PathBuf};

pub(crate) use testkit::programs::{command, drivers, folder as programs, plugin};

/// The store engine that replaces sled and redb in the book's pages; `None` keeps sled and redb.
pub(crate) fn instead() -> Option<&'static str> {
    None
}

/// Sections of the book that cannot be run with the engine under test, each with the reason; `*` stands for the whole
/// page.
pub(crate) const NOT_RUN: &[(&str, &str, &str)] = &[];

pub(crate) fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}
