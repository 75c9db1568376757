//! Tests stores with damaged files: the store must return correct data or fail with an error. A store with damaged
//! files must not panic or hang, and must not be replaced by a new store.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use fastrand::Rng;
use kv::{ErrorKind, Outcome, Revision};

use crate::expect::{Checked, Failure, JudgedByRule, holds, same, shown};
use crate::harness::BoxError;
use crate::process::{self, Process, RoleJob, broken, say, temporary_folder};
use crate::seed::{SEED, seed};
use crate::steps::Steps;
use crate::subject::Subject;

/// Number of steps that a store contains before its files are damaged.
const STEPS: u64 = 60;

const KEPT_STEPS: Steps = Steps { width: 5, base: Revision::new(1) };

/// Child role: reads the whole store, writes, reopens the store, and reads the whole store again.
pub(crate) async fn examine(job: RoleJob<'_>) -> Result<(), BoxError> {
    let verdict = match use_twice(&job).await {
        Ok(Ok(())) => "right".to_owned(),
        Ok(Err(wrong)) => return Err(wrong.into()),
        Err(error) => format!("refused {:?} {:?}: {error}", error.kind(), error.outcome()),
    };
    Ok(say(verdict.replace('\n', " "))?)
}

async fn use_twice(job: &RoleJob<'_>) -> kv::Result<Checked> {
    for steps in [STEPS, STEPS + 1] {
        let fixture = job.join().await?;
        let store = fixture.store();
        let all = kv::RangeRequest::new(kv::Range::prefix("step/"));
        let found = store.range(all).await?;
        if (found.revision, &found.kvs) != (KEPT_STEPS.revision(steps), &KEPT_STEPS.expected(steps)) {
            let expected = format!("the {STEPS} steps, or an error");
            let got = format!("revision {} and {} keys", found.revision, found.kvs.len());
            return Ok(Err(Failure::new("what is read from a damaged store", expected, got)).of("E6"));
        }
        if steps == STEPS {
            store.txn(Steps::txn(KEPT_STEPS.width, steps)).await?;
        }
    }
    Ok(Ok(()))
}

/// The result of reading a possibly damaged store in a child process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DamageFinding {
    Right,
    Refused(String),
}

/// Checks a damaged store in a child process, so that a hang, an abort or dead threads of the engine are detected.
async fn examined(t: &Subject, folder: &Path, what: &str) -> Checked<DamageFinding> {
    let mut command = process::command("examine", &[], &t.address_in(folder)?)?;
    // Some engines panic when they find damage; the panic messages on stderr are discarded.
    command.stderr(Stdio::null());
    let mut process = Process::start(command, t.patience() * 2)?;
    let said = process.line().await.map_err(|failure| failure.with_note(what))?;
    let verdict = said.unwrap_or_else(|| "nothing: it ended".to_owned());
    if verdict == "right" {
        return Ok(DamageFinding::Right);
    }
    let refused = verdict.strip_prefix("refused ").map(|error| DamageFinding::Refused(error.to_owned()));
    refused.ok_or_else(|| Failure::new(format!("a damaged store: {what}"), "its content, or an error", verdict))
}

/// Returns true if the error says that the store is damaged, or that the outcome of a write is unknown.
fn is_typed(error: &str) -> bool {
    let doubt = format!("{:?}", Outcome::Unknown);
    let kind = |kind: ErrorKind| error.starts_with(&format!("{kind:?}"));
    let in_doubt = |kind: ErrorKind| error.starts_with(&format!("{kind:?} {doubt}"));
    kind(ErrorKind::Corrupt)
        || kind(ErrorKind::RevisionRegressed)
        || kind(ErrorKind::Unsupported)
        || error.starts_with("UnknownFormat")
        || in_doubt(ErrorKind::CommitIo)
        || in_doubt(ErrorKind::Poisoned)
}

/// Makes an intact store under `folder` with child processes that end before this function returns.
async fn good_store(t: &Subject, folder: &Path) -> Checked {
    fs::create_dir(folder).map_err(|error| broken("a folder", &error))?;
    let address = t.address_in(folder)?;
    for n in 0..STEPS {
        t.join(&address, t.patience()).await?.txn(Steps::txn(KEPT_STEPS.width, n)).await?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if !from.is_dir() {
        return fs::copy(from, to).map(drop);
    }
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let name = entry?.file_name();
        copy(&from.join(&name), &to.join(&name))?;
    }
    Ok(())
}

/// Replaces the folder `bad` by a copy of the intact store.
fn renew(good: &Path, bad: &Path) -> Checked {
    let renewed = match fs::remove_dir_all(bad) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => copy(good, bad),
    };
    renewed.map_err(|error| broken("a copy of a store", &error))
}

/// Returns all non-empty files under a folder with their contents, in a fixed order.
fn files(folder: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else if path.metadata()?.len() > 0 {
            let bytes = fs::read(&path)?;
            found.push((path, bytes));
        }
    }
    found.sort();
    Ok(found)
}

fn files_of(folder: &Path) -> Checked<Vec<(PathBuf, Vec<u8>)>> {
    files(folder).map_err(|error| broken("the files of a store", &error))
}

