//! The facts of a call that are known before its configuration: the name of the program, the environment, the machine.

use std::ffi::OsStr;
use std::path::Path;

use datastore::Drivers;

use crate::env::Environment;
use crate::identity::Host;
use crate::wired::remover;

/// The destination of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logging {
    /// To standard error and, if configured, to a file, for the rest of the process.
    Process,
    /// Nowhere, or to a place that the caller has arranged.
    Untouched,
}

/// All that a call of the plugin depends on, apart from standard input.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The stores that the program is made with.
    pub drivers: Drivers,
    /// Whether the plugin runs under the name `calico-ipam`.
    pub name: Name,
    /// The environment.
    pub environment: Environment,
    /// The machine.
    pub host: Host,
    /// The destination of the log.
    pub logging: Logging,
}

/// The name that the plugin runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// Its own, or any that is not `calico-ipam`.
    Margay,
    /// `calico-ipam` or `calico`: every network is treated as one of Calico's.
    CalicoIpam,
}

/// The plugin that the program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The main plugin, which wires containers.
    Main,
    /// The IPAM plugin.
    Ipam,
    /// The second process of a DEL: see [`wired::remover`](crate::wired::remover).
    Remover,
}

impl Kind {
    /// From the first argument of a process, which may be a path: `margay-cni` and `calico` are the main plugin.
    pub fn from_argument(argument: Option<&OsStr>) -> Self {
        match argument.and_then(|argument| Path::new(argument).file_name()).and_then(OsStr::to_str) {
            Some("margay-cni" | "calico") => Self::Main,
            Some(remover::NAME) => Self::Remover,
            _ => Self::Ipam,
        }
    }
}

impl Name {
    /// From the first argument of a process, which may be a path.
    pub fn from_argument(argument: Option<&OsStr>) -> Self {
        let file = argument.and_then(|argument| Path::new(argument).file_name());
        let file = file.and_then(OsStr::to_str);
        if matches!(file, Some("calico-ipam" | "calico")) { Self::CalicoIpam } else { Self::Margay }
    }
}

impl Invocation {
    /// The invocation of this process, of a program that is made with these stores.
    pub fn of_this_process(drivers: Drivers) -> Self {
        Self {
            drivers,
            name: Name::from_argument(std::env::args_os().next().as_deref()),
            environment: Environment::of_this_process(),
            host: Host::of_this_process(),
            logging: Logging::Process,
        }
    }
}
