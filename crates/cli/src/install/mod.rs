//! Replaces Calico's plugin `calico-ipam` on this node with Margay's plugin; a second step replaces the main plugin
//! `calico`. The command `margay install --undo` restores Calico's plugins. The command `margay install` reports which
//! programs CNI calls run now, which plugin files it has changed, and what the user should do next.

mod plugin_folder;
mod program;
mod runtime;

use std::os::unix::fs::MetadataExt;
use std::path::{self, Path, PathBuf};
use std::{fs, io};

use clap::{ArgGroup, Args};
use datastore::{CalicoNetwork, ConfigError, Location, calico_networks};
use serde::Serialize;

use self::plugin_folder::{InstallOutcome, InstallState, OtherPlugins, PluginFolder, UndoOutcome};
pub(crate) use self::program::PluginProgram;
use self::program::Role;
use self::runtime::PluginPath;
use crate::command::{CommandAnswer, Invocation, StandaloneCommand};
use crate::error::{CommandFailure, CommandResult};

pub(crate) const HELP: &str = "\
calico-node restores its own plugin when it starts. To prevent that, once:
  kubectl -n kube-system set env daemonset/calico-node -c install-cni \\
    UPDATE_CNI_BINARIES=false

Examples:
  margay install --beside-calico --dry-run
  margay install --beside-calico
  margay install --beside-calico --main-plugin
  margay install --undo

Exit code 0: a CNI call runs Margay's plugin now (--undo: the other); else 1.";

/// The arguments of `install`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("task").required(true))]
pub(crate) struct Install {
    /// Install Margay's plugin in place of calico-ipam on this node
    #[arg(long, group = "task")]
    beside_calico: bool,

    /// Restore the plugin that margay install replaced
    #[arg(long, group = "task")]
    pub(crate) undo: bool,

    /// Show which calico-ipam and calico programs a CNI call would run now
    #[arg(long, group = "task")]
    pub(crate) status: bool,

    /// Replace (--undo: restore) the calico plugin; replace calico-ipam first
    #[arg(long, conflicts_with_all = ["status", "plugin"])]
    main_plugin: bool,

    /// Show what would be changed, and change nothing
    #[arg(long, conflicts_with = "status")]
    pub(crate) dry_run: bool,

    /// Plugin folder of the runtime; repeat for each folder, in search order
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    pub(crate) cni_bin_dir: Vec<PathBuf>,

    /// Install in DIR, which the runtime searches first; keep Calico's plugin
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    own_folder: Option<PathBuf>,

    /// Plugin file to install [default: margay-ipam in a plugin folder]
    #[arg(long, value_name = "FILE", requires = "beside_calico")]
    pub(crate) plugin: Option<PathBuf>,

    /// containerd configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/containerd/config.toml")]
    pub(crate) containerd_config: PathBuf,

    /// CRI-O configuration file; the folder FILE.d is read as well
    #[arg(long, value_name = "FILE", default_value = "/etc/crio/crio.conf")]
    pub(crate) crio_config: PathBuf,
}

/// Makes a path absolute, because the container runtime has a working directory of its own.
fn absolute(text: &str) -> io::Result<PathBuf> {
    path::absolute(text)
}

const PLUGIN_FILE: &str = "margay-ipam";

/// The folders in which distributions and Kubernetes keep CNI plugins.
pub(crate) const PLUGIN_FOLDERS: [&str; 3] = ["/opt/cni/bin", "/usr/libexec/cni", "/usr/lib/cni"];

/// The command by which a user keeps calico-node from overwriting Margay's plugin with Calico's.
const KEEP_PLUGIN_COMMAND: &str =
    "kubectl -n kube-system set env daemonset/calico-node -c install-cni UPDATE_CNI_BINARIES=false";

/// The note after an installation for a store on etcd, whose history fills the database unless some program compacts it.
const COMPACTION_NOTE: &str = "some program must delete etcd's old history, or etcd fills up. kube-apiserver and \
     Calico's kube-controllers do; margay etcd status says who does it here. If none does: systemctl enable --now \
     margay-compact.timer on one or more nodes";

