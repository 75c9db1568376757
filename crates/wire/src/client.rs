//! Connects to a daemon's socket with a blocking client. The client does not need to be asynchronous, because a plugin
//! sends one request and ends.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::frame::{Frame, FrameKind, Hello, MAX_ANSWER_BODY_BYTES, StallReport};
use crate::peer;

/// The client considers the daemon frozen if the daemon sends nothing, or its store finishes no operation, for this
/// time.
pub const FROZEN_TIMEOUT: Duration = Duration::from_secs(3);

/// Minimum time to wait for bytes from the daemon, so that a client that was scheduled too late still reads the bytes
/// that have arrived.
const MIN_READ_TIMEOUT: Duration = Duration::from_millis(1);

/// A connection to a daemon that has sent its greeting.
#[derive(Debug)]
pub struct DaemonConnection {
    stream: UnixStream,
    /// The last time at which the daemon is known to have been alive.
    alive_at: Instant,
    /// The daemon's greeting.
    pub hello: Hello,
}

impl DaemonConnection {
    /// Connects to a daemon's socket. The client waits at most `within`, and never longer than [`FROZEN_TIMEOUT`], for
    /// a place in the socket's backlog and for the daemon's greeting. `is_trusted` gets the user id of the daemon and
    /// decides whether the client accepts the daemon.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` if there is no daemon; `PermissionDenied` if the daemon's user is not trusted;
    /// `TimedOut` or `WouldBlock` if the daemon does not greet in time; `InvalidData` if the daemon's frame version
    /// differs.
    pub fn open(socket: &Path, within: Duration, is_trusted: impl Fn(u32) -> bool) -> io::Result<Self> {
        let end = Instant::now() + within.min(FROZEN_TIMEOUT);
        let mut stream = dial(socket, end)?;
        if !is_trusted(peer::uid(&stream)?) {
            return Err(io::Error::new(ErrorKind::PermissionDenied, "the daemon runs as another user"));
        }
        let hello: Hello = read(&mut stream, end)?.expect(FrameKind::Hello)?.decode()?;
        Ok(Self { stream, alive_at: Instant::now(), hello })
    }

    /// Sends a request and waits for the answer, at most `within`. The client stops waiting if the daemon makes no
    /// progress for [`FROZEN_TIMEOUT`].
    ///
    /// # Errors
    /// `TimedOut` or `WouldBlock` if the daemon is frozen or has not answered in time; any I/O error of the connection.
    /// After an error, the daemon may still have carried out the request. Once the connection is dropped, the daemon
    /// stops working on the request, except that it finishes a commit that it has started.
    pub fn ask<T: DeserializeOwned>(
        mut self,
        kind: FrameKind,
        request: &impl Serialize,
        within: Duration,
    ) -> io::Result<T> {
        let end = Instant::now() + within;
        let bytes = Frame::new(kind, request)?.to_bytes();
        set_socket_timeout(&self.stream, Timeout::Send, Some(left(self.frozen_at().min(end))?))?;
        self.stream.write_all(&bytes)?;
        loop {
            let until = self.frozen_at().min(end);
            let frame = read(&mut self.stream, until)?;
            let now = Instant::now();
            self.alive_at = match frame.kind {
                FrameKind::Taken => now,
                FrameKind::Alive => {
                    now.checked_sub(frame.decode::<StallReport>()?.stalled_for).unwrap_or(self.alive_at)
                }
                _ => return frame.expect(FrameKind::Answer)?.decode(),
            };
        }
    }

    /// Returns the time at which the client will consider the daemon frozen if the daemon shows no progress before.
    fn frozen_at(&self) -> Instant {
        self.alive_at + FROZEN_TIMEOUT
    }

    /// Announces to the daemon that this process is about to wait for the store lock.
    ///
    /// # Errors
    /// Any I/O error of the connection.
    pub fn ask_to_yield(&mut self) -> io::Result<()> {
        self.stream.write_all(&Frame::empty(FrameKind::Yield).to_bytes())
    }
}

/// Connects to a socket, and gives up at the time `end`. While the socket's backlog is full, `connect` waits in the
/// kernel, because a busy daemon soon accepts connections again.
fn dial(socket: &Path, end: Instant) -> io::Result<UnixStream> {
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&stream, Timeout::Send, Some(left(end)?))?;
    connect(&stream, &SocketAddrUnix::new(socket)?)?;
    Ok(stream.into())
}

/// A connection to the daemon whose reads end at a deadline, even if the bytes arrive one at a time.
struct DeadlineReader<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now()).max(MIN_READ_TIMEOUT);
        set_socket_timeout(self.stream, Timeout::Recv, Some(left))?;
        Read::read(&mut self.stream, bytes)
    }
}

fn read(stream: &mut UnixStream, end: Instant) -> io::Result<Frame> {
    Frame::read_blocking(&mut DeadlineReader { stream, end }, MAX_ANSWER_BODY_BYTES)
}

fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    // The kernel reads a socket timeout of zero as no timeout, and rounds timeouts to microseconds.
    if left < Duration::from_micros(1) { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;
    use crate::frame::StoreIdentity;

    fn served(serve: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, io::Result<DaemonConnection>) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("sock");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || serve(listener.accept().unwrap().0));
        let opened = DaemonConnection::open(&socket, FROZEN_TIMEOUT, |_| true);
        (folder, opened)
    }

    fn send(stream: &mut UnixStream, frame: &Frame) {
        stream.write_all(&frame.to_bytes()).unwrap();
    }

    fn greet(stream: &mut UnixStream) {
        send(stream, &Frame::new(FrameKind::Hello, &Hello::new(StoreIdentity::Nothing)).unwrap());
    }

    /// Sends a request to a fake daemon that greets and then runs `serve`, and returns the answer.
    fn asked(serve: impl FnOnce(&mut UnixStream) + Send + 'static) -> io::Result<String> {
        let (_folder, opened) = served(|mut stream| {
            greet(&mut stream);
            assert_eq!(Frame::read_blocking(&mut stream, 100).unwrap().decode::<u32>().unwrap(), 5);
            serve(&mut stream);
        });
        opened.unwrap().ask(FrameKind::Verb, &5_u32, Duration::from_secs(60))
    }

    fn alive(stream: &mut UnixStream, stalled_for: Duration) {
        let _ = stream.write_all(&Frame::new(FrameKind::Alive, &StallReport { stalled_for }).unwrap().to_bytes());
    }

    fn is_late(error: &io::Error) -> bool {
        matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
    }

    #[test]
    fn daemon_is_waited_for_while_it_makes_progress() {
        let answer = asked(|stream| {
            send(stream, &Frame::empty(FrameKind::Taken));
            for _ in 0..3 {
                thread::sleep(FROZEN_TIMEOUT / 2);
                alive(stream, FROZEN_TIMEOUT / 4);
            }
            send(stream, &Frame::new(FrameKind::Answer, &"done").unwrap());
        });
        assert_eq!(answer.unwrap(), "done");
    }

    #[test]
    fn daemon_is_waited_for_within_time_of_call() {
        let (_folder, opened) = served(|mut stream| {
            greet(&mut stream);
            for _ in 0..30 {
                thread::sleep(Duration::from_millis(100));
                alive(&mut stream, Duration::ZERO);
            }
        });
        let begun = Instant::now();
        let answer = opened.unwrap().ask::<String>(FrameKind::Verb, &5_u32, Duration::from_millis(300));
        assert!(is_late(&answer.unwrap_err()) && begun.elapsed() < FROZEN_TIMEOUT);
    }

    #[test]
    fn daemon_is_left_when_frozen() {
        // The fake daemon keeps the connection open, because the end of the connection would be a different error.
        let silent = |stream: UnixStream| {
            thread::sleep(FROZEN_TIMEOUT * 3);
            drop(stream);
        };
        let (_folder, opened) = served(silent);
        assert!(is_late(&opened.unwrap_err()), "it does not greet");
        let answer = asked(move |stream| silent(stream.try_clone().unwrap()));
        assert!(is_late(&answer.unwrap_err()), "it does not take the request");
        // The daemon's process runs, but its store hangs.
        let answer = asked(|stream| {
            send(stream, &Frame::empty(FrameKind::Taken));
            for second in 1..9 {
                thread::sleep(Duration::from_secs(1));
                alive(stream, Duration::from_secs(second));
            }
        });
        assert!(is_late(&answer.unwrap_err()), "its store finishes nothing");
    }

    #[test]
    fn daemon_is_left_when_answer_drips() {
        let (_folder, opened) = served(|mut stream| {
            for byte in Frame::new(FrameKind::Hello, &Hello::new(StoreIdentity::Nothing)).unwrap().to_bytes() {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(FROZEN_TIMEOUT / 3);
            }
        });
        assert!(is_late(&opened.unwrap_err()));
    }

    #[test]
    fn daemon_is_waited_for_when_backlog_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("sock");
        let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let listener = UnixListener::from(listener);
        let waiting = UnixStream::connect(&socket).unwrap();
        let soon = DaemonConnection::open(&socket, Duration::from_millis(50), |_| true).unwrap_err();
        assert!(is_late(&soon), "{soon}");
        let serving = thread::spawn(move || {
            thread::sleep(FROZEN_TIMEOUT / 2);
            drop(listener.accept().unwrap());
            greet(&mut listener.accept().unwrap().0);
        });
        DaemonConnection::open(&socket, FROZEN_TIMEOUT * 2, |_| true).unwrap();
        serving.join().unwrap();
        drop(waiting);
    }

    #[test]
    fn daemon_missing_is_told_from_stranger() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("sock");
        assert_eq!(DaemonConnection::open(&socket, FROZEN_TIMEOUT, |_| true).unwrap_err().kind(), ErrorKind::NotFound);
        let listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(
            DaemonConnection::open(&socket, FROZEN_TIMEOUT, |_| false).unwrap_err().kind(),
            ErrorKind::PermissionDenied
        );
        drop(listener);
        assert_eq!(
            DaemonConnection::open(&socket, FROZEN_TIMEOUT, |_| true).unwrap_err().kind(),
            ErrorKind::ConnectionRefused
        );
    }
}
