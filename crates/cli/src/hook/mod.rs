//! `margay watch --exec` and `--webhook`: a receiver gets each event, in order, and a cursor says how far it has come.
//!
//! The store's own history is the queue: the watch ends while an attempt fails, and goes on at the cursor. So an event is lost only
//! if the store gives up its history before; the receiver then gets a `gap`, and the state. An event may come twice:
//! the cursor is written after the last event of a revision was handled.

mod cursor;
mod program;
mod webhook;

use std::path::Path;
use std::time::{Duration, Instant};

use kv::Revision;

pub(crate) use self::cursor::Cursor;
use self::program::Program;
use self::webhook::Webhook;
use crate::error::Result;
use crate::interrupt::Interrupt;

/// The waits before a failed attempt is repeated: they double up to the second one.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// The pause between two glances at a running program, or at signals.
const GLANCE: Duration = Duration::from_millis(5);

/// An event for the receiver.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    /// The event as a line of JSON.
    pub(crate) json: String,
    /// The kind of event and its address, for notes.
    pub(crate) name: String,
    /// The revision that is handled when this event is; `None` if further events of it follow.
    pub(crate) completes: Option<Revision>,
}

/// How a delivery ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivered {
    Done,
    /// A signal came first.
    Interrupted,
    /// The time was over after a failed attempt.
    Late,
}

/// The receiver of events.
#[derive(Debug)]
pub(crate) struct Hook {
    receiver: Receiver,
    first_wait: Duration,
}

#[derive(Debug)]
enum Receiver {
    Program(Program),
    Webhook(Box<Webhook>),
}

impl Hook {
    /// A program.
    ///
    /// # Errors
    /// There is no such program.
    pub(crate) fn program(path: &Path, timeout: Duration) -> Result<Self> {
        Ok(Self { receiver: Receiver::Program(Program::new(path, timeout)?), first_wait: WAITS[0] })
    }

    /// A URL, and the file of the secret with which requests are signed.
    ///
    /// # Errors
    /// The URL is none of http or https; the secret or the certificates of the system cannot be read.
    pub(crate) fn webhook(url: &str, secret: Option<&Path>, timeout: Duration) -> Result<Self> {
        Ok(Self { receiver: Receiver::Webhook(Box::new(Webhook::new(url, secret, timeout)?)), first_wait: WAITS[0] })
    }

    /// Gives the receiver the event until an attempt succeeds, and begins none after `until`. `failed` is called after each
    /// attempt that did not succeed.
    pub(crate) fn deliver(
        &self,
        delivery: &Delivery,
        interrupt: &Interrupt,
        until: Option<Instant>,
        mut failed: impl FnMut(&str),
    ) -> Delivered {
        let mut wait = self.first_wait;
        loop {
            if interrupt.came() {
                return Delivered::Interrupted;
            }
            let (name, done) = match &self.receiver {
                Receiver::Program(program) => (program.name(), program.run(&delivery.json, interrupt)),
                Receiver::Webhook(webhook) => (webhook.name(), webhook.post(&delivery.json)),
            };
            let Err(why) = done else { return Delivered::Done };
            if interrupt.came() {
                return Delivered::Interrupted;
            }
            failed(&format!("{name} failed for {}: {why}; trying again in {} s", delivery.name, wait.as_secs()));
            let next = Instant::now() + wait;
            if until.is_some_and(|until| next > until) {
                return Delivered::Late;
            }
            while Instant::now() < next && !interrupt.came() {
                std::thread::sleep(GLANCE);
            }
            wait = (wait * 2).min(WAITS[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn delivery() -> Delivery {
        Delivery { json: "{\"event\":\"assigned\"}".into(), name: "assigned 10.0.0.1".into(), completes: None }
    }

    #[test]
    fn a_run_is_repeated_until_it_succeeds() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::listen().unwrap();
        let (seen, tries) = (folder.path().join("seen"), folder.path().join("tries"));
        let script = format!(
            "echo x >>{tries}; [ $(wc -l <{tries}) -gt 2 ] || exit 7; cat >>{seen}",
            tries = tries.display(),
            seen = seen.display()
        );
        let mut notes = Vec::new();
        fs::write(folder.path().join("hook"), format!("#!/bin/sh\n{script}\n")).unwrap();
        let path = folder.path().join("hook");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let hook = Hook::program(&path, Duration::from_secs(5)).unwrap();
        let done =
            Hook { first_wait: Duration::from_millis(10), ..hook }
                .deliver(&delivery(), &interrupt, None, |note| notes.push(note.to_owned()));
        assert_eq!((done, notes.len()), (Delivered::Done, 2));
        assert!(notes[0].contains("failed for assigned 10.0.0.1: exit code 7; trying again"), "{notes:?}");
        assert_eq!(fs::read_to_string(&seen).unwrap(), "{\"event\":\"assigned\"}\n");
    }
}
