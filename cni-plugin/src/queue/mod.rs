//! A queue of those who wait for the host's lock, as files: who gets the lock commits for all of them.
//!
//! A folder in memory (`/run`), readable by its owner alone, with a file for each request that waits. Its process has it locked
//! for as long as it waits, so a file that is not locked is what is left of one that has died or goes on alone, and is
//! removed by whoever finds it. Who has the host's lock reads the requests that are locked, commits them together with its own,
//! and adds to each file what came of it. Who gets the lock next looks there first; and so that all of them need not get it one
//! after the other, each is called, by a message that says nothing. One that gets lost costs that wait.
//!
//! A request names what its address is recorded with and nothing that lets anybody into a cluster; what lets in is only
//! compared, so that nobody commits for those who come in as somebody else.

mod codec;
#[cfg(test)]
mod tests;

use std::fs::{self, DirEntry, File, OpenOptions, TryLockError};
use std::future::pending;
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{self, SocketAddr};
use std::path::PathBuf;

use datastore::Location;
use ipam_core::assign::{AssignRequest, Assigned};
use ipam_core::attachment::Attachment;
use nix::unistd::geteuid;
use tokio::net::UnixDatagram;
use uuid::Uuid;

use crate::whole_file;
use codec::{FormAnswer, FormRequest, frame, is_plain, unframe};

/// Where the plugin waits.
pub(crate) const QUEUE_FOLDER: &str = "/run/margay/queue";

/// A request has some names; an answer is one or two addresses.
const MAX_BYTES: usize = 64 * 1024;
/// So many others are served together: each has a handle to write, and etcd takes 128 writes in a transaction.
const MOST: usize = 31;

/// The queue of those who ask the same of the same store.
#[derive(Clone, Debug)]
pub(crate) struct Queue {
    folder: PathBuf,
    what_for: String,
}

/// A request of our own that waits. It does so no more when this is dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    path: PathBuf,
    file: File,
    /// Where the answer begins.
    length: u64,
    /// Where one is called.
    bell: Option<UnixDatagram>,
}

/// What came of a request that waited.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It was carried out.
    Assigned(Vec<Assigned>),
    /// It could not be carried out together with others.
    Alone,
    /// Nobody has done anything that is known.
    Nothing,
}

/// A request of somebody else who waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) request: AssignRequest,
    file: File,
    name: String,
}

impl Queue {
    /// The queue in this folder for an attachment's node and network on a store, as one is let in there. The folder is made
    /// when somebody waits.
    pub(crate) fn new(folder: impl Into<PathBuf>, location: &Location, attachment: &Attachment) -> Self {
        // `Debug` shows how one is let in, and no secret.
        let Attachment { network, node, .. } = attachment;
        let what_for = format!("{} {location:?} {network} {node}", env!("CARGO_PKG_VERSION"));
        Self { folder: folder.into(), what_for }
    }

    /// Waits, if the request is one that others can carry out. That it cannot wait here is no error.
    pub(crate) fn wait(&self, request: &AssignRequest) -> Option<Ticket> {
        let bytes = if is_plain(request) { frame(FormRequest::of(&self.what_for, request)?)? } else { return None };
        let ticket = self.write(&bytes);
        ticket.inspect_err(|error| tracing::debug!(%error, "nobody is asked to assign for us")).ok()
    }

    fn write(&self, bytes: &[u8]) -> io::Result<Ticket> {
        let name = format!("{}{}", self.prefix(), Uuid::new_v4().simple());
        let file = whole_file::create_with(&self.folder, &name, |mut file| {
            // Before it can be read: nobody reads what is not locked.
            file.try_lock()?;
            file.write_all(bytes)
        })?;
        // Without it the answer is found all the same.
        let bell = address(&name).and_then(|address| net::UnixDatagram::bind_addr(&address));
        let bell = bell.and_then(|bell| bell.set_nonblocking(true).and_then(|()| UnixDatagram::from_std(bell))).ok();
        Ok(Ticket { path: self.folder.join(name), file, length: bytes.len() as u64, bell })
    }

    fn prefix(&self) -> String {
        whole_file::name_of(&[&self.what_for]) + "-"
    }

