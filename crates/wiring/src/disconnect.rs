//! Taking a container's network down.
//!
//! The kernel removes a pair at once, with its addresses and routes. Then it holds the removing thread until no processor can
//! still see the pair (`rcu_barrier` in `netdev_run_todo`), 15 ms and more, and a process ends only when all its threads have left
//! the kernel. So another process removes the pair, and may still be in the kernel when the caller ends. Nobody waits for it.

use std::io;
use std::path::Path;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Errno, Error};
use crate::link::check_name;
use crate::messages;
use crate::namespace::{NamespaceError, NetNamespace, run_in_thread};
use crate::netlink::NetlinkSocket;

/// The pause before the second look at the interface. Later ones double, up to [`MAX_POLL_INTERVAL`]. The kernel answers only when
/// nobody changes interfaces.
const MIN_POLL_INTERVAL: Duration = Duration::from_micros(100);
const MAX_POLL_INTERVAL: Duration = Duration::from_micros(800);

/// Starts a process that calls [`remove_interface`] with this name and exits with its result. The process must be in the network
/// namespace of the thread that starts it, and must hold no file of the caller's open.
pub type StartRemover = fn(interface: &str) -> io::Result<Child>;

/// Removes an interface from a container, of whatever kind it is, and the other end with it. The host's routes to it go
/// too. Without a namespace (an empty path, or one that leads nowhere) and without the interface, all is done already.
///
/// When this returns, the interface and its other end are gone from both namespaces. The started process may still be in the
/// kernel. If it cannot be started, the calling process removes the interface itself.
///
/// # Errors
///
/// The path leads to something else than a namespace, the kernel refuses the removal, or the deadline comes first.
pub fn disconnect(namespace: &Path, interface: &str, deadline: Instant, start: StartRemover) -> Result<(), Error> {
    // The kernel has no interface with a name that it does not take.
    if namespace.as_os_str().is_empty() || check_name(interface).is_err() {
        return Ok(());
    }
    let container = match NetNamespace::open(namespace) {
        Ok(container) => container,
        Err(NamespaceError::Gone(_)) => return Ok(()),
        Err(NamespaceError::Other(error)) => return Err(Error::failed("failed to enter netns", error)),
    };
    let late = || Error::TimedOut(format!("timed out deleting device in netns {}", namespace.display()));
    let name = interface.to_owned();
    run_in_thread(deadline, late, move |outcome| {
        let entered = container.enter().map_err(|error| Error::failed("failed to enter netns", error));
        drop(outcome.send(entered.and_then(|()| remove(&name, start))));
    })
}

/// Removes an interface from the network namespace of this process.
///
/// # Returns
///
/// The exit status of a process that was started for this: 0 if the interface is gone, or the kernel's error number.
pub fn remove_interface(name: &str) -> u8 {
    match remove_here(name) {
        Ok(()) => 0,
        Err(Errno(number)) => u8::try_from(number).unwrap_or(u8::MAX),
    }
}

/// Removes an interface from the namespace of this thread: another process does it, and this one looks whether it is gone.
fn remove(name: &str, start: StartRemover) -> Result<(), Error> {
    let refused = |errno| Error::failed("failed to clean up workload's pod interface inside netns", errno);
    let socket = NetlinkSocket::route()?;
    let is_gone = || socket.one(messages::look_up(name)) == Err(Errno::NO_DEVICE);
    // A repeated DEL finds nothing, and starts no process.
    if is_gone() {
        return Ok(());
    }
    let Ok(mut remover) = start(name) else { return remove_here(name).map_err(refused) };
    let mut pause = MIN_POLL_INTERVAL;
    loop {
        thread::sleep(pause);
        if is_gone() {
            return Ok(());
        }
        match remover.try_wait().map(|ended| ended.map(|status| status.code())) {
            Ok(None) => pause = pause.saturating_mul(2).min(MAX_POLL_INTERVAL),
            Ok(Some(Some(number))) if number != 0 => return Err(refused(Errno(number))),
            // Somebody killed it, or the interface is back.
            Ok(Some(_)) | Err(_) => return remove_here(name).map_err(refused),
        }
    }
}

fn remove_here(name: &str) -> Result<(), Errno> {
    let socket = NetlinkSocket::open(netlink_sys::protocols::NETLINK_ROUTE)?;
    match socket.one(messages::remove_named(name)) {
        Ok(_) | Err(Errno::NO_DEVICE) => Ok(()),
        Err(errno) => Err(errno),
    }
}
