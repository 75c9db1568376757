//! Locates the programs under test, and their store drivers. The programs under test are Margay's own, unless
//! [`use_instead`] sets others.

use std::path::PathBuf;
use std::sync::OnceLock;

use datastore::Drivers;

/// The programs under test, and the store drivers that are compiled into them.
#[derive(Clone, Copy, Debug)]
pub struct Programs {
    /// Returns the folder with the programs `margay` and `margay-ipam`.
    pub folder: fn() -> PathBuf,
    pub drivers: fn() -> Drivers,
}

/// Margay's own programs, which cargo builds into the parent of the folder with the test binaries.
const OWN: Programs = Programs {
    folder: || std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned(),
    drivers: stores::drivers,
};

static UNDER_TEST: OnceLock<Programs> = OnceLock::new();

/// Makes the helpers of `testkit` run the given programs in this process. `use_instead` must be called before any
/// helper that runs a program.
///
/// # Panics
/// Panics if this process has already used the programs under test, or set them before.
pub fn use_instead(programs: Programs) {
    assert!(UNDER_TEST.set(programs).is_ok(), "other programs are under test already");
}

fn under_test() -> Programs {
    *UNDER_TEST.get_or_init(|| OWN)
}

/// Returns the folder with all programs under test.
pub fn folder() -> PathBuf {
    (under_test().folder)()
}

fn program(name: &str, package: &str) -> PathBuf {
    let file = folder().join(name);
    assert!(file.is_file(), "{} is missing: cargo build --profile ci -p {package}", file.display());
    file
}

/// Returns the store drivers that are compiled into the programs under test.
pub fn drivers() -> Drivers {
    (under_test().drivers)()
}

/// Returns the path of the plugin: the path in `MARGAY_RELEASE_PLUGIN`, or else the plugin that cargo built.
pub fn plugin() -> PathBuf {
    let named = std::env::var_os("MARGAY_RELEASE_PLUGIN");
    named.map_or_else(|| program("margay-ipam", "margay-cni-plugin"), PathBuf::from)
}

/// Returns the path of the operator's command `margay`.
pub fn command() -> PathBuf {
    program("margay", "margay-cli")
}
