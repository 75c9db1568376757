//! The programs under test, and their stores. `examples/plugged` runs some of these tests with others.

use std::path::PathBuf;

use datastore::Drivers;

/// The stores that the programs know.
pub(crate) fn drivers() -> Drivers {
    stores::drivers()
}

/// The plugin: the one that cargo built for the tests, or the one that `MARGAY_RELEASE_PLUGIN` names.
pub(crate) fn plugin() -> PathBuf {
    std::env::var_os("MARGAY_RELEASE_PLUGIN").map_or_else(|| env!("CARGO_BIN_EXE_margay-ipam").into(), PathBuf::from)
}

/// The operator's command, which is built into the same folder.
pub(crate) fn command() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_margay-ipam")).with_file_name("margay")
}
