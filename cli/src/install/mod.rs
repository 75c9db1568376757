//! `margay install`: Margay's plugin in place of Calico's `calico-ipam` on this node, and back.

mod place;
mod program;
mod report;
mod runtime;

use std::io::Write;
use std::path::{Path, PathBuf};

use datastore::{CalicoNetwork, ConfigError, Environment, calico_networks};

use crate::answer::Answer;
use crate::args::{Cli, Install};
use crate::error::{Failure, Result};
use place::{Installed, Others, Place};
use program::Program;
use report::{Change, Report};
use runtime::PluginPath;

/// The name by which Calico's main plugin calls for addresses.
const PROGRAM: &str = "calico-ipam";

/// The name that Margay's plugin is installed by.
const PLUGIN: &str = "margay-ipam";

/// Where plugins are, on one system or the other.
const PLUGIN_FOLDERS: [&str; 3] = ["/opt/cni/bin", "/usr/libexec/cni", "/usr/lib/cni"];

/// What keeps calico-node from putting its own back.
const KEEP: &str = "kubectl -n kube-system set env daemonset/calico-node -c install-cni UPDATE_CNI_BINARIES=false";

/// Installs, undoes or tells, and prints the answer.
pub(crate) fn run(
    cli: &Cli,
    args: &Install,
    env: &Environment<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<()> {
    let path = PluginPath::find(args)?;
    let answer = if args.status {
        status(args, &path)?
    } else if args.undo {
        undo(args, &path)?
    } else {
        install(cli, args, &path, env, err)?
    };
    answer.print(cli.output, out, err)
}

fn install(cli: &Cli, args: &Install, path: &PluginPath, env: &Environment<'_>, err: &mut dyn Write) -> Result<Answer> {
    let networks = networks(&cli.cni_conf_dir, err)?;
    let place = match (&args.own_folder, path.first()) {
        (Some(folder), _) => {
            path.check_own_folder(folder)?;
            Place::new(folder)
        }
        (None, Some(file)) => Place::new(file.parent().unwrap_or(Path::new("/"))),
        (None, None) => {
            // Somebody may have removed it after it was installed.
            let touched = places(args, path).find(|place| place.previous().exists());
            touched.ok_or_else(|| nothing_to_run(path))?
        }
    };
    let plugin = find_plugin(args, path)?;
    let version = match Program::ask(&plugin) {
        Program::Margay(version) => version,
        program => {
            return Err(Failure::new(format!("{} is no plugin of Margay's: {program}", plugin.display()))
                .hint("name Margay's plugin, built for this machine, with --plugin FILE"));
        }
    };
    for network in &networks {
        program::check_store(&plugin, network, &path.listed(), env)?;
    }
    place.check_writable()?;
    let change = Change::install(&place, &plugin, &version);
    if args.dry_run {
        return report::dry_run(&[change]);
    }
    let done = place.install(&plugin)?;
    let report = Report::make(path, args)?;
    let failure = report.failure(path, args);
    let answer = report::installed(&change, done, &report)?;
    Ok(match failure {
        Some(failure) => answer.incomplete(failure),
        None if done == Installed::Already => answer,
        None => answer.note(format!(
            "calico-node puts its own back when it starts anew, unless it was told not to, once for the cluster: {KEEP}"
        )),
    })
}

fn undo(args: &Install, path: &PluginPath) -> Result<Answer> {
    let touched: Vec<Place> = places(args, path).filter(Place::is_touched).collect();
    let mut changes = Vec::new();
    for place in touched {
        place.check_writable()?;
        let change = Change::undo(&place);
        if !args.dry_run {
            let others = path.all().any(|file| file != place.target());
            let undone = place.undo(if others { Others::Some } else { Others::None })?;
            changes.push(change.done(undone));
        } else {
            changes.push(change);
        }
    }
    if args.dry_run { report::dry_run(&changes) } else { report::undone(&changes, path) }
}

fn status(args: &Install, path: &PluginPath) -> Result<Answer> {
    let report = Report::make(path, args)?;
    let mut answer = report.answer(path)?;
    // The package may have been upgraded since; what is installed does not follow by itself.
    if let Some((file, newer)) = find_plugin(args, path).ok().and_then(|file| report.differs_from(&file)) {
        answer = answer
            .note(format!("{} is Margay's {newer}: margay install --beside-calico puts it into place", file.display()));
    }
    Ok(match report.failure(path, args) {
        Some(failure) => answer.incomplete(failure),
        None => answer,
    })
}

/// Every folder in which an installation may be.
fn places<'a>(args: &'a Install, path: &'a PluginPath) -> impl Iterator<Item = Place> + 'a {
    let own = args.own_folder.iter().filter(|folder| !path.folders.contains(folder));
    own.chain(&path.folders).map(Place::new)
}

/// The networks of Calico's, on stores that Margay's plugin works on.
fn networks(folder: &Path, err: &mut dyn Write) -> Result<Vec<CalicoNetwork>> {
    let (networks, unreadable) = calico_networks(folder);
    for problem in &unreadable {
        _ = writeln!(err, "warning: skipped {problem}");
    }
    if networks.is_empty() {
        return Err(Failure::new(format!(
            "no network in {} has \"ipam\": {{\"type\": \"{PROGRAM}\"}}",
            folder.display()
        ))
        .hint(
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

fn nothing_to_run(path: &PluginPath) -> Failure {
    Failure::new(format!("there is no {PROGRAM} in {path}")).hint(
        "calico-node puts it there when it starts; if the runtime looks elsewhere, name the folders with --cni-bin-dir",
    )
}
