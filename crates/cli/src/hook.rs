//! Delivers each event of `margay watch --exec` or `margay watch --webhook` to a receiver, in order. The receiver is
//! either a program that reads the event from its stdin, or a URL to which the event is posted. Posted events can be
//! signed with a secret. The cursor file records the revision up to which all events were delivered.
//!
//! Events that are not yet delivered are kept only in the store's own history. While the receiver fails, the watch of
//! the store is closed. When the receiver accepts events again, the watch restarts at the revision in the cursor file.
//! An event is lost only if the store compacts its history before the watch restarts. After the loss of events, the
//! receiver gets a `gap` event and the current state of the store. An event may be delivered twice, since the cursor
//! file is written only after the last event of a revision was delivered.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use datastore::{TextFault, text_fault};
use kv::Revision;
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use ring::hmac::{self, HMAC_SHA256, Key};
use serde::{Deserialize, Serialize};
use tokio_rustls::rustls::crypto;
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::digest::hex;
use crate::error::{CommandFailure, CommandResult};
use crate::interrupt::Interrupt;
use crate::output::write_whole_file;

/// The pause before a failed delivery is repeated, and the maximum pause. The pause doubles after each failed delivery.
const RETRY_WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// Interval at which a running receiver program and the signal flag are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// An event that is ready to be sent to the receiver.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    pub(crate) json: String,
    /// The kind of the event and the event's address, as shown in messages.
    pub(crate) name: String,
    /// The revision whose delivery this event completes; `None` if the event is not the last event of its revision.
    pub(crate) completes: Option<Revision>,
}

/// The outcome of the attempts to deliver an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeliveryOutcome {
    Done,
    /// A signal to end the command arrived before the event was delivered.
    Interrupted,
    /// The delivery failed, and the next attempt would be after the command's time limit.
    Late,
}

/// Delivers events to a program or a URL, with retries.
#[derive(Debug)]
pub(crate) struct Hook {
    receiver: Receiver,
    first_wait: Duration,
}

#[derive(Debug)]
enum Receiver {
    Program(ProgramReceiver),
    Webhook(Box<WebhookReceiver>),
}

impl Hook {
    /// Creates a hook that runs a program for each event.
    ///
    /// # Errors
    /// The receiver program's file does not exist.
    pub(crate) fn program(path: &Path, timeout: Duration) -> CommandResult<Self> {
        Ok(Self { receiver: Receiver::Program(ProgramReceiver::new(path, timeout)?), first_wait: RETRY_WAITS[0] })
    }

    /// Creates a hook that posts each event to a URL. `secret` is the path of the file with the secret that signs the
    /// requests.
    ///
    /// # Errors
    /// The URL is neither http nor https, or the secret or the system's CA certificates cannot be read.
    pub(crate) fn webhook(url: &str, secret: Option<&Path>, timeout: Duration) -> CommandResult<Self> {
        Ok(Self {
            receiver: Receiver::Webhook(Box::new(WebhookReceiver::new(url, secret, timeout)?)),
            first_wait: RETRY_WAITS[0],
        })
    }

    /// Sends an event to the receiver, repeatedly until the receiver accepts the event. Makes no further delivery
    /// attempt after the time `until` or after a signal to end the command. Calls the closure `failed` with an error
    /// message after each failed attempt.
    pub(crate) fn deliver(
        &self,
        delivery: &Delivery,
        interrupt: &Interrupt,
        until: Option<Instant>,
        mut failed: impl FnMut(&str),
    ) -> DeliveryOutcome {
        let mut wait = self.first_wait;
        loop {
            if interrupt.came() {
                return DeliveryOutcome::Interrupted;
            }
            let (name, done) = match &self.receiver {
                Receiver::Program(program) => (program.name(), program.run(&delivery.json, interrupt)),
                Receiver::Webhook(webhook) => (webhook.name(), webhook.post(&delivery.json)),
            };
            let Err(why) = done else { return DeliveryOutcome::Done };
            if interrupt.came() {
                return DeliveryOutcome::Interrupted;
            }
            failed(&format!("{name} failed for {}: {why}; trying again in {} s", delivery.name, wait.as_secs()));
            let next = Instant::now() + wait;
            if until.is_some_and(|until| next > until) {
                return DeliveryOutcome::Late;
            }
            while Instant::now() < next && !interrupt.came() {
                std::thread::sleep(POLL_INTERVAL);
            }
            wait = (wait * 2).min(RETRY_WAITS[1]);
        }
    }
}

