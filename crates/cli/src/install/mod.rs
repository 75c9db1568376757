//! `margay install`: puts Margay's plugins in the place of Calico's `calico-ipam` and, as a second step, `calico` on
//! this node, and goes back to Calico's.

pub(crate) mod args;
mod place;
mod program;
mod report;
mod role;
mod runtime;

use std::path::{Path, PathBuf};

use datastore::{CalicoNetwork, ConfigError, calico_networks};

use crate::answer::Answer;
use crate::command::{Call, Standalone};
use crate::error::{Failure, Result};
use args::Install;
use place::{Installed, Others, Place};
pub(crate) use program::Program;
use report::{Change, Report};
use role::Role;
use runtime::PluginPath;

/// The file name of Margay's plugin.
const PLUGIN: &str = "margay-ipam";

/// The folders of plugins on different systems.
pub(crate) const PLUGIN_FOLDERS: [&str; 3] = ["/opt/cni/bin", "/usr/libexec/cni", "/usr/lib/cni"];

/// The command that keeps calico-node from putting its own plugin back.
const KEEP: &str = "kubectl -n kube-system set env daemonset/calico-node -c install-cni UPDATE_CNI_BINARIES=false";

impl Standalone for Install {
    /// Installs, goes back or shows the status, and prints the answer.
    fn run(&self, call: &mut Call<'_>) -> Result<u8> {
        let path = PluginPath::find(self)?;
        let role = if self.main_plugin { Role::Main } else { Role::Ipam };
        let answer = if self.status {
            status(self, &path)?
        } else if self.undo {
            undo(role, self, &path)?
        } else {
            install(role, self, &path, call)?
        };
        call.print(answer)?;
        Ok(0)
    }
}

fn install(role: Role, args: &Install, path: &PluginPath, call: &mut Call<'_>) -> Result<Answer> {
    let networks = networks(role, call)?;
    let place = find_place(role, args, path)?;
    let plugin = match role {
        Role::Ipam => find_plugin(args, path)?,
        Role::Main => installed_ipam(path)?,
    };
    let version = match Program::ask(&plugin, role) {
        Program::Margay(version) => version,
        program => {
            let failure = Failure::new(format!("{} is no plugin of Margay's: {program}", plugin.display()));
            return Err(failure.hint(match role {
                Role::Ipam => "name Margay's plugin, built for this machine, with --plugin FILE".to_owned(),
                Role::Main => format!("an older one knows no main plugin: first {}", Role::Ipam.install()),
            }));
        }
    };
    // Before the stores, because a user without this right often cannot use a store either; running as root solves both.
    place.check_writable()?;
    for network in &networks {
        program::check_store(&plugin, role, network, &path.listed(), call.env)?;
    }
    let change = Change::install(&place, &plugin, &version);
    if args.dry_run {
        return report::dry_run(&[change]);
    }
    let done = place.install(&plugin)?;
    let report = Report::make(role, path, args)?;
    let failure = report.failure(path, args);
    let mut answer = report::installed(&change, done, &report)?;
    if let Some(note) = report::apart(path) {
        answer = answer.note(note);
    }
    Ok(match failure {
        Some(failure) => answer.incomplete(failure),
        None if done == Installed::Already => answer,
        None => answer.note(format!(
            "calico-node puts its own back when it starts anew, unless it is configured not to, once for the cluster: {KEEP}"
        )),
    })
}

/// Goes back to Calico's main plugin alone, or to both of its plugins, the main plugin first.
fn undo(role: Role, args: &Install, path: &PluginPath) -> Result<Answer> {
    let roles: &[Role] = if role == Role::Main { &[Role::Main] } else { &[Role::Main, Role::Ipam] };
    let mut changes = Vec::new();
    let mut failure = None;
    for role in roles {
        // After a failure the other plugin is still put back.
        if let Err(error) = undo_one(*role, args, path, &mut changes) {
            failure = failure.or(Some(error));
        }
    }
    if let Some(failure) = failure.take_if(|_| changes.is_empty()) {
        return Err(failure);
    }
    let answer = if args.dry_run { report::dry_run(&changes)? } else { report::undone(roles, &changes, path)? };
    Ok(match failure {
        Some(failure) => answer.incomplete(failure),
        None => answer,
    })
}

fn undo_one(role: Role, args: &Install, path: &PluginPath, changes: &mut Vec<Change>) -> Result<()> {
    let touched: Vec<Place> = places(role, args, path).filter(Place::is_touched).collect();
    for place in touched {
        place.check_writable()?;
        let change = Change::undo(&place);
        if !args.dry_run {
            let others = path.all(role).any(|file| file != place.target());
            let undone = place.undo(if others { Others::Some } else { Others::None })?;
            changes.push(change.done(undone));
        } else {
            changes.push(change);
        }
    }
    Ok(())
}

