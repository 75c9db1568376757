//! Locates the programs that run on the node.

use std::env;
use std::path::{Path, PathBuf};

/// Returns the folder with the programs of Kubernetes: that in `KUBERNETES_PROGRAMS`, which scripts/build-kubernetes
/// prints.
pub(crate) fn kubernetes() -> PathBuf {
    PathBuf::from(env::var_os("KUBERNETES_PROGRAMS").expect("KUBERNETES_PROGRAMS is not set: run `make kubernetes`"))
}

/// Returns the folder with a containerd that asks plugins for STATUS, if it is to run instead of Debian's.
pub(crate) fn containerd() -> Option<PathBuf> {
    env::var_os("CONTAINERD_PROGRAMS").map(PathBuf::from)
}

/// Returns a program of Margay, from the folder in `MARGAY_PROGRAMS`, else from the folder of this program.
pub(crate) fn margay(name: &str) -> PathBuf {
    let own = || env::current_exe().unwrap().parent().unwrap().to_owned();
    let file = env::var_os("MARGAY_PROGRAMS").map_or_else(own, PathBuf::from).join(name);
    assert!(file.is_file(), "{} is missing: run `make kubernetes`", file.display());
    file
}

/// Returns the program of the containers, which scripts/build-release has built.
pub(crate) fn pod() -> PathBuf {
    PathBuf::from(env::var_os("POD_PROGRAM").expect("POD_PROGRAM is not set: run `make kubernetes`"))
}

/// Returns the folder with the standard CNI plugins.
pub(crate) fn standard_plugins() -> &'static Path {
    let folders = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"].map(Path::new);
    let found = folders.into_iter().find(|folder| folder.join("bridge").exists());
    found.expect("the standard plugins are missing: scripts/setup kubernetes installs them")
}
