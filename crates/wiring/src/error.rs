//! Defines the errors of the crate `wiring`, whose messages are equal to the messages of Calico's plugin.

use std::fmt;
use std::io;

use nix::libc;

/// Why a container's network could not be set up, inspected or removed.
///
/// The error's message is the message that Calico's plugin prints for the same failure, without a prefix. Because the
/// messages equal Calico's, a CNI plugin can print them unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The kernel refused a step of the call, or a precondition of a step does not hold.
    Failed(String),
    /// The call to this crate did not finish before its deadline.
    TimedOut(String),
    /// The host interface with the wanted name belongs to another container: see [`OldInterface`](crate::OldInterface).
    Taken(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Failed(text) | Self::TimedOut(text) | Self::Taken(text)) = self;
        f.write_str(text)
    }
}

impl std::error::Error for Error {}

impl Error {
    /// Creates the error of a step that failed; `what` says what failed, and `reason` says why. If `what` is empty, the
    /// error's message consists of the reason alone.
    pub(crate) fn failed(what: &str, reason: impl fmt::Display) -> Self {
        Self::Failed(if what.is_empty() { reason.to_string() } else { format!("{what}: {reason}") })
    }
}

/// An error number (errno) of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    pub(crate) const EXISTS: Self = Self(libc::EEXIST);
    pub(crate) const NOT_PERMITTED: Self = Self(libc::EPERM);
    pub(crate) const NOT_FOUND: Self = Self(libc::ENOENT);
    pub(crate) const NO_PROTOCOL: Self = Self(libc::EPROTONOSUPPORT);
    pub(crate) const NO_FAMILY: Self = Self(libc::EAFNOSUPPORT);
    pub(crate) const NO_DEVICE: Self = Self(libc::ENODEV);
    pub(crate) const NOT_SUPPORTED: Self = Self(libc::EOPNOTSUPP);
    pub(crate) const BUSY: Self = Self(libc::EAGAIN);
    pub(crate) const WRONG: Self = Self(libc::EINVAL);
    pub(crate) const TOO_LONG: Self = Self(libc::ERANGE);
    /// The error number for an unparsable answer of the kernel.
    pub(crate) const GARBLED: Self = Self(libc::EBADMSG);
}

impl From<&io::Error> for Errno {
    fn from(error: &io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<nix::errno::Errno> for Errno {
    fn from(error: nix::errno::Errno) -> Self {
        Self(error as i32)
    }
}

impl fmt::Display for Errno {
    /// Writes the message that Go has for this error number, because Calico's plugin is written in Go. The error
    /// messages of C libraries differ from Go's messages and from each other.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            libc::EPERM => "operation not permitted",
            libc::ENOENT => "no such file or directory",
            libc::ESRCH => "no such process",
            libc::EINTR => "interrupted system call",
            libc::EIO => "input/output error",
            libc::ENXIO => "no such device or address",
            libc::EBADF => "bad file descriptor",
            libc::EAGAIN => "resource temporarily unavailable",
            libc::ENOMEM => "cannot allocate memory",
            libc::EACCES => "permission denied",
            libc::EBUSY => "device or resource busy",
            libc::EEXIST => "file exists",
            libc::EXDEV => "invalid cross-device link",
            libc::ENODEV => "no such device",
            libc::ENOTDIR => "not a directory",
            libc::EISDIR => "is a directory",
            libc::EINVAL => "invalid argument",
            libc::ENFILE => "too many open files in system",
            libc::EMFILE => "too many open files",
            libc::ENOSPC => "no space left on device",
            libc::EROFS => "read-only file system",
            libc::ERANGE => "numerical result out of range",
            libc::ENAMETOOLONG => "file name too long",
            libc::ELOOP => "too many levels of symbolic links",
            libc::EBADMSG => "bad message",
            libc::EOVERFLOW => "value too large for defined data type",
            libc::EMSGSIZE => "message too long",
            libc::EPROTONOSUPPORT => "protocol not supported",
            libc::EOPNOTSUPP => "operation not supported",
            libc::EAFNOSUPPORT => "address family not supported by protocol",
            libc::EADDRINUSE => "address already in use",
            libc::EADDRNOTAVAIL => "cannot assign requested address",
            libc::ENETDOWN => "network is down",
            libc::ENETUNREACH => "network is unreachable",
            libc::ENOBUFS => "no buffer space available",
            libc::ETIMEDOUT => "connection timed out",
            libc::EHOSTUNREACH => "no route to host",
            libc::ESTALE => "stale file handle",
            other => return write!(f, "errno {other}"),
        })
    }
}
