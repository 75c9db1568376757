//! Handles signals that ask a command to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::error::{CommandFailure, CommandResult};

/// The exit code of an interrupted command.
pub(crate) const INTERRUPTED: u8 = 130;

/// Catches SIGINT, SIGTERM and SIGHUP until this value is dropped. The first signal asks the command to end in an
/// orderly way, and the second signal ends the process at once.
#[derive(Debug)]
pub(crate) struct Interrupt {
    flag: Arc<AtomicBool>,
    ids: Vec<SigId>,
}

impl Interrupt {
    pub(crate) fn listen() -> CommandResult<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        let mut this = Self { flag: flag.clone(), ids: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // The first signal handler ends the process if the flag is already set, and the second signal handler sets
            // the flag. In the reverse order, the first signal would set the flag and then end the process.
            let registered = [
                signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED.into(), flag.clone()),
                signal_hook::flag::register(signal, flag.clone()),
            ];
            for id in registered {
                this.ids.push(id.map_err(|error| CommandFailure::new(format!("cannot listen for signals: {error}")))?);
            }
        }
        Ok(this)
    }

    /// Returns a flag that becomes true when a signal to end the command arrives.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    /// True if a signal to end the command has arrived.
    pub(crate) fn came(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}
