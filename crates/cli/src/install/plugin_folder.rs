//! Replaces a Calico plugin file (`calico-ipam` or `calico`) in a plugin folder with Margay's plugin, and can restore
//! it.
//!
//! The files that are needed to undo an installation are in a subfolder of the plugin folder, which is `.margay` for
//! the plugin `calico-ipam`, and `.margay-main` for the main plugin. The files for the undo are below the plugin
//! folder, so that they are on the same file system, can be renamed into place, and move along with the plugin folder.
//! The undo subfolder of a plugin folder contains these files:
//!
//! | File | Content |
//! |---|---|
//! | `previous` | the former plugin; the file itself, not a copy |
//! | `new` | Margay's plugin, until it is complete and was tried |
//! | `state.json` | which version is installed, and which it replaced |
//!
//! If an installation is interrupted after any step, the same command can continue it, and `--undo` can undo it. The
//! plugin file is changed only by a rename, which swaps one complete file for another.

use std::fs::{self, DirBuilder, File, Permissions, TryLockError};
use std::io::{self, BufReader, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::program::{PluginProgram, Role};
use crate::digest::Sha256;
use crate::error::{CommandFailure, CommandResult};

/// Version of the format of the file that records an installation.
const STATE_FORMAT: u32 = 1;

/// The record of an installation in a plugin folder: the installed program and the program that it replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InstallState {
    format: u32,
    pub(crate) version: String,
    sha256: String,
    /// The replaced program, or `None` if the plugin folder had no file with the plugin's name.
    pub(crate) previous: Option<FormerProgram>,
    /// True if the installation created the plugin folder.
    made_folder: bool,
}

