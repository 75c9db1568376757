//! The private socket: who has the right to serve a store, and where clients find it.

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

/// The mode of the folder of the sockets: each user may have a daemon, and nobody may take away the socket of another one.
/// Clients look at the user who listens.
const FOLDER_MODE: u32 = 0o1777;
/// The mode of a socket. The daemon looks at the user who connects.
const SOCKET_MODE: u32 = 0o666;
/// How often, and at what interval, a place that is taken is tried again: another daemon may be removing what was left there.
const MAX_ATTEMPTS: usize = 5;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(10);

/// The right to serve a store under a name: one process at a time has it. It ends when this is dropped, or with the process.
#[derive(Debug)]
pub struct ServeLock {
    name: String,
    lock: PathBuf,
    /// True once there is a socket of its own.
    listens: AtomicBool,
    _file: File,
}

impl ServeLock {
    /// Takes the place of the daemon with this name. The folder of the sockets is made if it is missing. `is_trusted` says
    /// whether a daemon of the store may run as this user: the place of any other user counts for nothing.
    ///
    /// # Errors
    /// `AddrInUse` if another daemon has it; those of the system.
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
            // Each user may make a file here. Only its owner and root can take it away again.
            remove(&path)?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(OFlag::O_NOFOLLOW.bits());
        loop {
            let file = options.open(&path)?;
            match file.try_lock() {
                // The daemon before may have removed it meanwhile.
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

    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        name::socket(&self.name)
    }

    /// Listens. A socket that an earlier daemon has left is replaced in one step, so that a client always finds one of them.
    ///
    /// # Errors
    /// Those of the system.
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

    /// Removes the socket that was made here: from now on clients go by themselves at once. A socket of systemd's stays, and the
    /// next daemon has it.
    pub fn remove_socket(&self) {
        if self.listens.swap(false, Ordering::Relaxed)
            && let Err(error) = remove(&self.socket())
        {
            tracing::warn!(%error, "the socket stays, and clients find no daemon there");
        }
    }
}

/// Removes the sockets and locks that killed daemons have left, as far as this user may.
pub fn remove_stale() {
    let Ok(entries) = fs::read_dir(name::SOCKET_FOLDER) else { return };
    let bound = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_ours = path.extension().is_some_and(|extension| extension == "sock" || extension == "lock");
        let Some(name) = path.file_stem().and_then(|name| name.to_str()).filter(|_| is_ours) else { continue };
        let socket = name::socket(name);
        // A daemon listens at its socket under another name. One that systemd listens at has no daemon yet, and a connection would
        // start it.
        let is_systemds = bound.lines().any(|line| line.split_whitespace().nth(7) == socket.to_str());
        let uid = rustix::process::geteuid().as_raw();
        if is_systemds || fs::symlink_metadata(&path).map_or(true, |found| found.uid() != uid) {
            continue;
        }
        // The lock keeps a daemon from starting there meanwhile, and goes with its place.
        let Ok(_serve_lock) = ServeLock::take_now(name, |owner| owner == uid) else { continue };
        let is_refused =
            |connected: io::Result<_>| connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
        if is_refused(UnixStream::connect(&socket)) && remove(&socket).is_ok() {
            tracing::debug!(socket = %socket.display(), "a daemon that was killed had left its socket");
        }
    }
}

impl Drop for ServeLock {
    fn drop(&mut self) {
        self.remove_socket();
        // The lock ends with the file. A file that stays does no harm.
        let _ = remove(&self.lock);
    }
}

fn make_folder() -> io::Result<()> {
    let folder = Path::new(name::SOCKET_FOLDER);
    if let Some(above) = folder.parent().filter(|above| above.is_dir()) {
        // Earlier versions of the plugin have made it for root alone. Only its owner can change that.
        let _ = fs::set_permissions(above, Permissions::from_mode(0o755));
    }
    if folder.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    // Only its owner can, and only root makes it in /run.
    fs::set_permissions(folder, Permissions::from_mode(FOLDER_MODE))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
