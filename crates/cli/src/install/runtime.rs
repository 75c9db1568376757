//! Finds the folders in which this node's container runtime looks for plugins.
//!
//! A container runtime searches a list of folders for the main plugin `calico`. The container runtime passes its list
//! of plugin folders to the main plugin as `CNI_PATH`. The main plugin searches the folders in `CNI_PATH` for
//! `calico-ipam`. The container runtime and the main plugin both run the first file that has the plugin's name. The
//! container runtime containerd has a single plugin folder (`bin_dir`), or since version 2.1 a list of plugin folders
//! (`bin_dirs`). CRI-O has a list of plugin folders (`plugin_dirs`), followed by the folder in the older setting
//! `plugin_dir`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use toml::{Table, Value};

use super::program::Role;
use super::{Install, program};
use crate::error::{CommandFailure, CommandResult};

/// The default plugin folder of all container runtimes.
const DEFAULT_FOLDER: &str = "/opt/cni/bin";

/// The names of containerd's CRI plugin in its configuration, newest first.
const CRI_PLUGINS: [&str; 3] = ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri"];

/// Where the list of plugin folders was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PathSource {
    /// The plugin folders were given on the command line.
    Given,
    /// The plugin folders were read from containerd's configuration file `config`; `folders` says how many plugin
    /// folders this containerd supports.
    Containerd { config: PathBuf, folders: FolderCount },
    /// The plugin folders were read from the configuration file of CRI-O at this path.
    Crio(PathBuf),
    /// No container runtime was found, so the list has only the default plugin folder.
    Default,
}

/// How many plugin folders a container runtime supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FolderCount {
    One,
    Several,
}

/// The folders in which the container runtime looks for plugins, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PluginPath {
    pub(crate) folders: Vec<PathBuf>,
    pub(crate) source: PathSource,
}

impl fmt::Display for PathSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given => f.write_str("--cni-bin-dir"),
            Self::Containerd { config, .. } => write!(f, "containerd, {}", config.display()),
            Self::Crio(config) => write!(f, "CRI-O, {}", config.display()),
            Self::Default => f.write_str("the default"),
        }
    }
}

impl fmt::Display for PluginPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.listed(), self.source)
    }
}

impl PluginPath {
    /// Finds the plugin folders in the command line or in the container runtime's configuration.
    pub(crate) fn find(args: &Install) -> CommandResult<Self> {
        if !args.cni_bin_dir.is_empty() {
            return Ok(Self { folders: args.cni_bin_dir.clone(), source: PathSource::Given });
        }
        match (read_containerd(&args.containerd_config)?, read_crio(&args.crio_config)?) {
            (Some(one), Some(other)) if one.folders != other.folders => Err(CommandFailure::new(format!(
                "this node has containerd and CRI-O, which look for plugins in different folders: {one}; {other}"
            ))
            .hint(
                "use --cni-bin-dir DIR to name each plugin folder, in search order, of the container runtime that the \
                 kubelet uses",
            )),
            (Some(path), _) | (None, Some(path)) => Ok(path),
            (None, None) => Ok(Self { folders: vec![DEFAULT_FOLDER.into()], source: PathSource::Default }),
        }
    }

    /// Returns the file that a CNI call runs as main or IPAM plugin: the first one with the plugin's name in the order
    /// of `CNI_PATH`. Like libcni, skips a subfolder that has the plugin's name.
    pub(crate) fn first(&self, role: Role) -> Option<PathBuf> {
        self.all(role).next()
    }

    /// Returns all files that have the name of a role's plugin, in the order of the plugin folders.
    pub(crate) fn all(&self, role: Role) -> impl Iterator<Item = PathBuf> + '_ {
        self.folders.iter().map(move |folder| folder.join(role.program())).filter(|file| file.is_file())
    }

    /// Returns the plugin folders in the format of `CNI_PATH`.
    pub(crate) fn listed(&self) -> String {
        let folders: Vec<_> = self.folders.iter().map(|folder| folder.display().to_string()).collect();
        folders.join(":")
    }

    /// Fails if the container runtime does not support `folder` as an additional plugin folder.
    pub(crate) fn check_own_folder(&self, folder: &Path) -> CommandResult<()> {
        match &self.source {
            PathSource::Containerd { config, folders: FolderCount::One }
                if !self.folders.iter().any(|known| known == folder) =>
            {
                Err(CommandFailure::new(format!(
                    "this containerd looks for plugins in one folder only, {}",
                    self.listed()
                ))
                .hint(format!(
                    "install without --own-folder. To use --own-folder, update to containerd 2.1, and list both plugin \
                     folders in bin_dirs in {}: first {}, then {}",
                    config.display(),
                    folder.display(),
                    self.listed()
                )))
            }
            _ => Ok(()),
        }
    }

    /// Returns a text that explains how to make the container runtime search `folder` first.
    pub(crate) fn how_to_prefer(&self, folder: &Path) -> String {
        let mut folders = vec![folder.to_owned()];
        folders.extend(self.folders.iter().filter(|other| *other != folder).cloned());
        let list: Vec<_> = folders.iter().map(|folder| format!("\"{}\"", folder.display())).collect();
        let list = list.join(", ");
        match &self.source {
            PathSource::Containerd { config, folders: FolderCount::Several } => format!(
                "set bin_dirs = [{list}] in [plugins.'io.containerd.cri.v1.runtime'.cni] of {}, run systemctl restart \
                 containerd, then margay install --status",
                config.display()
            ),
            PathSource::Containerd { .. } => {
                "undo the installation with margay install --undo --own-folder DIR, and install without \
                                          --own-folder: containerd before 2.1 looks in one folder only"
                    .to_owned()
            }
            PathSource::Crio(config) => format!(
                "write plugin_dirs = [{list}] below [crio.network] into {}.d/50-margay.conf, run systemctl restart crio, \
                 then margay install --status",
                config.display()
            ),
            PathSource::Given | PathSource::Default => {
                format!("make the runtime look in {list}, in this order, and name these folders with --cni-bin-dir")
            }
        }
    }
}