impl StandaloneCommand for Install {
    /// Installs a plugin, undoes the installation, or reports the status of both plugins.
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let path = PluginPath::find(self)?;
        let role = if self.main_plugin { Role::Main } else { Role::Ipam };
        let answer = if self.status {
            status(self, &path)?
        } else if self.undo {
            undo(role, self, &path)?
        } else {
            install(role, self, &path, invocation)?
        };
        invocation.print(answer)?;
        Ok(0)
    }
}

fn install(
    role: Role,
    args: &Install,
    path: &PluginPath,
    invocation: &mut Invocation<'_>,
) -> CommandResult<CommandAnswer> {
    let networks = networks(role, invocation)?;
    let plugin_folder = find_folder(role, args, path)?;
    let plugin = match role {
        Role::Ipam => find_plugin(args, path)?,
        Role::Main => installed_ipam(path)?,
    };
    let version = match PluginProgram::ask(&plugin, role) {
        PluginProgram::Margay(version) => version,
        program => {
            let failure = CommandFailure::new(format!("{} is no plugin of Margay's: {program}", plugin.display()));
            return Err(failure.hint(match role {
                Role::Ipam => "name the file of a Margay plugin built for this machine with --plugin FILE".to_owned(),
                Role::Main => {
                    format!("install a version that has a main plugin first: {}", Role::Ipam.install())
                }
            }));
        }
    };
    // The write permission is checked before the stores are opened. Without write permission, a user often cannot open
    // a store, either; as root, the command can do both.
    plugin_folder.check_writable()?;
    for network in &networks {
        program::check_store(&plugin, role, network, &path.listed(), invocation.env)?;
    }
    let change = FolderChange::install(&plugin_folder, &plugin, &version);
    if args.dry_run {
        return dry_run_answer(&[change]);
    }
    let done = plugin_folder.install(&plugin)?;
    let report = RoleStatus::make(role, path, args)?;
    let failure = report.failure(path, args);
    let mut answer = installed_answer(&change, done, &report)?;
    if let Some(note) = warn_of_different_programs(path) {
        answer = answer.note(note);
    }
    Ok(match failure {
        Some(failure) => answer.incomplete(failure),
        None if done == InstallOutcome::Already => answer,
        None => {
            let answer = answer.note(format!(
                "calico-node puts its own back when it starts anew, unless it is configured not to, once for the cluster: {KEEP_PLUGIN_COMMAND}"
            ));
            let is_on_cluster = networks.iter().any(|network| network.store.as_ref().is_ok_and(Location::is_shared));
            // The main plugin uses the store of the IPAM plugin, whose installation has printed the note already.
            if role == Role::Ipam && is_on_cluster { answer.note(COMPACTION_NOTE) } else { answer }
        }
    })
}

/// Undoes the installation of the main plugin and, if `role` is the IPAM plugin, also of `calico-ipam`.
fn undo(role: Role, args: &Install, path: &PluginPath) -> CommandResult<CommandAnswer> {
    let roles: &[Role] = if role == Role::Main { &[Role::Main] } else { &[Role::Main, Role::Ipam] };
    let mut changes = Vec::new();
    let mut failure = None;
    for role in roles {
        // If the main plugin cannot be restored, `calico-ipam` is still restored.
        if let Err(error) = undo_one(*role, args, path, &mut changes) {
            failure = failure.or(Some(error));
        }
    }
    if let Some(failure) = failure.take_if(|_| changes.is_empty()) {
        return Err(failure);
    }
    let answer = if args.dry_run { dry_run_answer(&changes)? } else { undone_answer(roles, &changes, path)? };
    Ok(match failure {
        Some(failure) => answer.incomplete(failure),
        None => answer,
    })
}

