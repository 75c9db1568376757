//! Writes the log to standard error and, if configured, to a file, but never to standard output.
//!
//! Many plugin processes write the log file concurrently, each for a few milliseconds. The log file's name, limits and
//! rotated names (`cni-2026-11-21T02-41-03.956.log`) are the same as in Calico's plugins, which may write to the same
//! file. Calico's plugins rotate their log with Go's library lumberjack. Margay implements its own log rotation,
//! because lumberjack and the Rust libraries for log rotation are made for one process: they cache the size of the open
//! file and rename it without taking a lock.
//!
//! A log line is appended with a single write, under a lock (`flock`) on the log file itself. After locking the log
//! file, a process checks whether the log's path still refers to the locked file. If the log's path refers to another
//! file, another process has rotated the log, and this process opens the new file. A process renames the log file only
//! while it holds the lock on the file at the log's path. The locks on the log file ensure that no log file is renamed
//! twice, and that no log line is written to a rotated file. The kernel releases a process's lock on the log file when
//! the process exits. If another process locks the log file for longer than a second, the log line is written without
//! the lock, and the log is not rotated.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::{Extensions, ExtensionsMut, LookupSpan, SpanData};

use crate::netconf::NetConf;

/// Sets up the log of this process according to the network configuration. If the log file cannot be opened, the plugin
/// call continues without a log file. If this function is called again in the same process, the later call has no
/// effect.
pub(crate) fn install(conf: &NetConf) {
    let (level, file) = (conf.log_level.as_str(), conf.log_file.as_str());
    let limits = RotationLimits::new(conf.log_max_size, conf.log_max_age, conf.log_max_count);
    let opened = (!file.is_empty()).then(|| LogFile::open(file, limits));
    let (file, problem) = match opened {
        None => (None, None),
        Some(Ok(file)) => (Some(file), None),
        Some(Err(error)) => (None, Some(error)),
    };
    let lines = fmt::layer().with_ansi(false).with_target(false).with_writer(LogWriters { file });
    let subscriber = NoSpans.with(lines).with(reported(filter(level)));
    // `set_global_default` fails if the process already has a global log subscriber, which then stays in use.
    if tracing::subscriber::set_global_default(subscriber).is_ok()
        && let Some(error) = problem
    {
        tracing::warn!("cannot open the log file that log_file_path names; logging to stderr only: {error}");
    }
}

/// A base for log layers that stores no tracing spans, because a plugin call creates no spans.
/// `tracing_subscriber::Registry` would allocate room for the spans of thousands of threads. The allocation takes 1 %
/// of the time of a cold ADD, so the plugin does not use `Registry`.
struct NoSpans;

impl Subscriber for NoSpans {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _attributes: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, _event: &Event<'_>) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

impl<'a> LookupSpan<'a> for NoSpans {
    type Data = NoSpan;

    fn span_data(&'a self, _id: &Id) -> Option<NoSpan> {
        None
    }
}

/// The type of the data that would be stored for a span. `NoSpan` is an empty enum, because [`NoSpans`] never creates a
/// span.
enum NoSpan {}

impl SpanData<'_> for NoSpan {
    fn id(&self) -> Id {
        match *self {}
    }

    fn metadata(&self) -> &'static Metadata<'static> {
        match *self {}
    }

    fn parent(&self) -> Option<&Id> {
        match *self {}
    }

    fn extensions(&self) -> Extensions<'_> {
        match *self {}
    }

    fn extensions_mut(&self) -> ExtensionsMut<'_> {
        match *self {}
    }
}

/// The destinations of log lines: standard error and, if configured, the log file.
struct LogWriters {
    file: Option<LogFile>,
}

impl<'a> MakeWriter<'a> for LogWriters {
    type Writer = LogLine<'a>;

    fn make_writer(&'a self) -> LogLine<'a> {
        LogLine { file: self.file.as_ref() }
    }
}

/// A writer of one log line to all destinations, which ignores every write error. An ADD may already have committed an
/// address, so a closed standard error or a full disk must not make the ADD fail.
struct LogLine<'a> {
    file: Option<&'a LogFile>,
}