    /// All who wait and can be served together with `own`, but for another call of its attachment. What is left of others
    /// is removed.
    pub(crate) fn gather(&self, own: &AssignRequest) -> Vec<Waiting> {
        // Often nobody has ever waited.
        let Ok(entries) = self.folder.read_dir() else { return Vec::new() };
        if !is_plain(own) {
            return Vec::new();
        }
        let prefix = self.prefix();
        let mut waiting: Vec<Waiting> = Vec::new();
        for entry in entries.flatten() {
            let found = self.look_at(&entry, &prefix).unwrap_or_else(|error| {
                tracing::debug!(%error, path = %entry.path().display(), "passing over what waits there");
                None
            });
            let is_new = |found: &Waiting| {
                let others = waiting.iter().map(|other| &other.request.attachment);
                [&own.attachment].into_iter().chain(others).all(|other| *other != found.request.attachment)
            };
            waiting.extend(found.filter(|found| waiting.len() < MOST && is_new(found)));
        }
        waiting
    }

    /// Who waits there, if it is one of this queue who was not answered yet.
    fn look_at(&self, entry: &DirEntry, prefix: &str) -> io::Result<Option<Waiting>> {
        // Nothing is opened that could be something else than a file.
        let metadata = entry.metadata()?;
        if !metadata.is_file() || metadata.uid() != geteuid().as_raw() {
            return Ok(None);
        }
        let file = OpenOptions::new().read(true).append(true).open(entry.path())?;
        if !is_waited_for(&file) {
            fs::remove_file(entry.path())?;
            return Ok(None);
        }
        let Ok(name) = entry.file_name().into_string() else { return Ok(None) };
        if !name.starts_with(prefix) || metadata.len() > MAX_BYTES as u64 {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        (&file).take(MAX_BYTES as u64).read_to_end(&mut bytes)?;
        let Some((form, behind)) = unframe::<FormRequest>(&bytes) else { return Ok(None) };
        if form.queue != self.what_for || !behind.is_empty() {
            return Ok(None);
        }
        Ok(Some(Waiting { request: form.into_request(), file, name }))
    }
}

/// True if a process has the file locked. Those who look do not keep each other from seeing it.
fn is_waited_for(file: &File) -> bool {
    matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
}

impl Waiting {
    /// True while its process waits.
    pub(crate) fn still_waits(&self) -> bool {
        is_waited_for(&self.file)
    }

    /// Notes what came of it; without an answer that it has to go on alone, when it has the lock.
    pub(crate) fn answer(&self, answer: Option<&[Assigned]>) {
        let written = frame(FormAnswer::of(answer)).map(|bytes| (&self.file).write_all(&bytes));
        if let Some(Err(error)) = written {
            // It finds out by itself.
            tracing::debug!(%error, "somebody who waits is not told what came of it");
        }
    }
}

/// Calls all who wait: there are answers.
pub(crate) fn call(waiting: &[Waiting]) {
    if waiting.is_empty() {
        return;
    }
    let called = net::UnixDatagram::unbound().and_then(|bell| {
        bell.set_nonblocking(true)?;
        // Who has ended meanwhile keeps nobody else from being called.
        let call = |one: &Waiting| drop(address(&one.name).and_then(|address| bell.send_to_addr(&[], &address)));
        waiting.iter().for_each(call);
        Ok(())
    });
    if let Err(error) = called {
        tracing::debug!(%error, "those who wait are not called");
    }
}

/// Where who waits under this name is called: a place that is gone with its process, and that nobody else can guess.
fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("margay-{name}"))
}

impl Ticket {
    /// Waits until there is an answer, and one is called.
    pub(crate) async fn called(&self) {
        let Some(bell) = &self.bell else { return pending().await };
        // Who calls without an answer is somebody else.
        while bell.recv(&mut [0]).await.is_ok() {
            if matches!(self.answer(), Answer::Assigned(_)) {
                return;
            }
        }
        pending::<()>().await;
    }

    /// Ends the wait: what came of it.
    pub(crate) fn end(self) -> Answer {
        self.answer()
    }

    fn answer(&self) -> Answer {
        let mut bytes = [0; 1024];
        let count = self.file.read_at(&mut bytes, self.length).unwrap_or_default();
        match unframe::<FormAnswer>(&bytes[..count]) {
            Some((answer, _)) => answer.into_answer().map_or(Answer::Alone, Answer::Assigned),
            None => Answer::Nothing,
        }
    }
}

impl Drop for Ticket {
    /// The lock ends with the file.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