fn undo_one(role: Role, args: &Install, path: &PluginPath, changes: &mut Vec<FolderChange>) -> CommandResult<()> {
    let touched: Vec<PluginFolder> = plugin_folders(role, args, path).filter(PluginFolder::is_touched).collect();
    for plugin_folder in touched {
        plugin_folder.check_writable()?;
        let change = FolderChange::undo(&plugin_folder);
        if !args.dry_run {
            let others = path.all(role).any(|file| file != plugin_folder.target());
            let undone = plugin_folder.undo(if others { OtherPlugins::Some } else { OtherPlugins::None })?;
            changes.push(change.done(undone));
        } else {
            changes.push(change);
        }
    }
    Ok(())
}

fn status(args: &Install, path: &PluginPath) -> CommandResult<CommandAnswer> {
    let report = RoleStatus::make(Role::Ipam, path, args)?;
    let main = RoleStatus::make(Role::Main, path, args)?;
    let mut answer = report.answer(path, &main)?;
    // The package of Margay's plugin may have been upgraded after the installation, but the upgrade has not changed the
    // installed copy of the plugin.
    if let Some((file, newer)) = find_plugin(args, path).ok().and_then(|file| report.differs_from(&file)) {
        let again = Role::Ipam.install();
        answer = answer.note(format!("{} is Margay's {newer}: {again} puts it into place", file.display()));
    }
    if let Some(note) = warn_of_different_programs(path) {
        answer = answer.note(note);
    }
    // The main plugin is optional: a missing main plugin counts as a failure only if an installation of the main plugin
    // was completed or begun.
    let failure = report.failure(path, args).or_else(|| main.is_wanted().then(|| main.failure(path, args)).flatten());
    Ok(match failure {
        Some(failure) => answer.incomplete(failure),
        None => answer,
    })
}

/// Returns the folder into which the plugin of a role is to be installed.
fn find_folder(role: Role, args: &Install, path: &PluginPath) -> CommandResult<PluginFolder> {
    match (&args.own_folder, path.first(role)) {
        (Some(folder), _) => {
            path.check_own_folder(folder)?;
            Ok(PluginFolder::new(role, folder))
        }
        (None, Some(file)) => Ok(PluginFolder::new(role, file.parent().unwrap_or(Path::new("/")))),
        (None, None) => {
            // Something may have deleted Margay's plugin since it was installed; the folder then still has the plugin
            // that Margay's plugin replaced.
            let touched = plugin_folders(role, args, path).find(|plugin_folder| plugin_folder.previous().exists());
            touched.ok_or_else(|| nothing_to_run(role, path))
        }
    }
}

/// Returns the folders in which Margay's plugin may be installed.
fn plugin_folders<'a>(role: Role, args: &'a Install, path: &'a PluginPath) -> impl Iterator<Item = PluginFolder> + 'a {
    let own = args.own_folder.iter().filter(|folder| !path.folders.contains(folder));
    own.chain(&path.folders).map(move |folder| PluginFolder::new(role, folder))
}

/// Returns Calico's networks whose configuration names the plugin of a role. Fails if a network that uses the plugin
/// has the Kubernetes API as its datastore.
fn networks(role: Role, invocation: &mut Invocation<'_>) -> CommandResult<Vec<CalicoNetwork>> {
    let folder = invocation.options.cni_conf_dir.as_path();
    let (mut networks, unreadable) = calico_networks(invocation.drivers, folder);
    for problem in &unreadable {
        _ = writeln!(invocation.err, "warning: skipped {problem}");
    }
    let mut wanted = format!("\"ipam\": {{\"type\": \"{}\"}}", Role::Ipam.program());
    if role == Role::Main {
        let program = role.program();
        networks.retain(|network| network.conf.get("type").is_some_and(|kind| kind == program));
        wanted = format!("\"type\": \"{program}\" and {wanted}");
    }
    if networks.is_empty() {
        return Err(CommandFailure::new(format!("no network in {} has {wanted}", folder.display())).hint(
            "use --cni-conf-dir to name the folder of Calico's network configuration; for a node without Calico, see \
             docs/network-configuration.md",
        ));
    }
    for network in &networks {
        if matches!(network.store, Err(ConfigError::Kubernetes)) {
            return Err(CommandFailure::new(format!(
                "{} keeps addresses in the Kubernetes API (datastore_type kubernetes), which Margay does not support",
                network.file.display()
            ))
            .hint("keep Calico's plugin on this node: Margay supports only Calico on etcd (datastore_type etcdv3)"));
        }
    }
    Ok(networks)
}