impl Write for LogLine<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        if let Some(file) = self.file {
            let _ = file.write(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Parses a log level, in upper or lower case: debug, info, warning or error. A text that is not a log level means the
/// level info.
fn filter(level: &str) -> LevelFilter {
    match level.to_ascii_lowercase().as_str() {
        "debug" => LevelFilter::DEBUG,
        "warn" | "warning" => LevelFilter::WARN,
        "error" => LevelFilter::ERROR,
        _ => LevelFilter::INFO,
    }
}

/// Prefixes of the log targets of Margay's own crates.
const OWN_TARGETS: [&str; 9] =
    ["agent", "backend_", "cni_plugin", "datastore", "host", "ipam_core", "kv", "margay", "wiring"];

/// Returns the log filter for a configured level. Libraries log only warnings and errors, because the etcd and
/// Kubernetes clients log every network frame at the level `debug`.
fn reported(level: LevelFilter) -> Targets {
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_targets(OWN_TARGETS.map(|target| (target, level)))
}

/// Format of the UTC time in a rotated file's name. The alphabetical order of the formatted times is their
/// chronological order.
const STAMP_FORMAT: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]-[minute]-[second].[subsecond digits:3]");
/// A time in [`STAMP_FORMAT`] with every digit replaced by 0.
const STAMP_SHAPE: &str = "0000-00-00T00-00-00.000";

const MEGABYTE_BYTES: u64 = 1024 * 1024;
const DAY_SECONDS: i64 = 24 * 60 * 60;

/// How long a process waits for the lock on the log file. After one timeout, the process no longer waits for the lock
/// on the log file when it writes a log line.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two attempts to lock the log file; longer than a process needs to write one line and unlock the file.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum number of attempts to write one line while other processes rotate the log file.
const MAX_WRITE_ATTEMPTS: usize = 100;
/// Maximum number of milliseconds by which the time in a rotated file's name may be later than the clock's time. When
/// log files are rotated several times within one millisecond, the names of the later files get later times, which
/// keeps the names in order.
const MAX_STAMP_AHEAD_MILLIS: u64 = 1000;

/// The maximum size of the log file, and the maximum number and age of rotated files. A size, number or age of `None`
/// is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RotationLimits {
    /// Maximum size of a log file, in bytes. The log file exceeds its maximum size only if it holds a single line that
    /// is longer than this size.
    bytes: Option<u64>,
    /// Maximum age of a rotated file, in seconds.
    seconds: Option<i64>,
    /// Maximum number of rotated log files.
    count: Option<usize>,
}

impl RotationLimits {
    /// Converts the configured log limits (megabytes, days, number of files) to bytes, seconds and a count. A
    /// configured limit of 0 means the default limit, and a negative value means no limit.
    pub(crate) fn new(size: i64, age: i64, count: i64) -> Self {
        let given =
            |value: i64, default: i64| Some(if value == 0 { default } else { value }).filter(|value| *value > 0);
        Self {
            bytes: given(size, 100)
                .and_then(|size| u64::try_from(size).ok())
                .map(|size| size.saturating_mul(MEGABYTE_BYTES)),
            seconds: given(age, 30).map(|days| days.saturating_mul(DAY_SECONDS)),
            count: given(count, 10).and_then(|count| usize::try_from(count).ok()),
        }
    }
}

/// A log file that several processes append to.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    limits: RotationLimits,
    state: Mutex<LogFileState>,
}

#[derive(Debug)]
struct LogFileState {
    /// The open file that was at the log's path when the last line was written.
    file: Option<File>,
    patience: Duration,
}

