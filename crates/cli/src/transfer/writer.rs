//! Writing a backup file, so that it is there as a whole or not at all.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ipam_operator::moving::DocumentCounts;
use kv::Revision;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::format::{Header, Line, MAX_LINE_BYTES, trailer};
use super::{Filter, Part, Row, Sink, Source, Stop, aside, at_one_revision, pump, too_fast};
use crate::digest::Sha256;
use crate::error::{Failure, Result};
use crate::output::Progress;
use crate::store::StoreAt;

/// The mode of a backup: only its owner may read it, as with the store.
const MODE: u32 = 0o600;
/// The number of bytes that are written before a sync. A container that starts meanwhile syncs its own commit, and its
/// sync waits for these bytes.
const SYNC_BYTES: usize = 4 << 20;

/// Whether an existing file may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overwrite {
    /// The file stays as it is, and the backup is refused.
    Never,
    /// The file is replaced, in one step, when the backup is complete.
    Allowed,
}

/// A backup that is being written. If it is dropped before its end, no file is left.
#[derive(Debug)]
pub(crate) struct Writer {
    to: To,
    sum: Sha256,
    keys: u64,
    bytes: u64,
    /// True if keys are written with their leases.
    leases: bool,
}

/// The destination.
#[derive(Debug)]
enum To {
    File(NewFile),
    Stdout(File),
}

/// A file that gets its name when it is complete.
///
/// It is called `FILE.partial` until then. A killed process leaves that file, and the next backup to the same file
/// overwrites it.
#[derive(Debug)]
struct NewFile {
    file: File,
    path: PathBuf,
    partial: Option<PathBuf>,
    overwrite: Overwrite,
    /// The number of bytes that were written since the last sync.
    unsynced: usize,
}

impl Writer {
    /// Creates the file.
    pub(crate) fn create(path: &Path, overwrite: Overwrite) -> Result<Self> {
        Ok(Self::to(To::File(NewFile::create(path, overwrite)?)))
    }

    /// Writes to stdout, where only the last line shows that the backup is complete.
    pub(crate) fn stdout() -> Result<Self> {
        // Not through `io::stdout()`, whose lock the program holds until its end.
        Ok(Self::to(To::Stdout(File::from(io::stdout().as_fd().try_clone_to_owned()?))))
    }

    fn to(to: To) -> Self {
        Self { to, sum: Sha256::default(), keys: 0, bytes: 0, leases: false }
    }

    /// True if the written lines can be removed again.
    fn can_begin_anew(&self) -> bool {
        matches!(self.to, To::File(_))
    }

    /// Writes the first line. Lines that were written to a file before are removed.
    fn begin(&mut self, header: &Header) -> Result<()> {
        if let To::File(new) = &mut self.to {
            new.file.set_len(0).and_then(|()| new.file.rewind()).map_err(|error| failed(&new.path, &error))?;
        }
        (self.sum, self.keys, self.bytes) = (Sha256::default(), 0, 0);
        self.leases = header.leases.is_some();
        let mut line = json(header)?;
        if line.len() >= MAX_LINE_BYTES {
            return Err(Failure::new("the store has more leases than a backup can hold")
                .hint("revoke those that are not used: etcdctl lease list, etcdctl lease revoke"));
        }
        line.push(b'\n');
        self.put(&line)
    }

    /// Writes the next keys and values, which must be in the order of keys.
    fn rows(&mut self, rows: &[Row]) -> Result<()> {
        let mut lines = Vec::new();
        for row in rows {
            let lease = row.lease.filter(|_| self.leases);
            lines.extend(json(&Line::new(row.key.as_bytes(), row.value.as_bytes(), lease))?);
            lines.push(b'\n');
            if lines.len() > 1 << 20 {
                self.put(&lines)?;
                lines.clear();
            }
        }
        self.keys += rows.len() as u64;
        self.put(&lines)
    }

