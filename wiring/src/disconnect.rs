//! Taking a container's network down.
//!
//! The kernel removes a pair at once, with its addresses and routes, and then makes the caller wait until no processor can
//! still see it (`rcu_barrier` in `netdev_run_todo`). Nobody needs that wait, and nothing gets around it for the thread
//! that removes: see the numbers in `disconnect`.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Errno, Error};
use crate::link::check_name;
use crate::messages;
use crate::namespace::{Namespace, Outcome, Unopened, apart};
use crate::netlink::Socket;

/// How often the kernel is asked whether the interface is gone. It answers only when nobody changes interfaces.
const FIRST_LOOK: Duration = Duration::from_micros(100);
const LAST_LOOK: Duration = Duration::from_millis(2);

/// Removes an interface from a container, of whatever kind it is, and the other end with it. The host's routes to it go
/// too. Without a namespace (an empty path, or one that leads nowhere) and without the interface, all is done already.
///
/// When this returns, the interface and its other end are gone from both namespaces. A thread may still be in the kernel
/// then: a process that ends right away is held up by that, and one that has something else to do loses nothing.
///
/// # Errors
///
/// The path leads to something else than a namespace, the kernel refuses the removal, or the deadline comes first.
pub fn disconnect(namespace: &Path, interface: &str, deadline: Instant) -> Result<(), Error> {
    // The kernel has no interface with a name that it does not take.
    if namespace.as_os_str().is_empty() || check_name(interface).is_err() {
        return Ok(());
    }
    let container = match Namespace::open(namespace) {
        Ok(container) => container,
        Err(Unopened::Gone(_)) => return Ok(()),
        Err(Unopened::Other(error)) => return Err(Error::failed("failed to enter netns", error)),
    };
    let late = || Error::TimedOut(format!("timed out deleting device in netns {}", namespace.display()));
    let name = interface.to_owned();
    apart(deadline, late, move |outcome| {
        if let Err(error) = container.enter() {
            drop(outcome.send(Err(Error::failed("failed to enter netns", error))));
        } else {
            remove(&name, outcome);
        }
    })
}

/// Removes an interface from the namespace of this thread. One thread removes it and then waits in the kernel, and this
/// one looks meanwhile whether it is gone. The first of the two that knows tells.
fn remove(name: &str, outcome: &Outcome<()>) {
    let sockets = Socket::route().and_then(|remover| Ok((remover, Socket::route()?)));
    let (remover, watcher) = match sockets {
        Ok(sockets) => sockets,
        Err(error) => return drop(outcome.send(Err(error))),
    };
    let request = messages::remove_named(name);
    let tell = outcome.clone();
    let removal = thread::Builder::new().name("wiring-remover".to_owned()).spawn(move || {
        let removed = match remover.one(request) {
            Ok(_) | Err(Errno::NO_DEVICE) => Ok(()),
            Err(errno) => Err(Error::failed("failed to clean up workload's pod interface inside netns", errno)),
        };
        // Where the other thread was first, nobody takes this.
        drop(tell.send(removed));
    });
    let removal = match removal {
        Ok(removal) => removal,
        Err(error) => {
            return drop(outcome.send(Err(Error::failed("failed to start a thread", Errno::from(&error)))));
        }
    };
    let mut pause = FIRST_LOOK;
    while !removal.is_finished() {
        if watcher.one(messages::look_up(name)) == Err(Errno::NO_DEVICE) {
            return drop(outcome.send(Ok(())));
        }
        thread::sleep(pause);
        pause = pause.saturating_mul(2).min(LAST_LOOK);
    }
}
