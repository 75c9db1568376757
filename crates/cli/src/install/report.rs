//! The report: the program that a call runs now, the changes, and the next step.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::args::Install;
use super::place::{Installed, Place, State, Undone};
use super::program::Program;
use super::role::Role;
use super::runtime::PluginPath;
use super::{KEEP, nothing_to_run, places};
use crate::answer::Answer;
use crate::error::{Failure, Result};

/// The status of one of the two plugins on this node.
#[derive(Debug)]
pub(crate) struct Report {
    role: Role,
    /// The file that a call runs, and what it is.
    runs: Option<(PathBuf, Program)>,
    /// The folders in which something was installed, or begun.
    places: Vec<Seen>,
}

/// A folder in which something was installed.
#[derive(Debug)]
struct Seen {
    folder: PathBuf,
    state: Option<State>,
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

impl Report {
    pub(crate) fn make(role: Role, path: &PluginPath, args: &Install) -> Result<Self> {
        let runs = path.first(role).map(|file| {
            let program = Program::ask(&file, role);
            (file, program)
        });
        let mut seen = Vec::new();
        for place in places(role, args, path).filter(Place::is_touched) {
            seen.push(Seen {
                state: place.state()?,
                unfinished: place.is_unfinished(),
                previous: Some(place.previous()).filter(|file| file.symlink_metadata().is_ok()),
                folder: place.folder().to_owned(),
            });
        }
        Ok(Self { role, runs, places: seen })
    }

    /// True if an installation was completed or begun.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.places.is_empty()
    }

    fn is_ours(&self) -> bool {
        self.runs.as_ref().is_some_and(|(_, program)| program.is_ours())
    }

    /// The file and version of a plugin, if a call runs Margay's plugin in another version.
    pub(crate) fn differs_from(&self, plugin: &Path) -> Option<(PathBuf, String)> {
        let (_, Program::Margay(runs)) = self.runs.as_ref()? else { return None };
        match Program::ask(plugin, self.role) {
            Program::Margay(version) if version != *runs => Some((plugin.to_owned(), version)),
            _ => None,
        }
    }

    /// True if somebody has replaced the installed program of a folder by another one.
    fn is_overwritten(&self, seen: &Seen) -> bool {
        let there = self.runs.as_ref().filter(|(file, _)| file.parent() == Some(&seen.folder));
        !seen.unfinished && there.is_some_and(|(_, program)| !program.is_ours())
    }

    /// The fault, if a call does not run Margay's plugin.
    pub(crate) fn failure(&self, path: &PluginPath, args: &Install) -> Option<Failure> {
        let (again, undo) = (self.role.install(), self.role.undo());
        let Some((file, program)) = &self.runs else { return Some(nothing_to_run(self.role, path)) };
        if program.is_ours() {
            return None;
        }
        let file = file.display();
        if self.places.iter().any(|seen| self.is_overwritten(seen)) {
            let failure = Failure::new(format!("{file} was overwritten since Margay's was put there"));
            return Some(failure.hint(format!(
                "run {again} again; calico-node does this when it starts, unless it is configured not to: {KEEP}"
            )));
        }
        if let Some(seen) = self.places.iter().find(|seen| seen.unfinished) {
            let failure = Failure::new(format!("an installation in {} was interrupted", seen.folder.display()));
            return Some(failure.hint(format!("finish it with {again}, or go back with {undo}")));
        }
        // The plugin is installed, but the runtime finds another one first.
        let own = self.places.first().map(|seen| seen.folder.as_path()).or(args.own_folder.as_deref());
        Some(match own {
            Some(folder) => Failure::new(format!("a CNI call runs {file}, and not what is in {}", folder.display()))
                .hint(path.how_to_prefer(folder)),
            None => Failure::new(format!("a CNI call runs {file}, which is not Margay's"))
                .hint(format!("to change that: {again}")),
        })
    }

    /// The answer of `--status`, with the status of the main plugin.
    pub(crate) fn answer(&self, path: &PluginPath, main: &Self) -> Result<Answer> {
        let mut lines = vec![self.runs_line("Runs now:    "), format!("Plugin path: {path}")];
        if self.places.is_empty() {
            lines.push("Installed:   no".to_owned());
        }
        self.add_places(&mut lines);
        if main.runs.is_some() || main.is_wanted() {
            lines.push(main.runs_line("Main plugin: "));
            main.add_places(&mut lines);
        }
        let json = StatusJson {
            ipam: self.json(),
            plugin_path: &path.folders,
            plugin_path_from: path.source.to_string(),
            main_plugin: main.json(),
        };
        Answer::new(lines.join("\n"), &json)
    }

    fn runs_line(&self, label: &str) -> String {
        match &self.runs {
            Some((file, program)) => format!("{label}{} ({program})", file.display()),
            None => format!("{label}no {}", self.role.program()),
        }
    }