    /// Writes the last line. A file is then made durable and gets its name. Returns the length in bytes.
    fn finish(mut self) -> Result<u64> {
        let end = trailer(self.keys, &self.sum);
        self.put(end.as_bytes())?;
        match self.to {
            To::File(mut new) => new.complete()?,
            To::Stdout(_) => {}
        }
        Ok(self.bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum.update(bytes);
        self.bytes += bytes.len() as u64;
        match &mut self.to {
            To::File(new) => new.put(bytes).map_err(|error| failed(&new.path, &error)),
            To::Stdout(file) => Ok(file.write_all(bytes)?),
        }
    }
}

/// A store that was written to a file.
pub(crate) struct Written {
    /// The revision.
    pub(crate) revision: Revision,
    /// The number of keys.
    pub(crate) keys: u64,
    /// IPAM's documents, if only those were written.
    pub(crate) tally: DocumentCounts,
    /// The length of the file in bytes.
    pub(crate) bytes: u64,
}

/// The file as a sink.
struct ToFile {
    /// `None` while another thread has it, and after a failure.
    writer: Option<Writer>,
    filter: Filter,
    keys: u64,
    tally: DocumentCounts,
    progress: Progress,
}

impl Written {
    /// Writes a store, as it is at one revision. Another thread writes the file: the store is open only while it is read.
    pub(crate) async fn of(at: StoreAt<'_>, filter: Filter, writer: Writer) -> Result<Self> {
        let can_begin_anew = writer.can_begin_anew();
        let progress = Progress::new("reading", None);
        let mut sink = ToFile { writer: Some(writer), filter, keys: 0, tally: DocumentCounts::default(), progress };
        let mut attempt = async || {
            let mut source = Source::store(at, filter, Revision::UNSET);
            pump(&mut source, &mut sink).await?;
            Ok(source.revision())
        };
        let revision = match can_begin_anew {
            true => at_one_revision(at, attempt).await?,
            false => attempt().await.map_err(|stop| match stop {
                Stop::Overtaken => too_fast(
                    at,
                    "once",
                    "try again when fewer containers are started and stopped; to a file it is read faster than to a pipe",
                ),
                Stop::Failed(failure) => failure,
            })?,
        };
        let ToFile { writer, keys, tally, .. } = sink;
        let bytes = aside(move || writer.map_or(Ok(0), Writer::finish)).await?;
        Ok(Self { revision, keys, tally, bytes })
    }
}

impl ToFile {
    /// Lets another thread write.
    async fn write(&mut self, work: impl FnOnce(&mut Writer) -> Result<()> + Send + 'static) -> Result<()> {
        let Some(mut writer) = self.writer.take() else { return Err(Failure::new("internal error: no file is open")) };
        self.writer = Some(aside(move || work(&mut writer).map(|()| writer)).await?);
        Ok(())
    }
}

impl Sink for ToFile {
    async fn begin(&mut self, header: Header) -> Result<()> {
        (self.keys, self.tally) = (0, DocumentCounts::default());
        self.write(move |writer| writer.begin(&header)).await
    }

    async fn take(&mut self, part: Part) -> Result<()> {
        self.keys += part.rows.len() as u64;
        self.progress.at(self.keys);
        if self.filter == Filter::Ipam {
            part.rows.iter().for_each(|row| self.tally.add(&row.key, row.value.as_bytes()));
        }
        self.write(move |writer| writer.rows(&part.rows)).await
    }
}

impl NewFile {
    fn create(path: &Path, overwrite: Overwrite) -> Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.is_file() => {
                return Err(Failure::new(format!("{} is no regular file", path.display()))
                    .hint("give the name of a file that does not exist yet"));
            }
            Ok(_) if overwrite == Overwrite::Never => return Err(there_already(path)),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(path, &error)),
            _ => {}
        }
        let Some(name) = path.file_name() else {
            return Err(Failure::new(format!("{} is no name for a file", path.display())).hint("give a file name"));
        };
        let mut name = name.to_owned();
        name.push(".partial");
        let partial = path.with_file_name(name);
        let open = OpenOptions::new().write(true).create(true).truncate(false).mode(MODE).open(&partial);
        let file = open.map_err(|error| failed(&partial, &error))?;
        let busy =
            || Failure::new(format!("another backup is writing {}", path.display())).hint("wait until it has ended");
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy()),
            Err(TryLockError::Error(error)) => return Err(failed(&partial, &error)),
        }
        if !is_at(&file, &partial) {
            return Err(busy());
        }
        if file.metadata().map_err(|error| failed(&partial, &error))?.permissions().mode() & 0o777 != MODE {
            // Some file systems have no modes.
            let _ = file.set_permissions(Permissions::from_mode(MODE));
        }
        Ok(Self { file, path: path.to_owned(), partial: Some(partial), overwrite, unsynced: 0 })
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.unsynced += bytes.len();
        if self.unsynced < SYNC_BYTES {
            return Ok(());
        }
        self.unsynced = 0;
        self.file.sync_data()
    }

    /// Makes the file durable and gives it its name.
    fn complete(&mut self) -> Result<()> {
        let failed = |error: io::Error| failed(&self.path, &error);
        self.file.sync_all().map_err(failed)?;
        if let Some(partial) = &self.partial {
            match self.overwrite {
                Overwrite::Allowed => fs::rename(partial, &self.path).map_err(failed)?,
                Overwrite::Never => rename_to_free(partial, &self.path).map_err(|error| match error.kind() {
                    io::ErrorKind::AlreadyExists => there_already(&self.path),
                    _ => failed(error),
                })?,
            }
        }
        self.partial = None;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            // It is no harm if it stays: its name says that it is no backup.
            let _ = fs::remove_file(partial);
        }
    }
}

fn json(what: &impl serde::Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(what).map_err(|error| Failure::new(format!("JSON: {error}")))
}

/// Renames a file unless the name is taken.
fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // NFS, for one, cannot do that; but a hard link does not replace an existing file either.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        result => Ok(result?),
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(one), Ok(two)) => (one.dev(), one.ino()) == (two.dev(), two.ino()),
        _ => false,
    }
}

fn there_already(path: &Path) -> Failure {
    Failure::new(format!("{} exists already", path.display()))
        .hint("give another name, or --force to write over it when the backup is complete")
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    let hint = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free some space, or write to another disk; nothing is left of this backup"
        }
        io::ErrorKind::NotFound => "make the folder first",
        _ => "give a file in a folder that you may write to",
    };
    Failure::new(format!("cannot write {}: {error}", path.display())).hint(hint)
}
