//! A client that blocks: the plugin asks once and ends.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::frame::{Frame, Kind, MAX_ANSWER};
use crate::hello::Hello;
use crate::peer;

/// How long a client waits for a daemon to take its request, beginning when it connects.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// A connection to a daemon that has said what it has.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// Until then the daemon must have taken the request.
    patience: Instant,
    /// The daemon's greeting.
    pub hello: Hello,
}

impl Connection {
    /// Connects to a daemon's socket. `is_trusted` says whether the daemon may run as this user.
    ///
    /// # Errors
    /// `NotFound` and `ConnectionRefused` if there is no daemon; `PermissionDenied` if it runs as a user who is not
    /// trusted; `TimedOut` and `WouldBlock` if it does not answer within [`PATIENCE`]; `InvalidData` for one of another version.
    pub fn open(socket: &Path, is_trusted: impl Fn(u32) -> bool) -> io::Result<Self> {
        let patience = Instant::now() + PATIENCE;
        let mut stream = dial(socket)?;
        if !is_trusted(peer::uid(&stream)?) {
            return Err(io::Error::new(ErrorKind::PermissionDenied, "the daemon runs as another user"));
        }
        let hello: Hello = read(&mut stream, patience)?.expect(Kind::Hello)?.decode()?;
        Ok(Self { stream, patience, hello })
    }

    /// Sends a request and waits for the answer, at most `within`, once the daemon has taken the request.
    ///
    /// # Errors
    /// `TimedOut` and `WouldBlock` if the daemon has not taken the request within [`PATIENCE`], or not answered in time; those of
    /// the stream. The request may have been carried out all the same. The daemon does nothing more for it once the connection is
    /// dropped, save what it has begun to commit.
    pub fn ask<T: DeserializeOwned>(mut self, kind: Kind, request: &impl Serialize, within: Duration) -> io::Result<T> {
        let end = Instant::now() + within;
        let bytes = Frame::new(kind, request)?.to_bytes();
        set_socket_timeout(&self.stream, Timeout::Send, Some(left(self.patience.min(end))?))?;
        self.stream.write_all(&bytes)?;
        read(&mut self.stream, self.patience.min(end))?.expect(Kind::Taken)?;
        read(&mut self.stream, end)?.expect(Kind::Answer)?.decode()
    }

    /// Tells the daemon that this process is about to wait for the lock of the store.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn ask_to_yield(&mut self) -> io::Result<()> {
        self.stream.write_all(&Frame::empty(Kind::Yield).to_bytes())
    }
}

/// Connects within [`PATIENCE`]: a daemon that hangs has a full queue of connections some time.
fn dial(socket: &Path) -> io::Result<UnixStream> {
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&stream, Timeout::Send, Some(PATIENCE))?;
    connect(&stream, &SocketAddrUnix::new(socket)?)?;
    Ok(stream.into())
}

/// A stream that is read until a moment, however little comes at a time.
struct Until<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        set_socket_timeout(self.stream, Timeout::Recv, Some(left(self.end)?))?;
        Read::read(&mut self.stream, bytes)
    }
}

fn read(stream: &mut UnixStream, end: Instant) -> io::Result<Frame> {
    Frame::read_blocking(&mut Until { stream, end }, MAX_ANSWER)
}

/// The time that is left until a moment.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    // The system takes no time at all for without end, and knows no nanoseconds.
    if left < Duration::from_micros(1) { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;
    use crate::hello::Identity;

    fn served(serve: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, io::Result<Connection>) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("sock");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || serve(listener.accept().unwrap().0));
        let opened = Connection::open(&socket, |_| true);
        (folder, opened)
    }

    fn send(stream: &mut UnixStream, frame: &Frame) {
        stream.write_all(&frame.to_bytes()).unwrap();
    }

    fn greet(stream: &mut UnixStream) {
        send(stream, &Frame::new(Kind::Hello, &Hello::new(Identity::Nothing)).unwrap());
    }

    #[test]
    fn a_request_is_taken_and_answered() {
        let (_folder, opened) = served(|mut stream| {
            greet(&mut stream);
            let asked = Frame::read_blocking(&mut stream, 100).unwrap();
            assert_eq!((asked.kind, asked.decode::<u32>().unwrap()), (Kind::Verb, 5));
            send(&mut stream, &Frame::empty(Kind::Taken));
            thread::sleep(PATIENCE + Duration::from_millis(100));
            send(&mut stream, &Frame::new(Kind::Answer, &"done").unwrap());
        });
        let answer: String = opened.unwrap().ask(Kind::Verb, &5_u32, Duration::from_secs(60)).unwrap();
        assert_eq!(answer, "done", "after it was taken there is time");
    }

    #[test]
    fn a_daemon_that_hangs_is_left_after_a_second() {
        let begun = Instant::now();
        let (_folder, opened) = served(|stream| {
            thread::sleep(Duration::from_secs(3));
            drop(stream);
        });
        assert!(matches!(opened.unwrap_err().kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
        let (_folder, opened) = served(|mut stream| {
            greet(&mut stream);
            thread::sleep(Duration::from_secs(3));
            drop(stream);
        });
        let answer = opened.unwrap().ask::<String>(Kind::Verb, &5_u32, Duration::from_secs(60));
        assert!(matches!(answer.unwrap_err().kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
        assert!(begun.elapsed() < PATIENCE * 3, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_daemon_that_drips_is_left_after_a_second_too() {
        let (_folder, opened) = served(|mut stream| {
            for byte in Frame::new(Kind::Hello, &Hello::new(Identity::Nothing)).unwrap().to_bytes() {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(400));
            }
        });
        assert!(matches!(opened.unwrap_err().kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
    }

    #[test]
    fn no_daemon_and_a_stranger_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("sock");
        assert_eq!(Connection::open(&socket, |_| true).unwrap_err().kind(), ErrorKind::NotFound);
        let listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(Connection::open(&socket, |_| false).unwrap_err().kind(), ErrorKind::PermissionDenied);
        drop(listener);
        assert_eq!(Connection::open(&socket, |_| true).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}