fn status(args: &Install, path: &PluginPath) -> Result<Answer> {
    let report = Report::make(Role::Ipam, path, args)?;
    let main = Report::make(Role::Main, path, args)?;
    let mut answer = report.answer(path, &main)?;
    // The package may have been upgraded since; the installed plugin does not follow by itself.
    if let Some((file, newer)) = find_plugin(args, path).ok().and_then(|file| report.differs_from(&file)) {
        let again = Role::Ipam.install();
        answer = answer.note(format!("{} is Margay's {newer}: {again} puts it into place", file.display()));
    }
    if let Some(note) = report::apart(path) {
        answer = answer.note(note);
    }
    // The main plugin that calls run is Calico's unless ours was requested.
    let failure = report.failure(path, args).or_else(|| main.is_wanted().then(|| main.failure(path, args)).flatten());
    Ok(match failure {
        Some(failure) => answer.incomplete(failure),
        None => answer,
    })
}

/// The place in which the plugin of a role will be installed.
fn find_place(role: Role, args: &Install, path: &PluginPath) -> Result<Place> {
    match (&args.own_folder, path.first(role)) {
        (Some(folder), _) => {
            path.check_own_folder(folder)?;
            Ok(Place::new(role, folder))
        }
        (None, Some(file)) => Ok(Place::new(role, file.parent().unwrap_or(Path::new("/")))),
        (None, None) => {
            // Somebody may have removed the plugin after it was installed.
            let touched = places(role, args, path).find(|place| place.previous().exists());
            touched.ok_or_else(|| nothing_to_run(role, path))
        }
    }
}

/// The places in which an installation may be.
fn places<'a>(role: Role, args: &'a Install, path: &'a PluginPath) -> impl Iterator<Item = Place> + 'a {
    let own = args.own_folder.iter().filter(|folder| !path.folders.contains(folder));
    own.chain(&path.folders).map(move |folder| Place::new(role, folder))
}

/// Calico's networks that use the plugin of a role. A network on the Kubernetes API is refused.
fn networks(role: Role, call: &mut Call<'_>) -> Result<Vec<CalicoNetwork>> {
    let folder = call.options.cni_conf_dir.as_path();
    let (mut networks, unreadable) = calico_networks(call.drivers, folder);
    for problem in &unreadable {
        _ = writeln!(call.err, "warning: skipped {problem}");
    }
    let mut wanted = format!("\"ipam\": {{\"type\": \"{}\"}}", Role::Ipam.program());
    if role == Role::Main {
        let program = role.program();
        networks.retain(|network| network.conf.get("type").is_some_and(|kind| kind == program));
        wanted = format!("\"type\": \"{program}\" and {wanted}");
    }
    if networks.is_empty() {
        return Err(Failure::new(format!("no network in {} has {wanted}", folder.display())).hint(
            "this is for nodes on which Calico runs: name the folder with its networks with --cni-conf-dir; without \
                 Calico see docs/network-configuration.md",
        ));
    }
    for network in &networks {
        if matches!(network.store, Err(ConfigError::Kubernetes)) {
            return Err(Failure::new(format!(
                "{} keeps addresses in the Kubernetes API (datastore_type kubernetes), which Margay does not support",
                network.file.display()
            ))
            .hint("leave this node to Calico's plugin; only a Calico on etcd (datastore_type etcdv3) can share with Margay"));
        }
    }
    Ok(networks)
}

/// The plugin for addresses that calls run now. It must be Margay's: the main plugin becomes a second name of it.
fn installed_ipam(path: &PluginPath) -> Result<PathBuf> {
    let file = path.first(Role::Ipam).ok_or_else(|| nothing_to_run(Role::Ipam, path))?;
    match Program::ask(&file, Role::Ipam) {
        Program::Margay(_) => Ok(file),
        program => Err(Failure::new(format!("a CNI call for addresses runs {} ({program})", file.display()))
            .hint(format!("the main plugin is the second step: first {}", Role::Ipam.install()))),
    }
}

fn find_plugin(args: &Install, path: &PluginPath) -> Result<PathBuf> {
    if let Some(plugin) = &args.plugin {
        return match plugin.metadata() {
            Ok(metadata) if metadata.is_file() => Ok(plugin.clone()),
            Ok(_) => Err(Failure::new(format!("{} is no file", plugin.display())).hint("name Margay's plugin")),
            Err(error) => Err(Failure::new(format!("{}: {error}", plugin.display()))
                .hint("make install puts the plugin into place; or name another with --plugin FILE")),
        };
    }
    let usual = PLUGIN_FOLDERS.iter().map(PathBuf::from);
    let mut folders = path.folders.iter().cloned().chain(usual);
    folders.find_map(|folder| Some(folder.join(PLUGIN)).filter(|file| file.is_file())).ok_or_else(|| {
        Failure::new(format!("{PLUGIN} is not in {}, nor in {}", path.listed(), PLUGIN_FOLDERS.join(", ")))
            .hint("make install puts it into place; or name it with --plugin FILE")
    })
}

fn nothing_to_run(role: Role, path: &PluginPath) -> Failure {
    Failure::new(format!("there is no {} in {path}", role.program())).hint(
        "calico-node puts it there when it starts; if the runtime looks elsewhere, name the folders with --cni-bin-dir",
    )
}
