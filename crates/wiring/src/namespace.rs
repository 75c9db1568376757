//! Opens and enters network namespaces, and runs functions on threads that may change their namespace.

use std::any::Any;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Instant;

use nix::errno::Errno as NixErrno;
use nix::libc::O_NONBLOCK;
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{FsType, NSFS_MAGIC, PROC_SUPER_MAGIC, statfs};

use crate::error::{Errno, Error};

/// The path under `/proc` that leads each thread to the thread's own network namespace.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// An open file of a network namespace.
pub(crate) struct NetNamespace {
    file: File,
    path: PathBuf,
}

pub(crate) enum NamespaceError {
    /// There is no file at the network namespace's path.
    Gone(Error),
    /// The file at the path is not a network namespace, or cannot be opened.
    Other(Error),
}

impl From<NamespaceError> for Error {
    fn from(unopened: NamespaceError) -> Self {
        let (NamespaceError::Gone(error) | NamespaceError::Other(error)) = unopened;
        error
    }
}

impl NetNamespace {
    /// Opens the network namespace at a path. Before opening the path, the function checks the type of the file system.
    /// The path may lead to any file, for example to a pipe, and opening that file could have side effects.
    pub(crate) fn open(path: &Path) -> Result<Self, NamespaceError> {
        match statfs(path).map(|about| about.filesystem_type()) {
            Ok(NSFS_MAGIC | PROC_SUPER_MAGIC) => {}
            Ok(FsType(magic)) => {
                return Err(NamespaceError::Other(Error::Failed(format!("unknown FS magic on {path:?}: {magic:x}"))));
            }
            Err(errno) => {
                let error = Error::failed(&format!("failed to Statfs {path:?}"), Errno::from(errno));
                return Err(if errno == NixErrno::ENOENT {
                    NamespaceError::Gone(error)
                } else {
                    NamespaceError::Other(error)
                });
            }
        }
        let opened = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path);
        let file = opened.map_err(|error| {
            let failed = Error::failed(&format!("open {}", path.display()), Errno::from(&error));
            if error.kind() == io::ErrorKind::NotFound {
                NamespaceError::Gone(failed)
            } else {
                NamespaceError::Other(failed)
            }
        })?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Opens the network namespace of the calling thread.
    pub(crate) fn own() -> Result<Self, Error> {
        Ok(Self::open(Path::new(OsStr::new(OWN_NAMESPACE)))?)
    }

    /// Moves the calling thread into this network namespace.
    pub(crate) fn enter(&self) -> Result<(), Error> {
        setns(&self.file, CloneFlags::CLONE_NEWNET).map_err(|errno| {
            Error::failed(&format!("error switching to ns {}", self.path.display()), Errno::from(errno))
        })
    }

    /// Returns the namespace's open file; netlink requests name a namespace by a file descriptor.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

/// The channel over which a thread sends its result to [`run_in_thread`]. Sending fails if [`run_in_thread`] no longer
/// waits for the result.
pub(crate) type ResultSender<T> = SyncSender<Result<T, Error>>;

/// Runs `work` on a new thread, and returns the first result that the thread sends over the channel.
///
/// Each call starts a new thread, because a thread that has entered another namespace must not be reused. The thread
/// may still run after its first result and after the deadline, because a thread that is blocked in the kernel cannot
/// be stopped. If the thread finishes after the deadline, its result is dropped.
///
/// # Errors
///
/// The error that the thread sends; the error `late` if the thread sends no result before the deadline; or an error if
/// the thread panics.
pub(crate) fn run_in_thread<T: Send + 'static>(
    deadline: Instant,
    late: impl FnOnce() -> Error,
    work: impl FnOnce(&ResultSender<T>) + Send + 'static,
) -> Result<T, Error> {
    // The channel has no buffer: a sent result is either received, or returned to the sending thread.
    let (sender, receiver) = sync_channel(0);
    let thread = thread::Builder::new().name("wiring".to_owned()).spawn(move || work(&sender));
    let thread = thread.map_err(|error| Error::failed("failed to start a thread", Errno::from(&error)))?;
    match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => Err(late()),
        Err(RecvTimeoutError::Disconnected) => {
            let said =
                thread.join().err().map_or_else(|| "nothing was found out".to_owned(), |panic| panic_message(&*panic));
            Err(Error::failed("the work in the network namespace was given up", said))
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "it panicked".to_owned())
}