/// If a store's largest file is missing, empty, a folder or garbage, opening or reading the store must fail with an
/// error. While the store's largest file is damaged, opening must neither recreate nor change the store. Once the
/// damaged file is restored from its copy, the store must be intact again.
pub(crate) async fn data_gone(t: Subject) -> Checked {
    let folder = temporary_folder()?;
    let (good, bad) = (folder.path().join("good"), folder.path().join("bad"));
    good_store(&t, &good).await?;
    for what in ["gone", "empty", "a folder", "garbage"] {
        renew(&good, &bad)?;
        // The test does not damage files that contain only zeros, because they only reserve disk space and contain no
        // data.
        let has_data = |(_, bytes): &(PathBuf, Vec<u8>)| bytes.iter().any(|byte| *byte != 0);
        let largest = files_of(&bad)?.into_iter().filter(has_data).max_by_key(|(_, bytes)| bytes.len());
        let (path, bytes) = largest.ok_or_else(|| Failure::new("the files of a store", "some", "none"))?;
        replace(&path, what).map_err(|error| broken("damaging a store", &error))?;
        let before = fs::read(&path).ok();
        let what = format!("{} is {what}", path.display());
        let found = examined(&t, &bad, &what).await?;
        let refused = matches!(&found, DamageFinding::Refused(error) if is_typed(error) || error.starts_with("Io"));
        holds(&format!("an error that says so: {what}"), refused, &found)?;
        same(&format!("the file that was damaged: {what}"), fs::read(&path).ok() == before, true)?;
        put_back(&path, &bytes).map_err(|error| broken("mending a store", &error))?;
        same(
            &format!("the store when the file is back: {what}"),
            examined(&t, &bad, &what).await?,
            DamageFinding::Right,
        )?;
    }
    Ok(())
}

fn replace(path: &Path, what: &str) -> io::Result<()> {
    match what {
        "empty" => fs::write(path, ""),
        "garbage" => fs::write(path, "this is the text of another program\n".repeat(1000)),
        _ => {
            fs::remove_file(path)?;
            if what == "a folder" { fs::create_dir(path) } else { Ok(()) }
        }
    }
}

fn put_back(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if path.is_dir() {
        fs::remove_dir_all(path)?;
    }
    fs::write(path, bytes)
}

/// Flips bits, truncates files, writes zeros and removes files, hundreds of times and at random places.
pub(crate) async fn any_damage(t: Subject) -> Checked {
    let folder = temporary_folder()?;
    let (good, bad) = (folder.path().join("good"), folder.path().join("bad"));
    good_store(&t, &good).await?;
    // A different random seed in the environment selects different damage.
    let seed = if std::env::var_os(SEED).is_some() { seed() } else { 0x5eed };
    let mut random = Rng::with_seed(seed);
    let (mut right, mut refused) = (0, 0);
    for round in 0..200 {
        t.next_round();
        renew(&good, &bad)?;
        let what = damage(&files_of(&bad)?, &mut random).map_err(|error| broken("damaging a store", &error))?;
        let what = format!("{SEED}={seed}, round {round}: {what}");
        match examined(&t, &bad, &what).await? {
            DamageFinding::Right => right += 1,
            DamageFinding::Refused(error) => {
                holds(&format!("an error that says so: {what}"), is_typed(&error), &shown(&error))?;
                refused += 1;
            }
        }
    }
    holds("some damage that was seen and some that did no harm", right > 10 && refused > 10, &(right, refused))
}

fn damage(files: &[(PathBuf, Vec<u8>)], random: &mut Rng) -> io::Result<String> {
    let (path, bytes) = &files[random.usize(..files.len())];
    let (mut bytes, length) = (bytes.clone(), bytes.len());
    let what = match random.u32(..6) {
        0 | 1 => {
            let count = random.u32(1..=8);
            for _ in 0..count {
                bytes[random.usize(..length)] ^= 1 << random.u32(..8);
            }
            format!("{count} bits flipped")
        }
        // The first bytes of a file usually identify its format, so damage there is tested separately.
        2 => {
            let at = random.usize(..length.min(512));
            bytes[at] ^= 1 << random.u32(..8);
            format!("a bit flipped at {at}")
        }
        3 => {
            bytes.truncate(random.usize(..length));
            format!("cut to {}", bytes.len())
        }
        4 => {
            let start = random.usize(..length);
            let end = length.min(start + random.usize(1..8192));
            bytes[start..end].fill(if random.bool() { 0 } else { 0xff });
            format!("{start} to {end} blanked")
        }
        _ => {
            fs::remove_file(path)?;
            return Ok(format!("{} removed", path.display()));
        }
    };
    fs::write(path, bytes)?;
    Ok(format!("{}: {what}", path.display()))
}

/// Opening a store that a later version wrote must fail and must not change the store.
pub(crate) async fn later_version(t: Subject) -> Checked {
    let folder = temporary_folder()?;
    let kept = folder.path().join("kept");
    good_store(&t, &kept).await?;
    // The test closes the store before it starts the child process, which examines the store and closes it cleanly.
    same("the store", examined(&t, &kept, "nothing is damaged").await?, DamageFinding::Right)?;
    t.make_newer(&kept)?;
    let before = files_of(&kept)?;
    match t.join(&t.address_in(&kept)?, t.patience()).await {
        Err(error) if matches!(error.kind(), ErrorKind::UnknownFormat { .. }) => {}
        Err(error) => return Err(Failure::new("opening a later version's store", "UnknownFormat", shown(&error))),
        Ok(_) => return Err(Failure::new("opening a later version's store", "UnknownFormat", "it opened")),
    }
    same("the files afterwards", files_of(&kept)? == before, true)
}
