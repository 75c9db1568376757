//! Compares Margay with other plugins and with minimal programs, alternating within one run, and prints medians and
//! ratios.
//!
//! Each measured time is the duration of a call, or of a whole process from before the spawn to after the wait, as a
//! container runtime sees it.
//!
//! Usage: bench [PART...] [--json FILE] [--baseline PLUGIN]. PLUGIN is another build of the plugin, which the parts
//! `single` and `cold` measure alternately with the current build. `bench report FILE` updates the pages of the book
//! with the findings in FILE.

mod api;
mod cluster;
mod contender;
mod crowd;
mod durable;
mod etcd;
mod fill;
mod findings;
mod loaded;
mod once;
mod operator;
mod pages;
mod plot;
mod report;
mod serve;
mod single;
mod size;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::findings::Findings;

/// Hundreds of simulated hosts and bare clients allocate memory from all threads at once, so the program does not use
/// the C library's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A function that runs one part of the benchmark and prints a table of the measurements.
type Part = fn(&Programs, &Path) -> Outcome<()>;

#[derive(Debug, Default)]
struct Programs {
    plugin: PathBuf,
    margay: PathBuf,
    host_local: PathBuf,
    floor_empty: PathBuf,
    floor_sled: PathBuf,
    /// A minimal program that commits to etcd, compiled and linked like the plugin.
    floor_etcd: PathBuf,
    /// A minimal program that creates a veth pair and a route, built like the plugin.
    floor_wire: PathBuf,
    /// Another build of the plugin, which is measured alternately with the current one.
    baseline: Option<PathBuf>,
}

impl Programs {
    /// Returns the folder that contains the programs as they are installed.
    fn installed() -> Outcome<PathBuf> {
        let here = std::env::current_exe()?;
        let folder = here.parent().ok_or("this program has no folder")?;
        Ok(folder.join(format!("../programs/{}", std::env::consts::ARCH)))
    }

    /// Finds the minimal programs beside this program, the installed programs in a folder beside it, and host-local
    /// where distributions install it.
    fn find(baseline: Option<PathBuf>) -> Outcome<Self> {
        if let Some(missing) = baseline.as_deref().filter(|path| !path.is_file()) {
            return Err(format!("{}: --baseline takes the file of another margay-ipam", missing.display()).into());
        }
        let here = std::env::current_exe()?;
        let folder = here.parent().ok_or("this program has no folder")?;
        let installed = Self::installed()?;
        let built = |folder: &Path, name: &str| -> Outcome<PathBuf> {
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
            plugin: built(&installed, "margay-ipam")?,
            margay: built(&installed, "margay")?,
            host_local,
            floor_empty: built(folder, "floor-empty")?,
            floor_sled: built(folder, "floor-sled")?,
            floor_etcd: built(&installed, "floor-etcd")?,
            floor_wire: built(&installed, "floor-wire")?,
            baseline,
        })
    }
}

#[derive(Debug, Default)]
struct Wish {
    parts: Vec<String>,
    /// The file to which the findings of the run are saved.
    file: Option<PathBuf>,
    /// Another build of the plugin, which is measured alternately with the current one.
    baseline: Option<PathBuf>,
}

impl Wish {
    fn read(arguments: &[String]) -> Outcome<Self> {
        let mut wish = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--json" => wish.file = Some(rest.next().ok_or("--json needs the name of a file")?.into()),
                "--baseline" => {
                    wish.baseline = Some(rest.next().ok_or("--baseline needs the file of a plugin")?.into());
                }
                "cluster" => wish.parts.extend(cluster::PARTS.iter().map(|(name, _)| (*name).to_owned())),
                part if names().any(|name| name == part) => wish.parts.push(part.to_owned()),
                other => {
                    let known: Vec<_> = names().collect();
                    return Err(
                        format!("there is no part {other}; there are: {}, and cluster", known.join(", ")).into()
                    );
                }
            }
        }
        Ok(wish)
    }

    fn has(&self, name: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|part| part == name)
    }
}

/// The parts of the benchmark that only print their measurements and return no findings.
const PRINTED: [(&str, Part); 7] = [
    ("single", single::run),
    ("crowd", crowd::run),
    ("queue", crowd::queue),
    ("loaded", loaded::run),
    ("durable", durable::run),
    ("size", size::run),
    ("etcd", |_, _| etcd::run()),
];

/// The parts of the benchmark that print their measurements and also return them as findings.
fn found() -> impl Iterator<Item = (&'static str, cluster::Part)> {
    [("operator", operator::run as cluster::Part), ("serve", serve::run), ("api", api::run)]
        .into_iter()
        .chain(cluster::PARTS)
}

fn names() -> impl Iterator<Item = &'static str> {
    PRINTED.iter().map(|(name, _)| *name).chain(found().map(|(name, _)| name))
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [command, rest @ ..] if command == "peak-of" => return single::print_peak_of(rest),
        [command, plugin, store] if command == "once" => return once::run(plugin.into(), store),
        [command, url] if command == "puts-of" => return cluster::print_puts(url),
        [command, minutes, rest @ ..] if command == "soak" => {
            let folder = tempfile::Builder::new().prefix("margay-bench").tempdir()?;
            let mut findings = cluster::soak::run(folder.path(), minutes.parse()?)?;
            findings.conclude("goals");
            return rest.first().map_or(Ok(()), |file| findings.write(Path::new(file)));
        }
        [command, file] if command == "report" => {
            return pages::update(&Findings::read(Path::new(file))?, Path::new("."));
        }
        _ => {}
    }
    let wish = Wish::read(&arguments)?;
    let programs = Programs::find(wish.baseline.clone())?;
    let folder = tempfile::Builder::new().prefix("margay-bench").tempdir()?;
    for (name, part) in PRINTED {
        if wish.has(name) {
            settle();
            part(&programs, folder.path())?;
        }
    }
    let mut findings = Findings::default();
    for (name, part) in found() {
        if wish.has(name) {
            settle();
            findings.take(part(&programs, folder.path())?);
        }
    }
    findings.conclude("goals");
    wish.file.map_or(Ok(()), |file| findings.write(&file))
}

/// Syncs all disks before a part of the benchmark starts, so that earlier writes do not slow it down.
fn settle() {
    nix::unistd::sync();
    std::thread::sleep(Duration::from_secs(2));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_chosen_by_name_and_unknown_ones_are_refused() {
        let wish = |text: &str| Wish::read(&text.split_whitespace().map(String::from).collect::<Vec<_>>());
        assert!(wish("").unwrap().has("cold") && wish("").unwrap().has("single"));
        let cluster = wish("cluster --json out").unwrap();
        assert!(cluster.has("claims") && !cluster.has("single") && cluster.file == Some("out".into()));
        assert!(wish("no-such-part").unwrap_err().to_string().contains("dead-node"));
        assert!(wish("--json").is_err());
        assert!(wish("cold --baseline old").unwrap().baseline == Some("old".into()) && wish("--baseline").is_err());
        assert!(Programs::find(Some("/no/such/plugin".into())).unwrap_err().to_string().contains("--baseline"));
    }
}
