//! Writes a backup file. The backup file gets its final name only when the backup is complete.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ipam_operator::moving::DocumentCounts;
use kv::Revision;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::format::{BackupHeader, BackupLine, MAX_LINE_BYTES, trailer};
use super::{
    KeyFilter, Row, RowBatch, Sink, Source, TransferStop, history_lost, retry_at_one_revision, run_blocking,
    transfer_rows,
};
use crate::digest::Sha256;
use crate::error::{CommandFailure, CommandResult};
use crate::output::KeyProgress;
use crate::store::StoreAccess;

/// The file mode of a backup file. Only the owner may read a backup file, because only the owner may read the store.
const MODE: u32 = 0o600;
/// Number of bytes that are written to a backup file between two calls of fsync. During a backup, a plugin's commit may
/// have to wait until up to `SYNC_BYTES` of the backup file are on the disk.
const SYNC_BYTES: usize = 4 << 20;

/// Whether a backup may replace an existing file of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overwrite {
    /// An existing file is kept, and the backup fails.
    Never,
    /// When the backup is complete, it replaces an existing file atomically.
    Allowed,
}

/// A backup file or stream that is being written. If the writer is dropped before the backup is complete, no backup
/// file remains.
#[derive(Debug)]
pub(crate) struct BackupWriter {
    to: BackupDestination,
    sum: Sha256,
    keys: u64,
    bytes: u64,
    /// True if the leases of keys are written to the backup.
    leases: bool,
}

#[derive(Debug)]
enum BackupDestination {
    File(NewFile),
    Stdout(File),
}

/// A backup file that gets its final name when its content is complete.
///
/// While the backup is incomplete, the file is called `FILE.partial`. If the process is killed, `FILE.partial` remains,
/// and the next backup with the same file name overwrites it.
#[derive(Debug)]
struct NewFile {
    file: File,
    path: PathBuf,
    partial: Option<PathBuf>,
    overwrite: Overwrite,
    /// Number of bytes that were written to the file since the last call of fsync.
    unsynced: usize,
}

impl BackupWriter {
    pub(crate) fn create(path: &Path, overwrite: Overwrite) -> CommandResult<Self> {
        Ok(Self::with_destination(BackupDestination::File(NewFile::create(path, overwrite)?)))
    }

    /// Creates a writer that writes a backup to stdout. A reader of stdout can tell only from the last line that the
    /// backup is complete.
    pub(crate) fn stdout() -> CommandResult<Self> {
        // The backup writer does not use `io::stdout()`, because the program keeps the lock of `io::stdout()` until its
        // end.
        Ok(Self::with_destination(BackupDestination::Stdout(File::from(io::stdout().as_fd().try_clone_to_owned()?))))
    }

    fn with_destination(to: BackupDestination) -> Self {
        Self { to, sum: Sha256::default(), keys: 0, bytes: 0, leases: false }
    }

    /// True if the backup goes to a file, which can be truncated to remove the lines of an earlier attempt.
    fn can_restart(&self) -> bool {
        matches!(self.to, BackupDestination::File(_))
    }

    /// Writes the first line of the backup. If the backup file already has lines from an earlier attempt, removes these
    /// lines first.
    fn begin(&mut self, header: &BackupHeader) -> CommandResult<()> {
        if let BackupDestination::File(new) = &mut self.to {
            new.file.set_len(0).and_then(|()| new.file.rewind()).map_err(|error| failed(&new.path, &error))?;
        }
        (self.sum, self.keys, self.bytes) = (Sha256::default(), 0, 0);
        self.leases = header.leases.is_some();
        let mut line = json(header)?;
        if line.len() >= MAX_LINE_BYTES {
            return Err(CommandFailure::new("the store has more leases than a backup can hold")
                .hint("find unused leases with etcdctl lease list, and revoke them with etcdctl lease revoke"));
        }
        line.push(b'\n');
        self.put(&line)
    }

    /// Writes the next rows of the backup, which must be in ascending order of their keys.
    fn rows(&mut self, rows: &[Row]) -> CommandResult<()> {
        let mut lines = Vec::new();
        for row in rows {
            let lease = row.lease.filter(|_| self.leases);
            lines.extend(json(&BackupLine::new(row.key.as_bytes(), row.value.as_bytes(), lease))?);
            lines.push(b'\n');
            if lines.len() > 1 << 20 {
                self.put(&lines)?;
                lines.clear();
            }
        }
        self.keys += rows.len() as u64;
        self.put(&lines)
    }