/// Returns the file of the IPAM plugin that CNI calls run now. Fails if CNI calls run an IPAM plugin that is not
/// Margay's, because the main plugin is installed as a hard link to Margay's IPAM plugin.
fn installed_ipam(path: &PluginPath) -> CommandResult<PathBuf> {
    let file = path.first(Role::Ipam).ok_or_else(|| nothing_to_run(Role::Ipam, path))?;
    match PluginProgram::ask(&file, Role::Ipam) {
        PluginProgram::Margay(_) => Ok(file),
        program => Err(CommandFailure::new(format!("a CNI call for addresses runs {} ({program})", file.display()))
            .hint(format!("install Margay's IPAM plugin first: {}", Role::Ipam.install()))),
    }
}

fn find_plugin(args: &Install, path: &PluginPath) -> CommandResult<PathBuf> {
    if let Some(plugin) = &args.plugin {
        return match plugin.metadata() {
            Ok(metadata) if metadata.is_file() => Ok(plugin.clone()),
            Ok(_) => Err(CommandFailure::new(format!("{} is no file", plugin.display()))
                .hint("name the file of Margay's plugin with --plugin FILE")),
            Err(error) => Err(CommandFailure::new(format!("{}: {error}", plugin.display()))
                .hint("install the plugin with make install, or name another file with --plugin FILE")),
        };
    }
    let usual = PLUGIN_FOLDERS.iter().map(PathBuf::from);
    let mut folders = path.folders.iter().cloned().chain(usual);
    folders.find_map(|folder| Some(folder.join(PLUGIN_FILE)).filter(|file| file.is_file())).ok_or_else(|| {
        CommandFailure::new(format!("{PLUGIN_FILE} is not in {}, nor in {}", path.listed(), PLUGIN_FOLDERS.join(", ")))
            .hint("install the plugin with make install, or name the file of the plugin with --plugin FILE")
    })
}

fn nothing_to_run(role: Role, path: &PluginPath) -> CommandFailure {
    CommandFailure::new(format!("there is no {} in {path}", role.program())).hint(
        "start calico-node, which installs Calico's plugins, or name the runtime's folders with --cni-bin-dir DIR",
    )
}

/// The installation status of one of the two plugins on this node.
#[derive(Debug)]
struct RoleStatus {
    role: Role,
    /// The plugin file that a CNI call runs now, and the program in this file.
    runs: Option<(PathBuf, PluginProgram)>,
    /// The plugin folders in which an installation of the plugin was completed or begun.
    folders: Vec<InstalledFolder>,
}

/// A plugin folder in which an installation was completed or begun.
#[derive(Debug)]
struct InstalledFolder {
    folder: PathBuf,
    state: Option<InstallState>,
    unfinished: bool,
    previous: Option<PathBuf>,
}

#[derive(Serialize)]
struct StatusJson<'a> {
    #[serde(flatten)]
    ipam: RoleJson<'a>,
    plugin_path: &'a [PathBuf],
    plugin_path_from: String,
    main_plugin: RoleJson<'a>,
}

#[derive(Serialize)]
struct RoleJson<'a> {
    ours: bool,
    runs: Option<RunsJson<'a>>,
    installed: Vec<InstalledJson<'a>>,
}

#[derive(Serialize)]
struct RunsJson<'a> {
    file: &'a Path,
    program: &'static str,
    version: Option<&'a str>,
}

#[derive(Serialize)]
struct InstalledJson<'a> {
    folder: &'a Path,
    version: Option<&'a str>,
    complete: bool,
    overwritten: bool,
    previous_version: Option<&'a str>,
}

