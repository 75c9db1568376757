//! The programs under test, and their stores. `examples/plugged` runs the book with others.

use std::path::{Path, PathBuf};

use datastore::Drivers;

/// The engine that stands in the book in the place of sled and redb; `None` leaves the pages as they are.
pub(crate) fn instead() -> Option<&'static str> {
    None
}

/// Sections of the book that cannot be run with that engine, and why; `*` is the whole page.
pub(crate) const NOT_RUN: &[(&str, &str, &str)] = &[];

/// The pages of the book.
pub(crate) fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// The stores that the programs know.
pub(crate) fn drivers() -> Drivers {
    stores::drivers()
}

/// The operator's command.
pub(crate) fn command() -> PathBuf {
    env!("CARGO_BIN_EXE_margay").into()
}

/// The folder with all programs.
pub(crate) fn programs() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_margay")).parent().unwrap().to_owned()
}

/// The plugin that was built beside the command.
pub(crate) fn plugin() -> PathBuf {
    let file = programs().join("margay-ipam");
    assert!(file.is_file(), "{} is missing: cargo build --profile ci -p margay-cni-plugin", file.display());
    file
}