    fn add_places(&self, lines: &mut Vec<String>) {
        for seen in &self.places {
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
                Program::Margay(_) => "margay",
                Program::Other(_) => "other",
                Program::Broken(_) => "broken",
            },
            version: program.version(),
        });
        let installed = self.places.iter().map(|seen| self.installed_json(seen)).collect();
        RoleJson { ours: self.is_ours(), runs, installed }
    }

    fn installed_json<'a>(&self, seen: &'a Seen) -> InstalledJson<'a> {
        InstalledJson {
            folder: &seen.folder,
            version: seen.state.as_ref().map(|state| state.version.as_str()),
            complete: !seen.unfinished,
            overwritten: self.is_overwritten(seen),
            previous_version: seen.previous_version(),
        }
    }
}

impl Seen {
    fn previous_version(&self) -> Option<&str> {
        self.state.as_ref()?.previous.as_ref()?.version.as_deref()
    }

    fn previous_reported(&self) -> &str {
        self.previous_version().unwrap_or("it tells no version")
    }
}

/// The work in a folder, planned or done.
#[derive(Debug, Serialize)]
pub(crate) struct Change {
    #[serde(skip)]
    role: Role,
    file: PathBuf,
    action: &'static str,
    version: Option<String>,
    #[serde(skip)]
    text: String,
}

impl Change {
    /// The plan of an installation.
    pub(crate) fn install(place: &Place, plugin: &Path, version: &str) -> Self {
        let file = place.target();
        let mut text = format!("put {} (Margay {version}) into place as {}", plugin.display(), file.display());
        if file.is_file() && !Program::ask(&file, place.role()).is_ours() {
            text += &format!(", and keep what is there as {}", place.previous().display());
        }
        Self { role: place.role(), file, action: "install", version: Some(version.to_owned()), text }
    }

    /// The plan of going back.
    pub(crate) fn undo(place: &Place) -> Self {
        let text = format!("put back {} as it was before", place.target().display());
        Self { role: place.role(), file: place.target(), action: "undo", version: None, text }
    }

    /// The outcome of going back.
    pub(crate) fn done(self, undone: Undone) -> Self {
        let file = self.file.display();
        let (action, text) = match undone {
            Undone::Restored => ("restored", format!("{file} is what it was before")),
            Undone::Removed => ("removed", format!("{file} is gone; it was only there for Margay")),
            Undone::Left => ("left", format!("{file} is not Margay's any more, and stays")),
        };
        let version =
            self.file.is_file().then(|| Program::ask(&self.file, self.role).version().map(str::to_owned)).flatten();
        let text = version.as_ref().map_or(text.clone(), |version| format!("{text} ({version})"));
        Self { action, text, version, ..self }
    }
}

#[derive(Serialize)]
struct ChangesJson<'a> {
    dry_run: bool,
    changes: &'a [Change],
    #[serde(skip_serializing_if = "Option::is_none")]
    ours: Option<bool>,
}

/// The answer of `--dry-run`.
pub(crate) fn dry_run(changes: &[Change]) -> Result<Answer> {
    let lines: Vec<_> = changes.iter().map(|change| format!("would {}", change.text)).collect();
    let text = if lines.is_empty() { "nothing to do".to_owned() } else { lines.join("\n") };
    Answer::new(text, &ChangesJson { dry_run: true, changes, ours: None })
}

/// The answer of `--beside-calico`.
pub(crate) fn installed(change: &Change, done: Installed, report: &Report) -> Result<Answer> {
    let (file, version) = (change.file.display(), change.version.as_deref().unwrap_or_default());
    let mut text = match done {
        Installed::Now => format!("{file} is Margay's {version} now"),
        Installed::Already => format!("{file} is Margay's {version} already"),
    };
    let here = report.places.iter().find(|seen| change.file.parent() == Some(&seen.folder));
    if let Some((seen, previous)) = here.and_then(|seen| Some((seen, seen.previous.as_ref()?))) {
        text += &format!("; what was there is kept as {} ({})", previous.display(), seen.previous_reported());
    }
    let change = Change {
        role: change.role,
        file: change.file.clone(),
        action: if done == Installed::Now { "installed" } else { "already" },
        version: change.version.clone(),
        text: String::new(),
    };
    Answer::new(text, &ChangesJson { dry_run: false, changes: &[change], ours: Some(report.is_ours()) })
}

/// The answer of `--undo` for these plugins.
pub(crate) fn undone(roles: &[Role], changes: &[Change], path: &PluginPath) -> Result<Answer> {
    let lines: Vec<_> = changes.iter().map(|change| change.text.as_str()).collect();
    let text = if lines.is_empty() { format!("nothing was installed in {path}") } else { lines.join("\n") };
    let is_ours = |role: &&Role| path.first(**role).is_some_and(|file| Program::ask(&file, **role).is_ours());
    let ours = roles.iter().find(is_ours);
    let answer = Answer::new(text, &ChangesJson { dry_run: false, changes, ours: Some(ours.is_some()) })?;
    Ok(match ours {
        Some(role) => answer.incomplete(
            Failure::new(format!(
                "a CNI call still runs Margay's {}, which margay install has not put there",
                role.program()
            ))
            .hint("remove it where --status finds it, when calico-node has put its own elsewhere in the path"),
        ),
        None => answer,
    })
}

/// A warning if calls run both of Margay's plugins, and these are not one file or one version, but could be.
pub(crate) fn apart(path: &PluginPath) -> Option<String> {
    let ours = |role| {
        let file = path.first(role)?;
        let Program::Margay(version) = Program::ask(&file, role) else { return None };
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