/// Interval at which the cursor file is written while no event needs to be delivered.
const CURSOR_INTERVAL: Duration = Duration::from_secs(10);

/// The cursor file, which records the last revision whose events were all delivered.
#[derive(Debug)]
pub(crate) struct CursorFile {
    path: PathBuf,
    saved: CursorContent,
    /// The revision up to which all events were delivered or needed no delivery. The cursor file may still contain an
    /// older revision than `reached`.
    reached: Revision,
    written: Instant,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct CursorContent {
    /// The id of the store or cluster that is watched. Cursor files that earlier versions wrote while a daemon had the
    /// store open have an empty store id.
    store: String,
    revision: i64,
    /// Why the watch cannot continue at the recorded revision (the store was replaced or reset); `None` if it can
    /// continue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

impl CursorFile {
    /// Reads the cursor file; a missing cursor file is no error. If the cursor has no store id yet, sets its id to the
    /// value of the argument `store`.
    ///
    /// # Errors
    /// The cursor file cannot be read, has no valid content, belongs to another store than `store`, or was refused
    /// before.
    pub(crate) fn load(path: &Path, store: &str) -> CommandResult<Self> {
        let advice = "delete the cursor file, and the next run begins with a list of the addresses in use; or name \
                      another cursor file";
        let failed = |why: String| CommandFailure::new(format!("the cursor {} {why}", path.display())).hint(advice);
        let saved = match fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(failed(format!("cannot be read: {error}"))),
            Ok(bytes) => Some(
                serde_json::from_slice::<CursorContent>(&bytes)
                    .ok()
                    .filter(|saved| saved.revision > 0)
                    .ok_or_else(|| failed("is not one that margay watch has written".to_owned()))?,
            ),
        };
        let unused = CursorContent { store: store.to_owned(), revision: 0, refused: None };
        let mut saved = saved.unwrap_or(unused);
        if saved.store.is_empty() {
            store.clone_into(&mut saved.store);
        } else if !store.is_empty() && saved.store != store {
            return Err(failed(format!("is about another store, {}, and this one is {store}", saved.store)));
        }
        if let Some(why) = &saved.refused {
            return Err(failed(format!("was refused before: {why}")));
        }
        Ok(Self { path: path.to_owned(), saved, reached: Revision::UNSET, written: Instant::now() })
    }

    /// Returns the last revision whose events were all delivered, or `None` if there is no cursor file yet.
    pub(crate) fn revision(&self) -> Option<Revision> {
        Some(Revision::new(self.saved.revision)).filter(|revision| revision.is_set())
    }

    /// Records that all events up to `revision` were delivered, and writes the cursor file.
    ///
    /// # Errors
    /// The cursor file cannot be written.
    pub(crate) fn save(&mut self, revision: Revision) -> CommandResult<()> {
        if revision.get() <= self.saved.revision {
            return Ok(());
        }
        self.saved.revision = revision.get();
        self.written = Instant::now();
        self.write()
    }

    /// Records that no event up to `revision` needed to be delivered. Writes the cursor file at most every 10 s, since
    /// a cluster with many changes reports progress twice a second. [`Self::finish`] writes the last recorded revision.
    ///
    /// # Errors
    /// The cursor file cannot be written.
    pub(crate) fn reach(&mut self, revision: Revision) -> CommandResult<()> {
        self.reached = self.reached.max(revision);
        if self.written.elapsed() < CURSOR_INTERVAL { Ok(()) } else { self.finish() }
    }

    /// Writes the last recorded revision to the cursor file.
    ///
    /// # Errors
    /// The cursor file cannot be written.
    pub(crate) fn finish(&mut self) -> CommandResult<()> {
        self.save(self.reached)
    }

    /// Records in the cursor file that the watch cannot continue at this cursor. If the cursor file did not record that
    /// the store was replaced or reset, a later `margay watch` could skip events once the new store's revision exceeds
    /// the cursor's.
    ///
    /// # Errors
    /// The cursor file cannot be written.
    pub(crate) fn refuse(&mut self, why: &str) -> CommandResult<()> {
        // The revision in the cursor file might be older than `reached`.
        self.saved.revision = self.saved.revision.max(self.reached.get());
        if self.revision().is_none() {
            return Ok(());
        }
        self.saved.refused = Some(why.to_owned());
        self.write()
    }

    fn write(&self) -> CommandResult<()> {
        let text = serde_json::to_string(&self.saved).map_err(|error| CommandFailure::new(format!("JSON: {error}")))?;
        write_whole_file(&self.path, &(text + "\n"))
    }
}

/// Time between SIGTERM and SIGKILL when the command ends a receiver program.
const EXIT_GRACE: Duration = Duration::from_secs(1);

/// A receiver program, which is run once for each event.
#[derive(Debug)]
struct ProgramReceiver {
    path: PathBuf,
    /// Time limit of one run of the receiver program, after which the run is ended and counts as failed.
    timeout: Duration,
}

impl ProgramReceiver {
    /// # Errors
    /// The receiver program's file does not exist.
    fn new(path: &Path, timeout: Duration) -> CommandResult<Self> {
        // A relative path of the receiver program is relative to the current folder; `PATH` is not searched.
        let path = fs::canonicalize(path).map_err(|error| {
            CommandFailure::new(format!("cannot run {}: {error}", path.display()))
                .hint("use --exec with the path of an existing program")
        })?;
        Ok(Self { path, timeout })
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Runs the receiver program, and succeeds if the program ends with exit code 0. The receiver program and its child
    /// processes form a process group. The whole process group is ended if the program times out or is interrupted.
    fn run(&self, json: &str, interrupt: &Interrupt) -> Result<(), String> {
        let mut command = Command::new(&self.path);
        let mut child = command.stdin(Stdio::piped()).process_group(0).spawn().map_err(|error| error.to_string())?;
        let written = child.stdin.take().map_or(Ok(()), |mut stdin| writeln!(stdin, "{json}"));
        match written {
            // If the receiver program does not read its whole stdin, writing to its stdin fails with a broken pipe,
            // which counts as no error.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                end_program(&mut child);
                return Err(error.to_string());
            }
            _ => {}
        }
        let until = Instant::now() + self.timeout;
        loop {
            match child.try_wait().map_err(|error| error.to_string())? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(exit_reason(status)),
                None if interrupt.came() || Instant::now() >= until => {
                    end_program(&mut child);
                    return Err(format!("it ran for more than {} s, and was killed", self.timeout.as_secs()));
                }
                None => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }
}

fn exit_reason(status: ExitStatus) -> String {
    status.code().map_or_else(|| status.to_string(), |code| format!("exit code {code}"))
}

/// Ends the receiver program's process group with SIGTERM, and after [`EXIT_GRACE`] with SIGKILL. Waits until the
/// receiver program itself has ended.
fn end_program(child: &mut Child) {
    let Ok(group) = i32::try_from(child.id()).map(Pid::from_raw) else { return };
    _ = killpg(group, Signal::SIGTERM);
    let until = Instant::now() + EXIT_GRACE;
    loop {
        // A zombie process keeps its process group alive, so the first process of the group is reaped here.
        _ = child.try_wait();
        // If killpg fails with EPERM, the process group still exists, but its processes now belong to another user.
        if killpg(group, None) == Err(Errno::ESRCH) {
            return;
        }
        if Instant::now() >= until {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    _ = killpg(group, Signal::SIGKILL);
    _ = child.wait();
}

/// Name of the HTTP header that carries the signature of a posted event. The value of the header is `sha256=` followed
/// by the hexadecimal HMAC-SHA256 of the request body, with the secret as the key.
const SIGNATURE_HEADER: &str = "Margay-Signature";

const MAKE_SECRET_HINT: &str = "create a secret with: openssl rand -hex 32";

/// A receiver that gets events as HTTP POST requests to a URL.
#[derive(Debug)]
struct WebhookReceiver {
    url: String,
    agent: Agent,
    /// The secret key that signs requests; `Debug` does not print the key.
    key: Option<Key>,
}

impl WebhookReceiver {
    /// # Errors
    /// The URL is neither http nor https, or the secret file or the system's CA certificates cannot be read.
    fn new(url: &str, secret: Option<&Path>, timeout: Duration) -> CommandResult<Self> {
        let is_https = url.starts_with("https://");
        if !is_https && !url.starts_with("http://") {
            return Err(CommandFailure::new("the URL of --webhook begins with neither http:// nor https://"));
        }
        let mut config = Agent::config_builder()
            .timeout_global(Some(timeout))
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("margay/", env!("CARGO_PKG_VERSION")));
        if is_https {
            config = config.tls_config(tls_config()?);
        }
        Ok(Self { url: url.to_owned(), agent: config.build().into(), key: secret.map(read_key).transpose()? })
    }

    /// Returns the URL without its login and query, both of which may contain secrets.
    fn name(&self) -> String {
        let (scheme, rest) = self.url.split_once("://").unwrap_or_default();
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let host = host.rsplit('@').next().unwrap_or_default();
        format!("{scheme}://{host}/{path}")
    }

    /// Posts an event to the URL. The delivery succeeds if the HTTP response status is 200 to 299.
    fn post(&self, json: &str) -> Result<(), String> {
        let mut request = self.agent.post(&self.url).header("Content-Type", "application/json");
        if let Some(key) = &self.key {
            request = request.header(SIGNATURE_HEADER, format!("sha256={}", hex(hmac::sign(key, json.as_bytes()))));
        }
        match request.send(json) {
            Ok(answer) if answer.status().is_success() => Ok(()),
            Ok(answer) => Err(format!("its answer is {}", answer.status())),
            // The error text of the HTTP client ureq could quote the URL, which may contain a secret.
            Err(ureq::Error::BadUri(_)) => Err("it is no URL that can be reached".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Reads the key that signs requests from a file. White space at the end of the key file is not part of the key.
fn read_key(path: &Path) -> CommandResult<Key> {
    let failed = |why: String| CommandFailure::new(format!("the secret {} {why}", path.display()));
    let secret = fs::read(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
    let secret = secret.trim_ascii_end();
    // A binary secret may by chance start with the bytes of a UTF-16 byte order mark.
    let is_text = str::from_utf8(secret).is_ok();
    match text_fault(secret) {
        Some(TextFault::Empty) => return Err(failed("is empty".to_owned()).hint(MAKE_SECRET_HINT)),
        Some(fault @ TextFault::ZeroBytes) => return Err(failed(format!("is none: {fault}")).hint(MAKE_SECRET_HINT)),
        Some(fault @ TextFault::ByteOrderMark) if is_text => {
            return Err(failed(format!("would not be the receiver's: {fault}"))
                .hint("save the secret file without the byte order mark"));
        }
        _ => {}
    }
    Ok(Key::new(HMAC_SHA256, secret))
}

/// Builds the TLS settings of the webhook client, which trusts the system's CA certificates or those in the file that
/// `SSL_CERT_FILE` names.
fn tls_config() -> CommandResult<TlsConfig> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        return Err(CommandFailure::new("this system has no trusted certificates for https")
            .hint("install the package ca-certificates, or set SSL_CERT_FILE to a file with CA certificates"));
    }
    let certs: Vec<_> = found.certs.iter().map(|cert| Certificate::from_der(cert).to_owned()).collect();
    Ok(TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(certs)))
        .unversioned_rustls_crypto_provider(Arc::new(crypto::ring::default_provider()))
        .build())
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
    fn run_is_repeated_until_success() {
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
        assert_eq!((done, notes.len()), (DeliveryOutcome::Done, 2));
        assert!(notes[0].contains("failed for assigned 10.0.0.1: exit code 7; trying again"), "{notes:?}");
        assert_eq!(fs::read_to_string(&seen).unwrap(), "{\"event\":\"assigned\"}\n");
    }

    #[test]
    fn cursor_only_goes_forward_and_is_of_one_store() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cursor");
        let mut cursor = CursorFile::load(&path, "a").unwrap();
        assert_eq!(cursor.revision(), None);
        cursor.save(Revision::new(7)).unwrap();
        cursor.save(Revision::new(5)).unwrap();
        assert_eq!(CursorFile::load(&path, "a").unwrap().revision(), Some(Revision::new(7)));
        cursor.reach(Revision::new(6)).unwrap();
        cursor.reach(Revision::new(8)).unwrap();
        assert_eq!(CursorFile::load(&path, "a").unwrap().revision(), Some(Revision::new(7)), "a write for nothing");
        cursor.finish().unwrap();
        assert_eq!(CursorFile::load(&path, "a").unwrap().revision(), Some(Revision::new(8)));
        let other = format!("{:?}", CursorFile::load(&path, "b").unwrap_err());
        assert!(other.contains("is about another store, a, and this one is b"), "{other}");
        // An earlier version of margay wrote cursor files without a store id.
        fs::write(&path, r#"{"store":"","revision":7}"#).unwrap();
        CursorFile::load(&path, "a").unwrap().save(Revision::new(8)).unwrap();
        assert!(CursorFile::load(&path, "b").is_err());
        CursorFile::load(&path, "a").unwrap().refuse("it went back").unwrap();
        let refused = format!("{:?}", CursorFile::load(&path, "a").unwrap_err());
        assert!(refused.contains("was refused before: it went back"), "{refused}");
        let first = folder.path().join("first");
        let mut cursor = CursorFile::load(&first, "a").unwrap();
        cursor.refuse("it went back").unwrap();
        assert!(!first.exists(), "nothing was reached");
        cursor.reach(Revision::new(7)).unwrap();
        cursor.refuse("it went back").unwrap();
        cursor.finish().unwrap();
        assert!(CursorFile::load(&first, "a").is_err(), "a refusal at the first run");
        for garbage in ["", "{}", "[1", "{\"store\":\"a\",\"revision\":-1}"] {
            fs::write(&path, garbage).unwrap();
            let refused = format!("{:?}", CursorFile::load(&path, "a").unwrap_err());
            assert!(refused.contains("is not one that margay watch has written"), "{garbage}: {refused}");
        }
    }

    fn program(folder: &Path, script: &str) -> ProgramReceiver {
        let path = folder.join("hook");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        ProgramReceiver::new(&path, Duration::from_millis(500)).unwrap()
    }

    #[test]
    fn run_is_killed_when_hanging_but_not_when_ignoring_input() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::listen().unwrap();
        assert_eq!(
            program(folder.path(), "exec sleep 60").run("x", &interrupt).unwrap_err(),
            "it ran for more than 0 s, and was killed"
        );
        assert_eq!(program(folder.path(), "exit 0").run(&"x".repeat(1 << 20), &interrupt), Ok(()));
        assert!(program(folder.path(), "kill -9 $$").run("x", &interrupt).unwrap_err().contains("signal: 9"));
        assert!(ProgramReceiver::new(&folder.path().join("none"), Duration::from_secs(1)).is_err());
    }

    #[test]
    fn run_ends_with_children_after_cleanup_when_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::listen().unwrap();
        let path = |name: &str| folder.path().join(name);
        let [late, clean] = ["late", "clean"].map(path);
        let script =
            format!("(sleep 0.8; : >{}) & trap ': >{}; exit 0' TERM; sleep 60 & wait", late.display(), clean.display());
        let hook = program(folder.path(), &script);
        assert!(hook.run("x", &interrupt).is_err());
        assert!(clean.exists(), "the run was not asked to end");
        std::thread::sleep(Duration::from_millis(600));
        assert!(!late.exists(), "a child has outlived its run");
        fs::remove_file(&clean).unwrap();
        // A run of the receiver program is ended when a signal arrives.
        interrupt.flag().store(true, std::sync::atomic::Ordering::SeqCst);
        let ready = format!("trap ': >{}; exit 0' TERM; sleep 60 & wait", clean.display());
        let hook = ProgramReceiver { timeout: Duration::from_secs(60), ..program(folder.path(), &ready) };
        assert!(hook.run("x", &interrupt).is_err());
    }

    #[test]
    fn receiver_name_has_no_secrets() {
        let name = |url: &str| WebhookReceiver::new(url, None, Duration::from_secs(1)).unwrap().name();
        assert_eq!(name("http://user:secret@h.example:80/a/b?token=secret#x"), "http://h.example:80/a/b");
        assert_eq!(name("http://h.example?token=secret"), "http://h.example/");
        assert!(WebhookReceiver::new("ftp://user:secret@h/", None, Duration::from_secs(1)).is_err());
    }

    #[test]
    fn signature_matches_rfc_4231() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, "Jefe\n").unwrap();
        let code = hmac::sign(&read_key(&path).unwrap(), b"what do ya want for nothing?");
        assert_eq!(code.as_ref()[..4], [0x5b, 0xdc, 0xc1, 0x46]);
        for wrong in [&b" \n"[..], b"\0\0\0\0", b"\xef\xbb\xbfJefe"] {
            fs::write(&path, wrong).unwrap();
            assert!(read_key(&path).is_err(), "{wrong:?}");
        }
        fs::write(&path, b"\xff\xfe\x01").unwrap();
        assert!(read_key(&path).is_ok(), "random bytes");
    }
}
