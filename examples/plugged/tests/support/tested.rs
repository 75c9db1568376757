//! The programs under test: the programs of `examples/plugged`, linked under the names of Margay's own programs. The
//! environment variable `MARGAY_PLUGGED` names the store on which the tests run; by default, the first plugged store.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::{env, fs};

use driver::Drivers;

/// For each store that can be tested: its name, and the file (relative to the store's folder) to which it writes its
/// commits.
const PLUGGED: [(&str, &str); 4] =
    [("sqlite", "sqlite/db-wal"), ("fjall", "fjall/0.jnl"), ("sled", "sled/db"), ("redb", "db.redb")];

/// The folder that contains the programs under test.
static PROGRAMS: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("plugged");
    fs::create_dir_all(&folder).unwrap();
    for (name, program) in [
        ("margay", env!("CARGO_BIN_EXE_plugged-margay")),
        ("margay-ipam", env!("CARGO_BIN_EXE_plugged-margay-ipam")),
        ("margay-cni", env!("CARGO_BIN_EXE_plugged-margay-ipam")),
        ("torture", env!("CARGO_BIN_EXE_plugged-torture")),
    ] {
        // A link of an earlier run may lead to another target folder, if that folder was moved.
        let new = folder.join(format!("{name}.{}", std::process::id()));
        symlink(program, &new).unwrap();
        fs::rename(&new, folder.join(name)).unwrap();
    }
    folder
});

/// Sections of the book whose shell sessions are skipped on the stores of `examples/plugged`, each with the reason; `*`
/// stands for all sections of a page.
pub(crate) const NOT_RUN: &[(&str, &str, &str)] = &[
    ("back-up-and-restore.md", "Move", "redb's store and sled's would be one"),
    ("beside-calico.md", "*", "its store is Calico's etcd, which Calico's network names"),
    ("calico-plugin-replaced.md", "*", "its store is Calico's etcd, which Calico's network names"),
    ("coming-from-host-local.md", "The change", "its network names no store, and the default is sled's"),
    ("command-line.md", "store", "redb gives back room in its file, and has a format to raise"),
    ("secondary-networks.md", "*", "its store is Calico's etcd, which Calico's network names"),
];

pub(crate) fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

pub(crate) fn drivers() -> Drivers {
    plugged::drivers()
}

/// Returns the name of the store under test, and the path of the file to which its commits are written.
pub(crate) fn plugged_store() -> (&'static str, &'static str) {
    let wanted = env::var("MARGAY_PLUGGED");
    let found = PLUGGED.into_iter().find(|(name, _)| wanted.as_ref().map_or(true, |wanted| wanted == name));
    found.unwrap_or_else(|| panic!("MARGAY_PLUGGED: no plugged store is called {wanted:?}"))
}

/// Returns the engine that replaces sled and redb in the book's shell sessions.
pub(crate) fn instead() -> Option<&'static str> {
    Some(plugged_store().0)
}

pub(crate) fn programs() -> PathBuf {
    PROGRAMS.clone()
}

/// Makes the helpers of `testkit` run the programs of `examples/plugged`.
pub(crate) fn use_plugged() {
    testkit::programs::use_instead(testkit::programs::Programs { folder: programs, drivers });
}

pub(crate) fn command() -> PathBuf {
    PROGRAMS.join("margay")
}

pub(crate) fn plugin() -> PathBuf {
    PROGRAMS.join("margay-ipam")
}