    /// Writes the last line of the backup. Makes a backup file durable and renames it to its final name. Returns the
    /// length of the backup in bytes.
    fn finish(mut self) -> CommandResult<u64> {
        let end = trailer(self.keys, &self.sum);
        self.put(end.as_bytes())?;
        match self.to {
            BackupDestination::File(mut new) => new.complete()?,
            BackupDestination::Stdout(_) => {}
        }
        Ok(self.bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> CommandResult<()> {
        self.sum.update(bytes);
        self.bytes += bytes.len() as u64;
        match &mut self.to {
            BackupDestination::File(new) => new.put(bytes).map_err(|error| failed(&new.path, &error)),
            BackupDestination::Stdout(file) => Ok(file.write_all(bytes)?),
        }
    }
}

pub(crate) struct WrittenBackup {
    pub(crate) revision: Revision,
    pub(crate) keys: u64,
    /// The number of documents by kind, if only IPAM documents were written.
    pub(crate) tally: DocumentCounts,
    /// The length of the backup in bytes.
    pub(crate) bytes: u64,
}

/// A sink that writes rows to a backup file or to stdout.
struct BackupSink {
    /// The writer of the backup; `None` while another thread writes, and after a failure.
    writer: Option<BackupWriter>,
    filter: KeyFilter,
    keys: u64,
    tally: DocumentCounts,
    progress: KeyProgress,
}

impl WrittenBackup {
    /// Writes a backup of the store at one revision. Another thread writes the backup file, so that the store is open
    /// only while it is read.
    pub(crate) async fn of(at: StoreAccess<'_>, filter: KeyFilter, writer: BackupWriter) -> CommandResult<Self> {
        let can_restart = writer.can_restart();
        let progress = KeyProgress::new("reading", None);
        let mut sink = BackupSink { writer: Some(writer), filter, keys: 0, tally: DocumentCounts::default(), progress };
        let mut attempt = async || {
            let mut source = Source::store(at, filter, Revision::UNSET);
            transfer_rows(&mut source, &mut sink).await?;
            Ok(source.revision())
        };
        let revision = match can_restart {
            true => retry_at_one_revision(at, attempt).await?,
            false => attempt().await.map_err(|stop| match stop {
                TransferStop::Overtaken => history_lost(
                    at,
                    "once",
                    "try again when fewer containers are started and stopped, or write to a file: a pipe is slower",
                ),
                TransferStop::Failed(failure) => failure,
            })?,
        };
        let BackupSink { writer, keys, tally, .. } = sink;
        let bytes = run_blocking(move || writer.map_or(Ok(0), BackupWriter::finish)).await?;
        Ok(Self { revision, keys, tally, bytes })
    }
}

impl BackupSink {
    /// Runs `work` on another thread, with the writer of the backup.
    async fn write(
        &mut self,
        work: impl FnOnce(&mut BackupWriter) -> CommandResult<()> + Send + 'static,
    ) -> CommandResult<()> {
        let Some(mut writer) = self.writer.take() else {
            return Err(CommandFailure::new("internal error: no file is open"));
        };
        self.writer = Some(run_blocking(move || work(&mut writer).map(|()| writer)).await?);
        Ok(())
    }
}

impl Sink for BackupSink {
    async fn begin(&mut self, header: BackupHeader) -> CommandResult<()> {
        (self.keys, self.tally) = (0, DocumentCounts::default());
        self.write(move |writer| writer.begin(&header)).await
    }

    async fn take(&mut self, part: RowBatch) -> CommandResult<()> {
        self.keys += part.rows.len() as u64;
        self.progress.at(self.keys);
        if self.filter == KeyFilter::Ipam {
            part.rows.iter().for_each(|row| self.tally.add(&row.key, row.value.as_bytes()));
        }
        self.write(move |writer| writer.rows(&part.rows)).await
    }
}

impl NewFile {
    fn create(path: &Path, overwrite: Overwrite) -> CommandResult<Self> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.is_file() => {
                return Err(CommandFailure::new(format!("{} is no regular file", path.display()))
                    .hint("name a file that does not exist yet"));
            }
            Ok(_) if overwrite == Overwrite::Never => return Err(exists_already_failure(path)),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(path, &error)),
            _ => {}
        }
        let Some(name) = path.file_name() else {
            return Err(CommandFailure::new(format!("{} is no name for a file", path.display()))
                .hint("use a path that ends with a file name"));
        };
        let mut name = name.to_owned();
        name.push(".partial");
        let partial = path.with_file_name(name);
        let open = OpenOptions::new().write(true).create(true).truncate(false).mode(MODE).open(&partial);
        let file = open.map_err(|error| failed(&partial, &error))?;
        let busy = || {
            CommandFailure::new(format!("another backup is writing {}", path.display()))
                .hint("wait until the other backup has ended")
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy()),
            Err(TryLockError::Error(error)) => return Err(failed(&partial, &error)),
        }
        if !is_at(&file, &partial) {
            return Err(busy());
        }
        if file.metadata().map_err(|error| failed(&partial, &error))?.permissions().mode() & 0o777 != MODE {
            // Failing to set the file mode is ignored, because some file systems have no file modes.
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

    /// Makes the backup file durable and renames it to its final name.
    fn complete(&mut self) -> CommandResult<()> {
        let failed = |error: io::Error| failed(&self.path, &error);
        self.file.sync_all().map_err(failed)?;
        if let Some(partial) = &self.partial {
            match self.overwrite {
                Overwrite::Allowed => fs::rename(partial, &self.path).map_err(failed)?,
                Overwrite::Never => rename_to_free(partial, &self.path).map_err(|error| match error.kind() {
                    io::ErrorKind::AlreadyExists => exists_already_failure(&self.path),
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
            // Failing to remove the partial file is ignored: its name `FILE.partial` shows that it is not a complete
            // backup.
            let _ = fs::remove_file(partial);
        }
    }
}

fn json(what: &impl serde::Serialize) -> CommandResult<Vec<u8>> {
    serde_json::to_vec(what).map_err(|error| CommandFailure::new(format!("JSON: {error}")))
}

/// Renames a file, but fails if a file with the new name already exists.
fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Some file systems, for example NFS, do not support `RENAME_NOREPLACE`. Creating a hard link fails if a file
        // with the new name exists, so it never overwrites a file.
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

fn exists_already_failure(path: &Path) -> CommandFailure {
    CommandFailure::new(format!("{} exists already", path.display()))
        .hint("use another file name, or use --force to replace the existing file once the backup is complete")
}

fn failed(path: &Path, error: &io::Error) -> CommandFailure {
    let hint = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free some disk space, or write to another disk; the unfinished backup was deleted"
        }
        io::ErrorKind::NotFound => "create the folder first",
        _ => "name a file in a folder that you can write to",
    };
    CommandFailure::new(format!("cannot write {}: {error}", path.display())).hint(hint)
}
