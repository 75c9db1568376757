//! Disconnects a container from its network by removing the container's interface.
//!
//! The kernel immediately removes both interfaces of a pair, with their addresses and routes. After the removal, the
//! kernel blocks the removing thread for 15 ms or more, until no processor can still see the interfaces (`rcu_barrier`
//! in `netdev_run_todo`). A process cannot exit while one of its threads is blocked in the kernel. A second process
//! removes the interfaces, because the kernel blocks the remover, and the caller does not wait for it to exit.

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

/// The pause before the second check whether the interface still exists. The pause between two checks doubles each
/// time, up to [`MAX_POLL_INTERVAL`]. While another process changes interfaces, the kernel delays the answer to such a
/// check.
const MIN_POLL_INTERVAL: Duration = Duration::from_micros(100);
const MAX_POLL_INTERVAL: Duration = Duration::from_micros(800);

/// Starts a process that calls [`remove_interface`] with the given interface name and exits with the returned status.
/// The new process must run in the network namespace of the thread that calls this function, and must not inherit the
/// caller's open files.
pub type StartRemover = fn(interface: &str) -> io::Result<Child>;

/// Removes an interface of any kind from a container, together with the interface's peer and the host's routes to the
/// container. It is no error if the interface does not exist, or if the namespace path is empty or does not exist.
///
/// After a successful return, the interface and its peer are gone from both network namespaces. The helper process that
/// `start` created may still be blocked in the kernel. If `start` cannot start a process, the calling process removes
/// the interface itself.
///
/// # Errors
///
/// The path leads to a file that is not a network namespace, the kernel refuses to remove the interface, or the
/// deadline passes.
pub fn disconnect(namespace: &Path, interface: &str, deadline: Instant, start: StartRemover) -> Result<(), Error> {
    // If the kernel rejects a name as invalid, no interface with that name can exist.
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

/// Removes an interface from this process's network namespace.
///
/// # Returns
///
/// The exit status of the process that [`StartRemover`] starts: 0 if the interface does not exist any more, else the
/// kernel's error number.
pub fn remove_interface(name: &str) -> u8 {
    match remove_here(name) {
        Ok(()) => 0,
        Err(Errno(number)) => u8::try_from(number).unwrap_or(u8::MAX),
    }
}

/// Starts a process that removes an interface from this thread's network namespace, and waits until the interface does
/// not exist any more.
fn remove(name: &str, start: StartRemover) -> Result<(), Error> {
    let refused = |errno| Error::failed("failed to clean up workload's pod interface inside netns", errno);
    let socket = NetlinkSocket::route()?;
    let is_gone = || socket.one(messages::look_up(name)) == Err(Errno::NO_DEVICE);
    // A repeated DEL finds no interface, and therefore must not start a process.
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
            // The helper process was killed before it removed the interface, or it succeeded and another interface has
            // since got the same name.
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