impl LogFile {
    /// Opens the log file (mode 0600) for appending, and removes rotated files that are too old or too many. A missing
    /// log folder is created (mode 0755).
    ///
    /// # Errors
    /// Any I/O error of creating the log folder or opening the log file.
    pub(crate) fn open(path: impl Into<PathBuf>, limits: RotationLimits) -> io::Result<Self> {
        let path = path.into();
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
        }
        let state = Mutex::new(LogFileState { file: Some(append_to(&path)?), patience: LOCK_TIMEOUT });
        let log = Self { path, limits, state };
        log.remove_old(OffsetDateTime::now_utc());
        Ok(log)
    }

    /// Appends a line to the log file, and first rotates the log file if it is too full for the line.
    ///
    /// # Errors
    /// Any I/O error of writing the line.
    pub(crate) fn write(&self, line: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..MAX_WRITE_ATTEMPTS {
            let file = match state.file.take() {
                Some(file) => file,
                None => append_to(&self.path)?,
            };
            let is_locked = lock(&file, &mut state.patience);
            let metadata = file.metadata()?;
            if !has_name(&self.path, &metadata) {
                continue;
            }
            // The log path may be a device such as `/dev/stderr`, and a device must not be renamed.
            let is_full = is_locked && metadata.is_file() && self.is_full(metadata.len(), line);
            if is_full && self.rotate(OffsetDateTime::now_utc()).is_ok() {
                continue;
            }
            let written = (&file).write_all(line);
            if is_locked {
                // If unlocking fails, closing the file releases its lock.
                let _ = file.unlock();
            }
            state.file = Some(file);
            return written;
        }
        append_to(&self.path)?.write_all(line)
    }

    fn is_full(&self, length: u64, line: &[u8]) -> bool {
        let with_line = length.saturating_add(line.len() as u64);
        length > 0 && self.limits.bytes.is_some_and(|most| with_line > most)
    }

    /// Rotates the log file: renames it to a name with the current time. The caller must hold the lock on the log file.
    fn rotate(&self, now: OffsetDateTime) -> io::Result<()> {
        let rotated = self.rotated();
        let times = (0..MAX_STAMP_AHEAD_MILLIS).map(|later| stamp(now + Duration::from_millis(later)));
        // The newest rotated file gets the name that sorts last, even if several files are rotated within one
        // millisecond. An older rotated file sorts last only if the system clock was far ahead when that file was
        // rotated.
        let is_last = |stamp: &String| rotated.last().is_none_or(|newest| stamp > newest);
        let free = times.clone().find(is_last).or_else(|| times.clone().find(|stamp| !rotated.contains(stamp)));
        let free = free.ok_or(io::ErrorKind::AlreadyExists)?;
        fs::rename(&self.path, self.at(&free))?;
        self.remove_old(now);
        Ok(())
    }

    /// Lists the times in the names of the existing rotated files.
    fn rotated(&self) -> BTreeSet<String> {
        let (prefix, suffix) = self.around_stamp();
        let stamp = |name: String| Some(name.strip_prefix(&prefix)?.strip_suffix(&suffix)?.to_owned());
        names_beside(&self.path).filter_map(stamp).filter(|text| is_stamp(text)).collect()
    }

    /// Returns the path of the log file that was rotated at the time `stamp`.
    fn at(&self, stamp: &str) -> PathBuf {
        let (prefix, suffix) = self.around_stamp();
        self.path.with_file_name(format!("{prefix}{stamp}{suffix}"))
    }

    /// Returns the two parts of a rotated file's name that surround the time.
    fn around_stamp(&self) -> (String, String) {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let (stem, suffix) = name.split_at(name.rfind('.').unwrap_or(name.len()));
        (format!("{stem}-"), suffix.to_owned())
    }

    /// Removes rotated files that are too old or too many. Several processes may remove the same rotated files
    /// concurrently.
    fn remove_old(&self, now: OffsetDateTime) {
        let RotationLimits { seconds, count, .. } = self.limits;
        let oldest = seconds.and_then(|seconds| now.checked_sub(time::Duration::seconds(seconds))).map(stamp);
        for (place, stamp) in self.rotated().iter().rev().enumerate() {
            let is_surplus = count.is_some_and(|count| place >= count);
            let is_old = oldest.as_ref().is_some_and(|oldest| stamp < oldest);
            if is_surplus || is_old {
                // Another process may already have removed the same rotated file. If a rotated file cannot be removed,
                // the next rotation of the log tries again.
                let _ = fs::remove_file(self.at(stamp));
            }
        }
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Locks the log file, and returns false if another process keeps the log file locked for longer than `patience`, or if
/// the file system does not support file locks.
fn lock(file: &File, patience: &mut Duration) -> bool {
    let mut left = *patience;
    loop {
        match file.try_lock() {
            Ok(()) => return true,
            Err(TryLockError::WouldBlock) if !left.is_zero() => {
                sleep(LOCK_RETRY_INTERVAL);
                left = left.saturating_sub(LOCK_RETRY_INTERVAL);
            }
            Err(_) => {
                *patience = Duration::ZERO;
                return false;
            }
        }
    }
}

/// True if `path` still refers to the file that is open.
fn has_name(path: &Path, file: &fs::Metadata) -> bool {
    fs::metadata(path).is_ok_and(|named| (named.dev(), named.ino()) == (file.dev(), file.ino()))
}

fn names_beside(path: &Path) -> impl Iterator<Item = String> {
    let entries = path.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

fn stamp(at: OffsetDateTime) -> String {
    // An `OffsetDateTime` has every component that the format needs, so formatting cannot fail.
    at.format(STAMP_FORMAT).unwrap_or_default()
}

fn is_stamp(text: &str) -> bool {
    text.len() == STAMP_SHAPE.len()
        && text.bytes().zip(STAMP_SHAPE.bytes()).all(
            |(byte, shape)| {
                if shape == b'0' { byte.is_ascii_digit() } else { byte == shape }
            },
        )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::process::Command;
    use std::time::Instant;

    use conformance::patient;

    use super::*;

    #[test]
    fn log_of_libraries_has_only_warnings() {
        let reported = |level, target, of| reported(level).would_enable(target, &of);
        for target in [
            "agent::served",
            "backend_etcd::cluster",
            "cni_plugin::run",
            "margay::transact",
            "kv_mvcc::queue",
            "ipam_core",
        ] {
            assert!(reported(LevelFilter::DEBUG, target, tracing::Level::DEBUG), "{target}");
            assert!(!reported(LevelFilter::INFO, target, tracing::Level::DEBUG), "{target}");
        }
        for target in ["h2::codec", "rustls::client", "hyper_util::client", "tonic"] {
            assert!(!reported(LevelFilter::DEBUG, target, tracing::Level::DEBUG), "{target}");
            assert!(reported(LevelFilter::DEBUG, target, tracing::Level::WARN), "{target}");
            assert!(!reported(LevelFilter::ERROR, target, tracing::Level::WARN), "{target}");
        }
    }

    #[test]
    fn log_levels_are_read() {
        let cases = [
            ("DEBUG", LevelFilter::DEBUG),
            ("Info", LevelFilter::INFO),
            ("", LevelFilter::INFO),
            ("loud", LevelFilter::INFO),
            ("warning", LevelFilter::WARN),
            ("error", LevelFilter::ERROR),
        ];
        for (level, expected) in cases {
            assert_eq!(filter(level), expected, "{level}");
        }
    }

    /// Environment variables that make a child process of this test write log lines: the path of the log file, and the
    /// number of the child process.
    const FILE: &str = "MARGAY_TEST_LOG_FILE";
    const WRITER: &str = "MARGAY_TEST_LOG_WRITER";
    const PROCESSES: usize = 16;
    const LINES: usize = 100;

    fn limits(bytes: u64, count: Option<usize>) -> RotationLimits {
        RotationLimits { bytes: Some(bytes), seconds: None, count }
    }

    fn line(writer: usize, number: usize) -> String {
        format!("writer {writer:02} line {number:03} {}", "x".repeat(number % 60))
    }

    /// Returns the sorted names of all files in the log's folder, including the log file.
    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<_> = names_beside(path).collect();
        names.sort();
        names
    }

    #[test]
    fn log_loses_no_line_when_many_processes_write() {
        const MOST: u16 = 1500;
        if let (Some(path), Some(writer)) = (std::env::var_os(FILE), std::env::var_os(WRITER)) {
            let writer: usize = writer.to_str().unwrap().parse().unwrap();
            let open = || LogFile::open(&path, limits(MOST.into(), None)).unwrap();
            let mut log = open();
            for number in 0..LINES {
                // Half of the child processes open the log file for each line, as many short plugin calls would do.
                if writer.is_multiple_of(2) {
                    log = open();
                }
                log.write(format!("{}\n", line(writer, number)).as_bytes()).unwrap();
            }
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cni.log");
        let this = "logging::tests::log_loses_no_line_when_many_processes_write";
        let start = |writer: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", this]).env(FILE, &path).env(WRITER, writer.to_string());
            command.stdout(std::process::Stdio::null()).spawn().unwrap()
        };
        let writers: Vec<_> = (0..PROCESSES).map(start).collect();
        for mut writer in writers {
            assert!(writer.wait().unwrap().success());
        }
        let mut found: BTreeMap<String, usize> = BTreeMap::new();
        for name in names(&path) {
            let text = fs::read_to_string(folder.path().join(&name)).unwrap();
            assert!(!text.is_empty() && text.len() <= MOST.into(), "{name} has {} bytes", text.len());
            assert!(text.ends_with('\n'), "{name}");
            text.lines().for_each(|line| *found.entry(line.to_owned()).or_default() += 1);
        }
        let all = (0..PROCESSES).flat_map(|writer| (0..LINES).map(move |number| (line(writer, number), 1)));
        assert_eq!(found, all.collect());
        let bytes: usize = found.keys().map(|line| line.len() + 1).sum();
        // A log file is rotated only if it has no room for the next line, which limits the number of rotated files.
        let most_files = bytes / (usize::from(MOST) - line(0, 59).len()) + 1;
        assert!(names(&path).len() <= most_files, "{} files for {bytes} bytes", names(&path).len());
    }

    #[test]
    fn log_rotation_removes_only_old_or_surplus_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cni.log");
        let now = OffsetDateTime::now_utc();
        let rotated = |days: i64| format!("cni-{}.log", stamp(now - time::Duration::days(days)));
        let others = [
            "cni-2020-01-01.log",
            "cni-notes.log",
            "cni2020-01-01T00-00-00.000.log",
            "dni-2020-01-01T00-00-00.000.log",
        ];
        let old: Vec<_> = [1, 2, 29, 31, 400].map(rotated).into();
        for name in others.iter().copied().chain(old.iter().map(String::as_str)) {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        let left = |limits: RotationLimits| {
            drop(LogFile::open(&path, limits).unwrap());
            old.iter().filter(|name| folder.path().join(name).exists()).count()
        };
        assert_eq!(left(RotationLimits::new(0, -1, -1)), 5, "no limit");
        assert_eq!(left(RotationLimits::new(0, 0, 0)), 3, "thirty days");
        assert_eq!(left(RotationLimits::new(0, 0, 2)), 2, "the newest two");
        assert!(folder.path().join(&old[0]).exists() && folder.path().join(&old[1]).exists());
        assert!(others.iter().all(|name| folder.path().join(name).exists()));
        // Each rotation removes surplus files, and files that are rotated within one millisecond have different names.
        let log = LogFile::open(&path, limits(10, Some(3))).unwrap();
        for number in 0..20 {
            log.write(format!("line {number:02}\n").as_bytes()).unwrap();
        }
        let is_rotated = |name: &String| name.starts_with("cni-") && name.len() == rotated(0).len();
        let kept: Vec<_> = names(&path).into_iter().filter(is_rotated).collect();
        assert_eq!(kept.len(), 3, "{kept:?}");
        let texts: Vec<_> = kept.iter().map(|name| fs::read_to_string(folder.path().join(name)).unwrap()).collect();
        assert_eq!(texts, ["line 16\n", "line 17\n", "line 18\n"]);
        assert_eq!(fs::read_to_string(&path).unwrap(), "line 19\n");
        // A rotated file with a time far in the future in its name does not prevent further rotations.
        let ahead = format!("cni-{}.log", stamp(now + time::Duration::days(4000)));
        fs::write(folder.path().join(&ahead), "x").unwrap();
        log.write(b"line 20\n").unwrap();
        assert!(folder.path().join(&ahead).exists());
        assert_eq!(fs::read_to_string(&path).unwrap(), "line 20\n");
        // A line that is longer than the maximum file size is still written.
        log.write(b"a line that is too long\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "a line that is too long\n");
    }

    #[test]
    fn log_limits_are_calico_defaults_unless_configured() {
        let defaults =
            RotationLimits { bytes: Some(100 * MEGABYTE_BYTES), seconds: Some(30 * DAY_SECONDS), count: Some(10) };
        assert_eq!(RotationLimits::new(0, 0, 0), defaults);
        assert_eq!(
            RotationLimits::new(1, 2, 3),
            RotationLimits { bytes: Some(MEGABYTE_BYTES), seconds: Some(2 * DAY_SECONDS), count: Some(3) }
        );
        assert_eq!(RotationLimits::new(-1, -1, -1), RotationLimits { bytes: None, seconds: None, count: None });
        let path = tempfile::tempdir().unwrap().path().join("log");
        let endless = LogFile::open(path, RotationLimits::new(i64::MAX, i64::MAX, i64::MAX)).unwrap();
        endless.write(b"x\n").unwrap();
        endless.remove_old(OffsetDateTime::now_utc());
    }

    #[test]
    fn log_lock_held_by_another_costs_one_second_and_no_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cni.log");
        let log = LogFile::open(&path, limits(4, None)).unwrap();
        log.write(b"one\n").unwrap();
        let held = File::open(&path).unwrap();
        held.lock().unwrap();
        for text in ["two\n", "three\n"] {
            log.write(text.as_bytes()).unwrap();
        }
        let begun = Instant::now();
        log.write(b"four\n").unwrap();
        assert!(begun.elapsed() < patient(LOCK_TIMEOUT / 2), "it waits once");
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\nfour\n");
        drop(held);
        log.write(b"five\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "five\n");
        assert_eq!(names(&path).len(), 2);
    }

    #[test]
    fn log_file_is_made_anew_when_renamed_or_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let log = LogFile::open(&path, RotationLimits::new(0, 0, 0)).unwrap();
        log.write(b"one\n").unwrap();
        fs::rename(&path, folder.path().join("log.1")).unwrap();
        log.write(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        fs::remove_file(&path).unwrap();
        log.write(b"three\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        // Writing to a missing folder or a full device fails and renames no file.
        fs::remove_dir_all(folder.path()).unwrap();
        assert!(log.write(b"four\n").is_err());
        let full = LogFile::open("/dev/full", limits(1, Some(1))).unwrap();
        assert!(full.write(b"five\n").is_err());
        assert!(fs::metadata("/dev/full").is_ok());
    }
}
