//! Measures Margay against peers and floors, all in one run and in turns, and prints medians and ratios.
//!
//! Times are of whole processes, from before the spawn to after the wait, as a container runtime sees them; for etcd, of
//! calls.

mod contender;
mod crowd;
mod durable;
mod etcd;
mod fill;
mod loaded;
mod report;
mod single;
mod size;
#[path = "../../backend-etcd/tests/support/server.rs"]
mod support;

use std::error::Error;
use std::path::{Path, PathBuf};

/// What everything here returns.
type Outcome<T> = Result<T, Box<dyn Error>>;

/// One part of the measurements: prints its table.
type Part = fn(&Programs, &Path) -> Outcome<()>;

/// Where the programs under test are.
#[derive(Debug)]
struct Programs {
    plugin: PathBuf,
    host_local: PathBuf,
    floor_empty: PathBuf,
    floor_sled: PathBuf,
}

impl Programs {
    /// Beside this program, and where host-local is installed.
    fn find() -> Outcome<Self> {
        let here = std::env::current_exe()?;
        let folder = here.parent().ok_or("this program has no folder")?;
        let built = |name: &str| -> Outcome<PathBuf> {
            let path = folder.join(name);
            if path.exists() {
                Ok(path)
            } else {
                Err(format!("{} is missing: run `make bench`", path.display()).into())
            }
        };
        let host_local = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"]
            .map(|folder| Path::new(folder).join("host-local"))
            .into_iter()
            .find(|path| path.exists())
            .ok_or("host-local is missing: install containernetworking-plugins")?;
        Ok(Self {
            plugin: built("margay-ipam")?,
            host_local,
            floor_empty: built("floor-empty")?,
            floor_sled: built("floor-sled")?,
        })
    }
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [command, rest @ ..] = &arguments[..]
        && command == "peak-of"
    {
        return single::print_peak_of(rest);
    }
    if arguments == ["etcd"] {
        return etcd::run();
    }
    let programs = Programs::find()?;
    let folder = tempfile::Builder::new().prefix("margay-bench").tempdir()?;
    let parts: [(&str, Part); 6] = [
        ("single", single::run),
        ("crowd", crowd::run),
        ("queue", crowd::queue),
        ("loaded", loaded::run),
        ("durable", durable::run),
        ("size", size::run),
    ];
    for (name, part) in parts {
        if arguments.is_empty() || arguments.iter().any(|argument| argument == name) {
            part(&programs, folder.path())?;
        }
    }
    if arguments.is_empty() { etcd::run() } else { Ok(()) }
}