impl RoleStatus {
    fn make(role: Role, path: &PluginPath, args: &Install) -> CommandResult<Self> {
        let runs = path.first(role).map(|file| {
            let program = PluginProgram::ask(&file, role);
            (file, program)
        });
        let mut seen = Vec::new();
        for plugin_folder in plugin_folders(role, args, path).filter(PluginFolder::is_touched) {
            seen.push(InstalledFolder {
                state: plugin_folder.state()?,
                unfinished: plugin_folder.is_unfinished(),
                previous: Some(plugin_folder.previous()).filter(|file| file.symlink_metadata().is_ok()),
                folder: plugin_folder.folder().to_owned(),
            });
        }
        Ok(Self { role, runs, folders: seen })
    }

    /// True if an installation of this plugin was completed or begun in any folder.
    fn is_wanted(&self) -> bool {
        !self.folders.is_empty()
    }

    fn is_ours(&self) -> bool {
        self.runs.as_ref().is_some_and(|(_, program)| program.is_ours())
    }

    /// If CNI calls run a version of Margay's plugin that differs from the version of the file `plugin`, returns this
    /// file and its version.
    fn differs_from(&self, plugin: &Path) -> Option<(PathBuf, String)> {
        let (_, PluginProgram::Margay(runs)) = self.runs.as_ref()? else { return None };
        match PluginProgram::ask(plugin, self.role) {
            PluginProgram::Margay(version) if version != *runs => Some((plugin.to_owned(), version)),
            _ => None,
        }
    }

    /// True if another program has replaced Margay's plugin in a plugin folder since the installation.
    fn is_overwritten(&self, seen: &InstalledFolder) -> bool {
        let there = self.runs.as_ref().filter(|(file, _)| file.parent() == Some(&seen.folder));
        !seen.unfinished && there.is_some_and(|(_, program)| !program.is_ours())
    }

    /// Returns the failure to report if CNI calls do not run Margay's plugin.
    fn failure(&self, path: &PluginPath, args: &Install) -> Option<CommandFailure> {
        let (again, undo) = (self.role.install(), self.role.undo());
        let Some((file, program)) = &self.runs else { return Some(nothing_to_run(self.role, path)) };
        if program.is_ours() {
            return None;
        }
        let file = file.display();
        if self.folders.iter().any(|seen| self.is_overwritten(seen)) {
            let failure = CommandFailure::new(format!("{file} was overwritten since Margay's was put there"));
            return Some(failure.hint(format!(
                "run {again} again; to keep calico-node from overwriting the plugin, run: {KEEP_PLUGIN_COMMAND}"
            )));
        }
        if let Some(seen) = self.folders.iter().find(|seen| seen.unfinished) {
            let failure = CommandFailure::new(format!("an installation in {} was interrupted", seen.folder.display()));
            let advice = format!("finish the installation with {again}, or undo the installation with {undo}");
            return Some(failure.hint(advice));
        }
        // Margay's plugin is installed, but the container runtime finds another plugin file first.
        let own = self.folders.first().map(|seen| seen.folder.as_path()).or(args.own_folder.as_deref());
        Some(match own {
            Some(folder) => {
                CommandFailure::new(format!("a CNI call runs {file}, and not what is in {}", folder.display()))
                    .hint(path.how_to_prefer(folder))
            }
            None => CommandFailure::new(format!("a CNI call runs {file}, which is not Margay's"))
                .hint(format!("install Margay's plugin with: {again}")),
        })
    }

    fn answer(&self, path: &PluginPath, main: &Self) -> CommandResult<CommandAnswer> {
        let mut lines = vec![self.runs_line("Runs now:    "), format!("Plugin path: {path}")];
        if self.folders.is_empty() {
            lines.push("Installed:   no".to_owned());
        }
        self.add_folders(&mut lines);
        if main.runs.is_some() || main.is_wanted() {
            lines.push(main.runs_line("Main plugin: "));
            main.add_folders(&mut lines);
        }
        let json = StatusJson {
            ipam: self.json(),
            plugin_path: &path.folders,
            plugin_path_from: path.source.to_string(),
            main_plugin: main.json(),
        };
        CommandAnswer::new(lines.join("\n"), &json)
    }