/// A program that an installation replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FormerProgram {
    /// The version that the replaced program reports with `-v`, or `None` if it reports no version.
    pub(crate) version: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstallOutcome {
    Now,
    Already,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UndoOutcome {
    /// The plugin file that Margay's plugin had replaced was restored.
    Restored,
    /// Margay's plugin was deleted, because there was no plugin file before the installation.
    Removed,
    /// The plugin file was not changed, because another program had replaced Margay's plugin after the installation.
    Left,
}

/// The file of one plugin in a plugin folder, with the files that are needed to undo the plugin's installation.
#[derive(Debug)]
pub(crate) struct PluginFolder {
    folder: PathBuf,
    role: Role,
}

impl PluginFolder {
    pub(crate) fn new(role: Role, folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), role }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// Returns the path of the plugin file that the container runtime runs.
    pub(crate) fn target(&self) -> PathBuf {
        self.folder.join(self.role.program())
    }

    /// Returns the path at which the replaced plugin file is kept until the installation is undone.
    pub(crate) fn previous(&self) -> PathBuf {
        self.state_folder().join("previous")
    }

    fn state_folder(&self) -> PathBuf {
        self.folder.join(self.role.state_folder_name())
    }

    fn staged_file(&self) -> PathBuf {
        self.state_folder().join("new")
    }

    fn state_file(&self) -> PathBuf {
        self.state_folder().join("state.json")
    }

    /// True if an installation of the plugin was completed or begun.
    pub(crate) fn is_touched(&self) -> bool {
        self.state_folder().is_dir()
    }

    /// True if an installation of the plugin was interrupted.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.is_touched() && (!self.state_file().exists() || self.staged_file().exists())
    }

    /// Reads the record of the installation. Returns `None` if the record's file does not exist.
    pub(crate) fn state(&self) -> CommandResult<Option<InstallState>> {
        let bytes = match fs::read(self.state_file()) {
            Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => return Ok(None),
            read => read.map_err(|error| self.failed("cannot read", &error))?,
        };
        let state: Option<InstallState> = serde_json::from_slice(&bytes).ok();
        state.filter(|state| state.format == STATE_FORMAT).map(Some).ok_or_else(|| {
            CommandFailure::new(format!("{} is not what this margay writes", self.state_file().display())).hint(
                format!(
                    "a newer margay version made this installation: use that version; the original plugin is in {}",
                    self.previous().display()
                ),
            )
        })
    }

    /// Fails if this user has no permission to write into the plugin folder.
    pub(crate) fn check_writable(&self) -> CommandResult<()> {
        let existing = self.folder.ancestors().find(|folder| folder.exists()).unwrap_or(&self.folder);
        rustix::fs::access(existing, rustix::fs::Access::WRITE_OK)
            .map_err(|error| self.failed("cannot write into", &error.into()))
    }

    /// Installs Margay's plugin and keeps the plugin file that it replaces.
    pub(crate) fn install(&self, plugin: &Path) -> CommandResult<InstallOutcome> {
        self.install_steps(plugin).map_err(|error| self.failed("cannot install into", &error))?
    }

    fn install_steps(&self, plugin: &Path) -> io::Result<CommandResult<InstallOutcome>> {
        let known = match self.state() {
            Ok(known) => known,
            Err(failure) => return Ok(Err(failure)),
        };
        let made_folder = known.as_ref().map_or(!self.folder.exists(), |state| state.made_folder);
        make_folder(&self.folder, 0o755)?;
        make_folder(&self.state_folder(), 0o700)?;
        let _lock = match self.lock() {
            Ok(lock) => lock,
            Err(failure) => return Ok(Err(failure)),
        };

        let target = self.target();
        let there = fs::symlink_metadata(&target).is_ok().then(|| PluginProgram::ask(&target, self.role));
        let is_ours = there.as_ref().is_some_and(PluginProgram::is_ours);
        let sha256 = checksum(plugin)?;
        if is_ours
            && !self.staged_file().exists()
            && known.as_ref().is_some_and(|state| state.sha256 == sha256)
            && checksum(&target)? == sha256
            && (self.role == Role::Ipam || !could_be_one_file(plugin, &target)?)
        {
            return Ok(Ok(InstallOutcome::Already));
        }

        let mut previous = known.and_then(|state| state.previous);
        if let Some(program) = there.filter(|_| !is_ours) {
            self.keep(&target)?;
            previous = Some(FormerProgram { version: program.version().map(str::to_owned) });
        } else if previous.is_none() && fs::symlink_metadata(self.previous()).is_ok() {
            previous = Some(FormerProgram {
                version: PluginProgram::ask(&self.previous(), self.role).version().map(str::to_owned),
            });
        }

        let staged = self.staged_file();
        self.stage(plugin, &staged)?;
        let program = PluginProgram::ask(&staged, self.role);
        let PluginProgram::Margay(version) = program else {
            return Ok(Err(CommandFailure::new(format!("{}: {program}", staged.display()))
                .hint("check that the folder is on a file system that allows running programs; nothing was changed")));
        };
        let state = InstallState { format: STATE_FORMAT, version, sha256: checksum(&staged)?, previous, made_folder };
        self.write_state(&state)?;
        fs::rename(&staged, &target)?;
        sync_folder(&self.folder)?;
        Ok(Ok(InstallOutcome::Now))
    }

    /// Creates Margay's plugin under a temporary name, on the file system of the plugin folder. The main plugin is
    /// created as a hard link to the IPAM plugin if the file system supports hard links. With a hard link, the main
    /// plugin recognises that both plugins are one program, and calls IPAM without starting a process.
    fn stage(&self, plugin: &Path, staged: &Path) -> io::Result<()> {
        remove_if_there(staged)?;
        if self.role == Role::Ipam || fs::hard_link(plugin.canonicalize()?, staged).is_err() {
            fs::copy(plugin, staged)?;
            fs::set_permissions(staged, Permissions::from_mode(0o755))?;
        }
        File::open(staged)?.sync_all()
    }

    /// Keeps a hard link to the plugin file before the file is replaced, so that undoing can restore it with its owner,
    /// mode and times.
    fn keep(&self, target: &Path) -> io::Result<()> {
        let linked = self.state_folder().join("previous.new");
        remove_if_there(&linked)?;
        fs::hard_link(target, &linked)?;
        fs::rename(&linked, self.previous())?;
        // If the old and the new name are hard links to one file, a rename does not remove the old name.
        remove_if_there(&linked)?;
        sync_folder(&self.state_folder())
    }

    fn write_state(&self, state: &InstallState) -> io::Result<()> {
        let unfinished = self.state_folder().join("state.new");
        let mut file = File::create(&unfinished)?;
        file.write_all(&serde_json::to_vec_pretty(state)?)?;
        file.sync_all()?;
        fs::rename(&unfinished, self.state_file())?;
        sync_folder(&self.state_folder())
    }

    /// Undoes the installation of the plugin in this folder. `others` says whether a second plugin folder of the
    /// container runtime has a plugin of this plugin's name.
    pub(crate) fn undo(&self, others: OtherPlugins) -> CommandResult<UndoOutcome> {
        let _lock = self.lock()?;
        // An unreadable record of the installation must not keep an operator from undoing the installation.
        let made_folder = self.state().ok().flatten().is_some_and(|state| state.made_folder);
        let target = self.target();
        let there = fs::symlink_metadata(&target).is_ok().then(|| PluginProgram::ask(&target, self.role));
        let has_previous = fs::symlink_metadata(self.previous()).is_ok();
        let undone = match there {
            Some(PluginProgram::Other(_)) => UndoOutcome::Left,
            Some(PluginProgram::Broken(_)) if !has_previous => UndoOutcome::Left,
            _ if has_previous => {
                self.step(|| fs::rename(self.previous(), &target).and_then(|()| sync_folder(&self.folder)))?;
                UndoOutcome::Restored
            }
            Some(_) if others == OtherPlugins::None => {
                return Err(CommandFailure::new(format!(
                    "nothing is kept that could be put back in place of {}, and there is no other {}",
                    target.display(),
                    self.role.program()
                ))
                .hint(
                    "remove UPDATE_CNI_BINARIES=false from the environment of calico-node, and restart calico-node, \
                     which then installs Calico's plugin again; nothing was changed",
                ));
            }
            Some(_) => {
                self.step(|| fs::remove_file(&target))?;
                UndoOutcome::Removed
            }
            None => UndoOutcome::Removed,
        };
        self.step(|| {
            for left in ["new", "state.new", "previous.new", "previous", "state.json"] {
                remove_if_there(&self.state_folder().join(left))?;
            }
            fs::remove_dir(self.state_folder())?;
            if made_folder {
                // Undoing an installation removes the plugin folder that it created, if the folder is empty. The
                // removal of a folder with other plugins fails, and this error is ignored.
                _ = fs::remove_dir(&self.folder);
            } else {
                sync_folder(&self.folder)?;
            }
            Ok(())
        })?;
        Ok(undone)
    }

    fn step(&self, work: impl FnOnce() -> io::Result<()>) -> CommandResult<()> {
        work().map_err(|error| self.failed("cannot change", &error))
    }

    /// Locks the plugin folder against other `margay install` commands, until the returned file is dropped.
    fn lock(&self) -> CommandResult<File> {
        let folder = File::open(self.state_folder()).map_err(|error| self.failed("cannot open", &error))?;
        match folder.try_lock() {
            Ok(()) => Ok(folder),
            Err(TryLockError::WouldBlock) => {
                Err(CommandFailure::new(format!("another margay install works in {}", self.folder.display()))
                    .hint("wait until the other margay install has ended, and try again"))
            }
            Err(TryLockError::Error(error)) => Err(self.failed("cannot lock", &error)),
        }
    }

    fn failed(&self, what: &str, error: &io::Error) -> CommandFailure {
        let failure = CommandFailure::new(format!("{what} {}: {error}", self.folder.display()));
        match error.kind() {
            ErrorKind::PermissionDenied => failure.hint("run margay install as root, on the node itself"),
            ErrorKind::ReadOnlyFilesystem => {
                failure.hint("the plugin folder is read-only; name a writable folder with --own-folder DIR")
            }
            _ => failure.hint(format!(
                "correct the error and run the command again, or undo the installation with: {}",
                self.role.undo()
            )),
        }
    }
}

/// Whether the container runtime has a second plugin folder with a plugin of this plugin's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherPlugins {
    None,
    Some,
}

/// True if two files are on one file system but are not hard links of each other.
fn could_be_one_file(one: &Path, other: &Path) -> io::Result<bool> {
    let (one, other) = (fs::metadata(one)?, fs::metadata(other)?);
    Ok(one.dev() == other.dev() && one.ino() != other.ino())
}

fn make_folder(folder: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(folder)
}

fn remove_if_there(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Size in bytes of the buffer for reading a plugin file. With the smaller default buffer of `io::copy`, reading a
/// plugin would need about a thousand system calls.
const READ_BUFFER_BYTES: usize = 128 << 10;

fn checksum(file: &Path) -> io::Result<String> {
    let mut sum = Sha256::default();
    io::copy(&mut BufReader::with_capacity(READ_BUFFER_BYTES, File::open(file)?), &mut sum)?;
    Ok(sum.hex())
}
