//! Queries the kernel about the process at the other end of a connection.

use std::io;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

/// Returns the user id of the process at the other end of a connection, as of that process's call of `connect` or
/// `listen`.
///
/// # Errors
/// Any system error.
pub fn uid(stream: impl AsFd) -> io::Result<u32> {
    Ok(sockopt::socket_peercred(stream)?.uid.as_raw())
}

/// Returns whether the process at the other end of a connection has ended or has closed the connection. Returns at
/// once, even if the peer sends nothing.
pub fn is_gone(stream: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut polled, Some(&now)) {
        Ok(_) => polled[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
        // A failed or interrupted `poll` does not prove that the other end is gone.
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn peer_closing_is_seen_at_once() {
        let (one, mut other) = UnixStream::pair().unwrap();
        assert_eq!(uid(&one).unwrap(), rustix::process::geteuid().as_raw());
        assert!(!is_gone(&one));
        other.write_all(b"x").unwrap();
        assert!(!is_gone(&one));
        drop(other);
        assert!(is_gone(&one), "although there is something to read");
        let (one, other) = UnixStream::pair().unwrap();
        other.shutdown(Shutdown::Write).unwrap();
        assert!(is_gone(&one));
    }
}