    fn runs_line(&self, label: &str) -> String {
        match &self.runs {
            Some((file, program)) => format!("{label}{} ({program})", file.display()),
            None => format!("{label}no {}", self.role.program()),
        }
    }

    fn add_folders(&self, lines: &mut Vec<String>) {
        for seen in &self.folders {
            let folder = seen.folder.display();
            lines.push(match &seen.state {
                Some(state) if !seen.unfinished => format!("Installed:   Margay {} in {folder}", state.version),
                _ => format!("Installed:   not completely, in {folder}"),
            });
            if let Some(previous) = &seen.previous {
                lines.push(format!("Kept:        {} ({})", previous.display(), seen.previous_reported()));
            }
        }
    }

    fn json(&self) -> RoleJson<'_> {
        let runs = self.runs.as_ref().map(|(file, program)| RunsJson {
            file,
            program: match program {
                PluginProgram::Margay(_) => "margay",
                PluginProgram::Other(_) => "other",
                PluginProgram::Broken(_) => "broken",
            },
            version: program.version(),
        });
        let installed = self.folders.iter().map(|seen| self.installed_json(seen)).collect();
        RoleJson { ours: self.is_ours(), runs, installed }
    }

    fn installed_json<'a>(&self, seen: &'a InstalledFolder) -> InstalledJson<'a> {
        InstalledJson {
            folder: &seen.folder,
            version: seen.state.as_ref().map(|state| state.version.as_str()),
            complete: !seen.unfinished,
            overwritten: self.is_overwritten(seen),
            previous_version: seen.previous_version(),
        }
    }
}

impl InstalledFolder {
    fn previous_version(&self) -> Option<&str> {
        self.state.as_ref()?.previous.as_ref()?.version.as_deref()
    }

    fn previous_reported(&self) -> &str {
        self.previous_version().unwrap_or("it reports no version")
    }
}

/// A planned or completed change of a plugin file in a folder.
#[derive(Debug, Serialize)]
struct FolderChange {
    #[serde(skip)]
    role: Role,
    file: PathBuf,
    action: &'static str,
    version: Option<String>,
    #[serde(skip)]
    text: String,
}

impl FolderChange {
    /// Describes a planned installation of Margay's plugin.
    fn install(plugin_folder: &PluginFolder, plugin: &Path, version: &str) -> Self {
        let file = plugin_folder.target();
        let mut text = format!("put {} (Margay {version}) into place as {}", plugin.display(), file.display());
        if file.is_file() && !PluginProgram::ask(&file, plugin_folder.role()).is_ours() {
            text += &format!(", and keep what is there as {}", plugin_folder.previous().display());
        }
        Self { role: plugin_folder.role(), file, action: "install", version: Some(version.to_owned()), text }
    }

    /// Describes the planned restoration of the plugin file that `margay install` replaced.
    fn undo(plugin_folder: &PluginFolder) -> Self {
        let text = format!("put back {} as it was before", plugin_folder.target().display());
        Self { role: plugin_folder.role(), file: plugin_folder.target(), action: "undo", version: None, text }
    }

    /// Turns the planned restoration of a plugin into a report of its outcome `undone`.
    fn done(self, undone: UndoOutcome) -> Self {
        let file = self.file.display();
        let (action, text) = match undone {
            UndoOutcome::Restored => ("restored", format!("{file} is what it was before")),
            UndoOutcome::Removed => ("removed", format!("{file} is gone; it was only there for Margay")),
            UndoOutcome::Left => ("left", format!("{file} is not Margay's any more, and stays")),
        };
        let version = self
            .file
            .is_file()
            .then(|| PluginProgram::ask(&self.file, self.role).version().map(str::to_owned))
            .flatten();
        let text = version.as_ref().map_or(text.clone(), |version| format!("{text} ({version})"));
        Self { action, text, version, ..self }
    }
}

