//! Names the programs and stores under test. `examples/plugged` runs the book with other programs and stores.

use std::path::{Path, PathBuf};

pub(crate) use testkit::programs::{command, drivers, folder as programs, plugin};

/// The engine that replaces sled and redb in the book; `None` uses the engines of the pages.
pub(crate) fn instead() -> Option<&'static str> {
    None
}

/// Sections of the book that cannot be run with the engine under test, each with the reason; `*` stands for the whole
/// page.
pub(crate) const NOT_RUN: &[(&str, &str, &str)] = &[];

pub(crate) fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}
