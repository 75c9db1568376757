//! A second process of this program, which removes a container's interface and may end after the plugin: see
//! [`wiring::disconnect`].

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// The name by which the program knows what it is.
pub const NAME: &str = "margay-remover";

/// Starts the process, in the network namespace of this thread. It has none of the plugin's input and output: a runtime reads
/// the plugin's output to its end.
pub(super) fn start(interface: &str) -> io::Result<Child> {
    let mut remover = Command::new("/proc/self/exe");
    remover.arg0(NAME).arg(interface).env_clear();
    remover.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

/// The whole process. Its argument is the interface.
///
/// # Returns
/// The exit status: see [`wiring::remove_interface`]. 255 without a name.
pub fn run(mut arguments: impl Iterator<Item = OsString>) -> u8 {
    let interface = arguments.next().and_then(|name| name.into_string().ok());
    interface.map_or(u8::MAX, |interface| wiring::remove_interface(&interface))
}