#[derive(Serialize)]
struct ChangesJson<'a> {
    dry_run: bool,
    changes: &'a [FolderChange],
    #[serde(skip_serializing_if = "Option::is_none")]
    ours: Option<bool>,
}

fn dry_run_answer(changes: &[FolderChange]) -> CommandResult<CommandAnswer> {
    let lines: Vec<_> = changes.iter().map(|change| format!("would {}", change.text)).collect();
    let text = if lines.is_empty() { "nothing to do".to_owned() } else { lines.join("\n") };
    CommandAnswer::new(text, &ChangesJson { dry_run: true, changes, ours: None })
}

fn installed_answer(change: &FolderChange, done: InstallOutcome, report: &RoleStatus) -> CommandResult<CommandAnswer> {
    let (file, version) = (change.file.display(), change.version.as_deref().unwrap_or_default());
    let mut text = match done {
        InstallOutcome::Now => format!("{file} is Margay's {version} now"),
        InstallOutcome::Already => format!("{file} is Margay's {version} already"),
    };
    let here = report.folders.iter().find(|seen| change.file.parent() == Some(&seen.folder));
    if let Some((seen, previous)) = here.and_then(|seen| Some((seen, seen.previous.as_ref()?))) {
        text += &format!("; what was there is kept as {} ({})", previous.display(), seen.previous_reported());
    }
    let change = FolderChange {
        role: change.role,
        file: change.file.clone(),
        action: if done == InstallOutcome::Now { "installed" } else { "already" },
        version: change.version.clone(),
        text: String::new(),
    };
    CommandAnswer::new(text, &ChangesJson { dry_run: false, changes: &[change], ours: Some(report.is_ours()) })
}

fn undone_answer(roles: &[Role], changes: &[FolderChange], path: &PluginPath) -> CommandResult<CommandAnswer> {
    let lines: Vec<_> = changes.iter().map(|change| change.text.as_str()).collect();
    let text = if lines.is_empty() { format!("nothing was installed in {path}") } else { lines.join("\n") };
    let is_ours = |role: &&Role| path.first(**role).is_some_and(|file| PluginProgram::ask(&file, **role).is_ours());
    let ours = roles.iter().find(is_ours);
    let answer = CommandAnswer::new(text, &ChangesJson { dry_run: false, changes, ours: Some(ours.is_some()) })?;
    Ok(match ours {
        Some(role) => answer.incomplete(
            CommandFailure::new(format!(
                "a CNI call still runs Margay's {}, which margay install has not put there",
                role.program()
            ))
            .hint(
                "let calico-node install Calico's plugin into another folder in CNI_PATH, then delete Margay's plugin \
                 (`margay install --status` shows its path)",
            ),
        ),
        None => answer,
    })
}

/// Returns a warning if CNI calls run different programs of Margay as main plugin and as IPAM plugin. The main plugin
/// and the IPAM plugin count as different programs if their versions differ, or if they are separate files although one
/// could be a hard link to the other.
fn warn_of_different_programs(path: &PluginPath) -> Option<String> {
    let ours = |role| {
        let file = path.first(role)?;
        let PluginProgram::Margay(version) = PluginProgram::ask(&file, role) else { return None };
        let metadata = fs::metadata(&file).ok()?;
        Some((file, version, metadata))
    };
    let (main, main_version, one) = ours(Role::Main)?;
    let (ipam, version, other) = ours(Role::Ipam)?;
    let is_one = one.ino() == other.ino() || one.dev() != other.dev();
    if is_one && main_version == version {
        return None;
    }
    let (main, ipam, again) = (main.display(), ipam.display(), Role::Main.install());
    Some(format!(
        "{main} (Margay {main_version}) is not the same program as {ipam} (Margay {version}): {again} makes it so"
    ))
}
