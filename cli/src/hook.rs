//! `margay watch --exec`: a program that is run for each event, in order, and the place up to which it has done so.
//!
//! The store's own history is the queue: the watch ends while a run fails, and goes on at the cursor. So an event is lost only if
//! the store gives up its history before; the program then gets a `gap`, and the state. An event may come twice: the
//! cursor is written after the last event of a revision was handled.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kv::Revision;
use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::output::whole_file;

/// The waits before a failed run is repeated: they double up to the second one.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// The pause between two glances at a running program, or at signals.
const GLANCE: Duration = Duration::from_millis(5);

/// An event for the program.
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
}

/// The program.
#[derive(Debug)]
pub(crate) struct Hook {
    program: PathBuf,
    /// A run that takes longer is killed and counts as failed.
    timeout: Duration,
    first_wait: Duration,
}

impl Hook {
    /// # Errors
    /// There is no such program.
    pub(crate) fn new(program: &Path, timeout: Duration) -> Result<Self> {
        // A relative path is one of this folder, not of PATH.
        let program = fs::canonicalize(program).map_err(|error| {
            Failure::new(format!("cannot run {}: {error}", program.display())).hint("give the path of a program")
        })?;
        Ok(Self { program, timeout, first_wait: WAITS[0] })
    }

    /// Runs the program with the event on its stdin until a run succeeds. `failed` is called after each run that did not.
    pub(crate) fn deliver(
        &self,
        delivery: &Delivery,
        interrupt: &Interrupt,
        mut failed: impl FnMut(&str),
    ) -> Delivered {
        let mut wait = self.first_wait;
        loop {
            if interrupt.came() {
                return Delivered::Interrupted;
            }
            let Err(why) = self.run(&delivery.json, interrupt) else { return Delivered::Done };
            if interrupt.came() {
                return Delivered::Interrupted;
            }
            failed(&format!(
                "{} failed for {}: {why}; trying again in {} s",
                self.program.display(),
                delivery.name,
                wait.as_secs()
            ));
            let until = Instant::now() + wait;
            while Instant::now() < until && !interrupt.came() {
                std::thread::sleep(GLANCE);
            }
            wait = (wait * 2).min(WAITS[1]);
        }
    }

    fn run(&self, json: &str, interrupt: &Interrupt) -> std::result::Result<(), String> {
        let mut child = Command::new(&self.program).stdin(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
        let written = child.stdin.take().map_or(Ok(()), |mut stdin| writeln!(stdin, "{json}"));
        match written {
            // A program need not read all of it.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                end(&mut child);
                return Err(error.to_string());
            }
            _ => {}
        }
        let until = Instant::now() + self.timeout;
        loop {
            match child.try_wait().map_err(|error| error.to_string())? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(reason(status)),
                None if interrupt.came() || Instant::now() >= until => {
                    end(&mut child);
                    return Err(format!("it ran for more than {} s, and was killed", self.timeout.as_secs()));
                }
                None => std::thread::sleep(GLANCE),
            }
        }
    }
}

fn reason(status: ExitStatus) -> String {
    status.code().map_or_else(|| status.to_string(), |code| format!("exit code {code}"))
}

fn end(child: &mut Child) {
    _ = child.kill();
    _ = child.wait();
}

/// A file with the last revision whose events were all handled.
#[derive(Debug)]
pub(crate) struct Cursor {
    path: PathBuf,
    saved: Option<Saved>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Saved {
    /// The id of the store, or of the cluster; empty if it was not known.
    store: String,
    revision: i64,
}

impl Cursor {
    /// Reads the file; it need not be there.
    ///
    /// # Errors
    /// The file cannot be read, is none of ours, or is about another store than `store`.
    pub(crate) fn load(path: &Path, store: &str) -> Result<Self> {
        let advice = "remove the file to begin with what is in use now, or name another one";
        let failed = |why: String| Failure::new(format!("the cursor {} {why}", path.display())).hint(advice);
        let saved = match fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(failed(format!("cannot be read: {error}"))),
            Ok(bytes) => Some(
                serde_json::from_slice::<Saved>(&bytes)
                    .ok()
                    .filter(|saved| saved.revision > 0)
                    .ok_or_else(|| failed("is not one that margay watch has written".to_owned()))?,
            ),
        };
        if let Some(saved) = saved.as_ref().filter(|saved| ![saved.store.as_str(), store].contains(&""))
            && saved.store != store
        {
            return Err(failed(format!("is about another store, {}, and this one is {store}", saved.store)));
        }
        let saved = saved.or_else(|| Some(Saved { store: store.to_owned(), revision: 0 }));
        Ok(Self { path: path.to_owned(), saved })
    }

    /// The last revision that was handled; `None` at the first run.
    pub(crate) fn revision(&self) -> Option<Revision> {
        self.saved.as_ref().map(|saved| Revision::new(saved.revision)).filter(|revision| revision.is_set())
    }

    /// Records that all up to this revision was handled.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn save(&mut self, revision: Revision) -> Result<()> {
        let Some(saved) = self.saved.as_mut().filter(|saved| saved.revision < revision.get()) else { return Ok(()) };
        saved.revision = revision.get();
        let text = serde_json::to_string(saved).map_err(|error| Failure::new(format!("JSON: {error}")))?;
        whole_file(&self.path, &(text + "\n"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn hook(folder: &Path, script: &str) -> Hook {
        let path = folder.join("hook");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Hook { first_wait: Duration::from_millis(10), ..Hook::new(&path, Duration::from_millis(500)).unwrap() }
    }

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
        let done = hook(folder.path(), &script).deliver(&delivery(), &interrupt, |note| notes.push(note.to_owned()));
        assert_eq!((done, notes.len()), (Delivered::Done, 2));
        assert!(notes[0].contains("failed for assigned 10.0.0.1: exit code 7; trying again"), "{notes:?}");
        assert_eq!(fs::read_to_string(&seen).unwrap(), "{\"event\":\"assigned\"}\n");
    }

    #[test]
    fn a_program_that_hangs_is_killed_and_one_that_reads_nothing_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::listen().unwrap();
        assert_eq!(
            hook(folder.path(), "exec sleep 60").run("x", &interrupt).unwrap_err(),
            "it ran for more than 0 s, and was killed"
        );
        assert_eq!(hook(folder.path(), "exit 0").run(&"x".repeat(1 << 20), &interrupt), Ok(()));
        assert!(hook(folder.path(), "kill -9 $$").run("x", &interrupt).unwrap_err().contains("signal: 9"));
        assert!(Hook::new(&folder.path().join("none"), Duration::from_secs(1)).is_err());
    }

    #[test]
    fn a_cursor_only_goes_forward_and_is_one_stores() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cursor");
        let mut cursor = Cursor::load(&path, "a").unwrap();
        assert_eq!(cursor.revision(), None);
        cursor.save(Revision::new(7)).unwrap();
        cursor.save(Revision::new(5)).unwrap();
        assert_eq!(Cursor::load(&path, "a").unwrap().revision(), Some(Revision::new(7)));
        assert_eq!(Cursor::load(&path, "").unwrap().revision(), Some(Revision::new(7)), "a daemon does not say the id");
        let other = format!("{:?}", Cursor::load(&path, "b").unwrap_err());
        assert!(other.contains("is about another store, a, and this one is b"), "{other}");
        for garbage in ["", "{}", "[1", "{\"store\":\"a\",\"revision\":-1}"] {
            fs::write(&path, garbage).unwrap();
            let refused = format!("{:?}", Cursor::load(&path, "a").unwrap_err());
            assert!(refused.contains("is not one that margay watch has written"), "{garbage}: {refused}");
        }
    }
}