/// Reads the plugin folders from the configuration that the program containerd dumps, because the merging of imported
/// configuration files depends on containerd's version. If the program containerd is not on `PATH`, reads containerd's
/// configuration file itself.
fn read_containerd(config: &Path) -> CommandResult<Option<PluginPath>> {
    if !config.exists() {
        return Ok(None);
    }
    let program = find_on_path("containerd");
    let table = match &program {
        Some(program) => {
            let mut command = Command::new(program);
            command.arg("--config").arg(config).args(["config", "dump"]);
            let answer = program::run_program(command, b"").map_err(|error| unreadable(config, error))?;
            if !answer.success {
                return Err(unreadable(config, "containerd config dump fails"));
            }
            parse(config, &answer.stdout)?
        }
        None => {
            let table = parse(config, &read(config)?)?;
            if table.get("imports").and_then(Value::as_array).is_some_and(|imports| !imports.is_empty()) {
                return Err(unreadable(config, "it imports other files, and containerd is not here to ask"));
            }
            table
        }
    };
    let disabled = table.get("disabled_plugins").and_then(Value::as_array);
    if disabled.is_some_and(|names| names.iter().filter_map(Value::as_str).any(|name| CRI_PLUGINS.contains(&name))) {
        // Docker configures containerd without CRI, and such a containerd runs no pods.
        return Ok(None);
    }
    let cni = CRI_PLUGINS.iter().find_map(|name| table.get("plugins")?.get(name)?.get("cni"));
    let one = cni.and_then(|cni| cni.get("bin_dir")).and_then(Value::as_str).filter(|folder| !folder.is_empty());
    let several = cni.and_then(|cni| cni.get("bin_dirs"));
    let folders = match one {
        Some(folder) => vec![folder.into()],
        None => list(several).filter(|list| !list.is_empty()).unwrap_or_else(|| vec![DEFAULT_FOLDER.into()]),
    };
    // If containerd supports a list of plugin folders, its dumped configuration has `bin_dirs`. If the program
    // containerd was not found, it is assumed to support a list of plugin folders.
    let count = if several.is_some() || program.is_none() { FolderCount::Several } else { FolderCount::One };
    Ok(Some(PluginPath { folders, source: PathSource::Containerd { config: config.to_owned(), folders: count } }))
}

fn find_on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Reads CRI-O's plugin folders from CRI-O's configuration file and from the files in its `.d` folder. Settings in
/// later files override settings in earlier files.
fn read_crio(config: &Path) -> CommandResult<Option<PluginPath>> {
    let parts = PathBuf::from(format!("{}.d", config.display()));
    let mut files: Vec<PathBuf> = match parts.read_dir() {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_file()).collect(),
        Err(_) => Vec::new(),
    };
    files.sort();
    if config.exists() {
        files.insert(0, config.to_owned());
    }
    if files.is_empty() {
        return Ok(None);
    }
    let (mut folders, mut older) = (None, None);
    for file in files {
        let table = parse(&file, &read(&file)?)?;
        let network = table.get("crio").and_then(|crio| crio.get("network"));
        folders = list(network.and_then(|network| network.get("plugin_dirs"))).or(folders);
        let folder = network.and_then(|network| network.get("plugin_dir")).and_then(Value::as_str);
        older = folder.filter(|folder| !folder.is_empty()).map(PathBuf::from).or(older);
    }
    let mut folders = folders.unwrap_or_else(|| vec![DEFAULT_FOLDER.into()]);
    folders.extend(older);
    Ok(Some(PluginPath { folders, source: PathSource::Crio(config.to_owned()) }))
}

fn list(value: Option<&Value>) -> Option<Vec<PathBuf>> {
    Some(value?.as_array()?.iter().filter_map(Value::as_str).map(PathBuf::from).collect())
}

fn read(file: &Path) -> CommandResult<String> {
    std::fs::read_to_string(file).map_err(|error| unreadable(file, error))
}

fn parse(file: &Path, text: &str) -> CommandResult<Table> {
    // The TOML parser's error message would quote the faulty line, which may contain a registry's password.
    text.parse().map_err(|_| unreadable(file, "it is not valid TOML"))
}

fn unreadable(file: &Path, error: impl fmt::Display) -> CommandFailure {
    CommandFailure::new(format!("cannot tell from {} where plugins are: {error}", file.display()))
        .hint("use --cni-bin-dir DIR to name each plugin folder of the container runtime, in search order")
}
