//! Whether a container has an interface.

use std::path::Path;
use std::time::Instant;

use crate::error::{Errno, Error};
use crate::link::look_up;
use crate::namespace::{Namespace, apart};
use crate::netlink::Socket;

/// True if a network namespace has an interface of this name.
///
/// # Errors
///
/// The namespace cannot be entered, the kernel does not answer, or the deadline comes first.
pub fn has_interface(namespace: &Path, name: &str, deadline: Instant) -> Result<bool, Error> {
    let container = Namespace::open(namespace)?;
    let name = name.to_owned();
    let late = || Error::TimedOut("timed out looking for an interface in netns".to_owned());
    apart(deadline, late, move |outcome| {
        let found = container.enter().and_then(|()| Socket::route()).and_then(|socket| match look_up(&socket, &name) {
            Ok(_) => Ok(true),
            Err(Errno::NO_DEVICE) => Ok(false),
            Err(errno) => Err(Error::failed("failed to look for an interface in netns", errno)),
        });
        drop(outcome.send(found));
    })
}
