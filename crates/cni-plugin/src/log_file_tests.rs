//! The log file: many processes, limits, and what others do to the file.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Instant;

use super::*;
use conformance::patient;

/// Tells a process of this test program to write lines: which file, and which process it is.
const FILE: &str = "MARGAY_TEST_LOG_FILE";
const WRITER: &str = "MARGAY_TEST_LOG_WRITER";
const PROCESSES: usize = 16;
const LINES: usize = 100;

fn limits(bytes: u64, count: Option<usize>) -> Limits {
    Limits { bytes: Some(bytes), seconds: None, count }
}

fn line(writer: usize, number: usize) -> String {
    format!("writer {writer:02} line {number:03} {}", "x".repeat(number % 60))
}

/// The names of all files beside the log, and of itself, in order.
fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> = names_beside(path).collect();
    names.sort();
    names
}

#[test]
fn many_processes_lose_no_line_and_rename_no_file_twice() {
    const MOST: u16 = 1500;
    if let (Some(path), Some(writer)) = (std::env::var_os(FILE), std::env::var_os(WRITER)) {
        let writer: usize = writer.to_str().unwrap().parse().unwrap();
        let open = || LogFile::open(&path, limits(MOST.into(), None)).unwrap();
        let mut log = open();
        for number in 0..LINES {
            // Every other process opens the file for each line, as many short calls of the plugin do.
            if writer.is_multiple_of(2) {
                log = open();
            }
            log.write(format!("{}\n", line(writer, number)).as_bytes()).unwrap();
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cni.log");
    let this = "log_file::tests::many_processes_lose_no_line_and_rename_no_file_twice";
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
    // A file is rotated only when the next line has no room.
    let most_files = bytes / (usize::from(MOST) - line(0, 59).len()) + 1;
    assert!(names(&path).len() <= most_files, "{} files for {bytes} bytes", names(&path).len());
}

#[test]
fn only_rotated_files_that_are_old_or_surplus_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cni.log");
    let now = OffsetDateTime::now_utc();
    let rotated = |days: i64| format!("cni-{}.log", stamp(now - time::Duration::days(days)));
    let others =
        ["cni-2020-01-01.log", "cni-notes.log", "cni2020-01-01T00-00-00.000.log", "dni-2020-01-01T00-00-00.000.log"];
    let old: Vec<_> = [1, 2, 29, 31, 400].map(rotated).into();
    for name in others.iter().copied().chain(old.iter().map(String::as_str)) {
        fs::write(folder.path().join(name), "x").unwrap();
    }
    let left = |limits: Limits| {
        drop(LogFile::open(&path, limits).unwrap());
        old.iter().filter(|name| folder.path().join(name).exists()).count()
    };
    assert_eq!(left(Limits::new(0, -1, -1)), 5, "no limit");
    assert_eq!(left(Limits::new(0, 0, 0)), 3, "thirty days");
    assert_eq!(left(Limits::new(0, 0, 2)), 2, "the newest two");
    assert!(folder.path().join(&old[0]).exists() && folder.path().join(&old[1]).exists());
    assert!(others.iter().all(|name| folder.path().join(name).exists()));
    // A rotation removes as well, and files of one millisecond have names of their own.
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
    // A name from the time of a clock that was ahead keeps nobody from rotating.
    let ahead = format!("cni-{}.log", stamp(now + time::Duration::days(4000)));
    fs::write(folder.path().join(&ahead), "x").unwrap();
    log.write(b"line 20\n").unwrap();
    assert!(folder.path().join(&ahead).exists());
    assert_eq!(fs::read_to_string(&path).unwrap(), "line 20\n");
    // A line that is too long for any file is kept as well.
    log.write(b"a line that is too long\n").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "a line that is too long\n");
}

#[test]
fn limits_are_calicos_unless_the_configuration_has_others() {
    let defaults = Limits { bytes: Some(100 * MEGABYTE), seconds: Some(30 * DAY), count: Some(10) };
    assert_eq!(Limits::new(0, 0, 0), defaults);
    assert_eq!(Limits::new(1, 2, 3), Limits { bytes: Some(MEGABYTE), seconds: Some(2 * DAY), count: Some(3) });
    assert_eq!(Limits::new(-1, -1, -1), Limits { bytes: None, seconds: None, count: None });
    let path = tempfile::tempdir().unwrap().path().join("log");
    let endless = LogFile::open(path, Limits::new(i64::MAX, i64::MAX, i64::MAX)).unwrap();
    endless.write(b"x\n").unwrap();
    endless.remove_old(OffsetDateTime::now_utc());
}

#[test]
fn a_lock_that_somebody_keeps_costs_a_second_and_no_line() {
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
    assert!(begun.elapsed() < patient(PATIENCE / 2), "it waits once");
    assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\nfour\n");
    drop(held);
    log.write(b"five\n").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "five\n");
    assert_eq!(names(&path).len(), 2);
}

#[test]
fn a_file_that_somebody_else_has_renamed_or_removed_is_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let log = LogFile::open(&path, Limits::new(0, 0, 0)).unwrap();
    log.write(b"one\n").unwrap();
    fs::rename(&path, folder.path().join("log.1")).unwrap();
    log.write(b"two\n").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
    fs::remove_file(&path).unwrap();
    log.write(b"three\n").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
    // Nothing can be written there, and nothing is renamed.
    fs::remove_dir_all(folder.path()).unwrap();
    assert!(log.write(b"four\n").is_err());
    let full = LogFile::open("/dev/full", limits(1, Some(1))).unwrap();
    assert!(full.write(b"five\n").is_err());
    assert!(fs::metadata("/dev/full").is_ok());
}
