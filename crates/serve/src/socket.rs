//! Manages the private socket: the exclusive right to serve a store, and the path where clients find the daemon.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nix::fcntl::OFlag;
use wire::{FileId, name};

/// Mode of the folder that contains the private sockets. Each user may run a daemon, and no user can remove the socket
/// of another user. Clients check which user runs the daemon that listens.
const FOLDER_MODE: u32 = 0o1777;
/// Mode of a private socket, to which any user can connect; the daemon checks which user connects.
const SOCKET_MODE: u32 = 0o666;
/// Number of attempts to take a serve lock, and the interval between the attempts. A serve lock that is taken may be
/// free a moment later: a daemon that cleans up briefly locks the files of stopped daemons.
const MAX_ATTEMPTS: usize = 5;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(10);

/// The exclusive right of one process to serve a store under a name. The exclusive right ends when the [`ServeLock`] is
/// dropped or the process ends.
#[derive(Debug)]
pub struct ServeLock {
    name: String,
    lock: PathBuf,
    /// Whether this daemon, rather than systemd, has created the socket.
    listens: AtomicBool,
    _file: File,
}

impl ServeLock {
    /// Takes the exclusive right to serve the store that has the given name. Creates the folder for the private sockets
    /// if the folder is missing. `is_trusted` returns whether a daemon of the store may run as this user. A lock file
    /// that belongs to an untrusted user is removed.
    ///
    /// # Errors
    /// `AddrInUse` if another daemon already serves the store with the given name; any other I/O error.
    pub fn take(name: &str, is_trusted: impl Fn(u32) -> bool) -> io::Result<Self> {
        make_folder()?;
        for _ in 1..MAX_ATTEMPTS {
            match Self::take_now(name, &is_trusted) {
                Err(error) if error.kind() == ErrorKind::AddrInUse => thread::sleep(ATTEMPT_INTERVAL),
                taken => return taken,
            }
        }
        Self::take_now(name, &is_trusted)
    }

    fn take_now(name: &str, is_trusted: impl Fn(u32) -> bool) -> io::Result<Self> {
        let path = Path::new(name::SOCKET_FOLDER).join(format!("{name}.lock"));
        if fs::symlink_metadata(&path).is_ok_and(|found| !is_trusted(found.uid())) {
            // Each user may create files in the sockets' folder, but only a file's owner and root can remove the file.
            remove(&path)?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(OFlag::O_NOFOLLOW.bits());
        loop {
            let file = options.open(&path)?;
            match file.try_lock() {
                // The previous daemon may have removed the lock file before this process locked it.
                Ok(()) if FileId::at(&path) != Some(FileId::of(&file.metadata()?)) => {}
                Ok(()) => {
                    return Ok(Self {
                        name: name.to_owned(),
                        lock: path,
                        listens: AtomicBool::new(false),
                        _file: file,
                    });
                }
                Err(fs::TryLockError::WouldBlock) => return Err(ErrorKind::AddrInUse.into()),
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    /// The path of the private socket.
    pub fn socket(&self) -> PathBuf {
        name::socket(&self.name)
    }

    /// Listens at the private socket. Replaces an earlier daemon's socket file atomically, so that a client always
    /// finds a socket.
    ///
    /// # Errors
    /// Any I/O error.
    pub fn listen(&self) -> io::Result<UnixListener> {
        let socket = self.socket();
        let draft = Path::new(name::SOCKET_FOLDER).join(format!(".{}.{}", self.name, std::process::id()));
        remove(&draft)?;
        let listener = UnixListener::bind(&draft)?;
        let placed = fs::set_permissions(&draft, Permissions::from_mode(SOCKET_MODE))
            .and_then(|()| listener.set_nonblocking(true))
            .and_then(|()| fs::rename(&draft, &socket));
        if placed.is_err() {
            let _ = fs::remove_file(&draft);
        }
        placed.map(|()| {
            self.listens.store(true, Ordering::Relaxed);
            listener
        })
    }

    /// Removes the socket if this daemon has created it, so that clients open the store directly without a delay. A
    /// socket that systemd has created is kept for the next daemon.
    pub fn remove_socket(&self) {
        if self.listens.swap(false, Ordering::Relaxed)
            && let Err(error) = remove(&self.socket())
        {
            tracing::warn!(%error, "cannot remove the daemon's socket file while the daemon stops");
        }
    }
}

/// Removes the sockets and lock files that killed daemons of this user have left.
pub fn remove_stale() {
    let Ok(entries) = fs::read_dir(name::SOCKET_FOLDER) else { return };
    let bound = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_ours = path.extension().is_some_and(|extension| extension == "sock" || extension == "lock");
        let Some(name) = path.file_stem().and_then(|name| name.to_str()).filter(|_| is_ours) else { continue };
        let socket = name::socket(name);
        // A daemon binds its socket under a draft name and then renames the file, so a socket that was bound under its
        // final name was created by systemd. A systemd socket without a daemon must not be probed, because a connection
        // would start a daemon.
        let is_systemds = bound.lines().any(|line| line.split_whitespace().nth(7) == socket.to_str());
        let uid = rustix::process::geteuid().as_raw();
        if is_systemds || fs::symlink_metadata(&path).map_or(true, |found| found.uid() != uid) {
            continue;
        }
        // While this process has a serve lock, no daemon can serve a store under the lock's name. Dropping the serve
        // lock removes its lock file.
        let Ok(_serve_lock) = ServeLock::take_now(name, |owner| owner == uid) else { continue };
        let is_refused =
            |connected: io::Result<_>| connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
        if is_refused(UnixStream::connect(&socket)) && remove(&socket).is_ok() {
            tracing::debug!(socket = %socket.display(), "removed the socket of a killed daemon");
        }
    }
}

impl Drop for ServeLock {
    fn drop(&mut self) {
        self.remove_socket();
        // The kernel releases the serve lock when the file is closed. A lock file that cannot be removed does no harm.
        let _ = remove(&self.lock);
    }
}

fn make_folder() -> io::Result<()> {
    let folder = Path::new(name::SOCKET_FOLDER);
    if let Some(above) = folder.parent().filter(|above| above.is_dir()) {
        // Earlier plugin versions created the parent of the sockets' folder with a mode that admits only root. Setting
        // the mode fails for every user except the folder's owner and root.
        let _ = fs::set_permissions(above, Permissions::from_mode(0o755));
    }
    if folder.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    // Only the owner can set the mode of the sockets' folder. Only root can create folders under /run, so the owner of
    // the sockets' folder is root.
    fs::set_permissions(folder, Permissions::from_mode(FOLDER_MODE))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
