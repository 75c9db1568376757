//! Tests that a store syncs its files before it acknowledges a write, and how it behaves on a full disk.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use futures::future::join_all;
use kv::{ErrorKind, Outcome, StoreExt};

use crate::expect::{Checked, JudgedByRule, holds, same};
use crate::harness::BoxError;
use crate::process::{self, Process, RoleJob, broken, command_under, say, temporary_folder, with_folder};
use crate::steps::Steps;
use crate::subject::{BoundedHandle, Subject};

/// A put of one key, and the outcome of the put.
#[derive(Debug)]
struct PutAttempt {
    key: String,
    /// The outcome and the kind of the error of a failed put; `None` if the put was acknowledged.
    failed: Option<(Outcome, ErrorKind)>,
}

impl PutAttempt {
    async fn put(store: &BoundedHandle, key: String, bytes: usize) -> Self {
        let failed = store.put(key.as_str(), value(&key, bytes)).await.err();
        Self { key, failed: failed.map(|error| (error.outcome(), error.kind().clone())) }
    }

    /// Checks that the store contains the whole value if the put was acknowledged, and nothing if the put failed as not
    /// applied.
    async fn check(&self, store: &BoundedHandle) -> Checked {
        let found = store.get(self.key.as_str()).await?;
        let whole = found.as_ref().is_none_or(|kv| kv.value.as_bytes().starts_with(self.key.as_bytes()));
        holds("a value that was written, or none", whole, &found).of("S5")?;
        let Some((outcome, kind)) = &self.failed else {
            return holds(&format!("{}, which was acknowledged", self.key), found.is_some(), &"nothing").of("S3");
        };
        let lie = *outcome == Outcome::NotApplied && found.is_some();
        holds(&format!("nothing of {}, which failed with {kind:?} as not applied", self.key), !lie, &"it is there")
            .of("E2")
    }
}

/// A value of `bytes` bytes that consists of copies of the key.
fn value(key: &str, bytes: usize) -> Vec<u8> {
    key.bytes().cycle().take(bytes.max(key.len())).collect()
}

async fn check_all(store: &BoundedHandle, tried: &[PutAttempt]) -> Checked {
    for one in tried {
        one.check(store).await?;
    }
    Ok(())
}

const MAX_CONCURRENT_WRITES: usize = 8;
/// Number of writes after which the small disk must be full.
const MAX_WRITES: usize = 20_000;
/// The name of a file that fills a part of the small disk.
const FILLER_FILE: &str = "ballast";
const FILLER_BYTES: usize = 2 * 1024 * 1024;

/// Child role: writes until the disk is full, writes on for a while, frees space, and checks the store's answers.
pub(crate) async fn fill(job: RoleJob<'_>) -> Result<(), BoxError> {
    if let Some(folder) = job.folder() {
        fs::write(folder.join(FILLER_FILE), vec![1; FILLER_BYTES])?;
    }
    let fixture = job.join().await?;
    let store = job.handle(&*fixture);
    let mut tried = Vec::new();
    let mut failed = 0;
    while failed < 40 {
        // Small values may still fit on the disk when large values do not.
        let bytes = if failed % 2 == 1 { 10 } else { 30_000 };
        let keys = (0..MAX_CONCURRENT_WRITES).map(|i| format!("fill/{:06}", tried.len() + i));
        let some = join_all(keys.map(|key| PutAttempt::put(&store, key, bytes))).await;
        failed += some.iter().filter(|one| one.failed.is_some()).count();
        tried.extend(some);
        if tried.len() > MAX_WRITES {
            return Err("the disk did not fill".into());
        }
    }
    reads_are_right(&store, &tried).await?;
    drop((store, fixture));
    match job.join().await {
        Ok(fixture) => reads_are_right(&job.handle(&*fixture), &tried).await?,
        Err(error) => holds("no damage, only no room", !is_damage(error.kind()), &error).of("E6")?,
    }
    make_room(&job)?;
    let fixture = job.join().await?;
    let store = job.handle(&*fixture);
    check_all(&store, &tried).await?;
    store.put("fill/after", "v").await?;
    let refused = tried.iter().filter(|one| matches!(one.failed, Some((Outcome::NotApplied, _)))).count();
    Ok(say(format_args!("filled {} {failed} {refused}", tried.len() - failed))?)
}

fn is_damage(kind: &ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::Missing | ErrorKind::RevisionRegressed)
}

/// Checks that reads return the acknowledged state while the disk is full.
async fn reads_are_right(store: &BoundedHandle, tried: &[PutAttempt]) -> Result<(), BoxError> {
    for one in tried.iter().filter(|one| one.failed.is_none()).take(20) {
        if let Ok(found) = store.get(one.key.as_str()).await {
            holds(&format!("{}, which was acknowledged", one.key), found.is_some(), &found).of("S3")?;
        }
    }
    Ok(())
}

/// Gives the store space again: deletes the filler file on the small disk, or, without a small disk, lifts this
/// process's limit on the file size.
fn make_room(job: &RoleJob<'_>) -> Result<(), BoxError> {
    if let Some(folder) = job.folder() {
        return Ok(fs::remove_file(folder.join(FILLER_FILE))?);
    }
    let own = std::process::id().to_string();
    let lifted = Command::new("prlimit").args(["--pid", &own, "--fsize=unlimited:unlimited"]).status()?;
    if lifted.success() { Ok(()) } else { Err("the limit on the size of files stays".into()) }
}

async fn filled(process: Process, patience: Duration) -> Checked {
    let mut process = process.with_patience(patience);
    let said = process.say("filled").await?;
    process.end().await?;
    holds("some writes before the disk was full", !said.starts_with("0 "), &said)
}

/// When the disk is full, the store must lose no acknowledged write, and a write that it reported as "not applied" must
/// not have happened.
pub(crate) async fn full_disk(t: Subject) -> Checked {
    let folder = temporary_folder()?;
    let mut shell = Command::new("unshare");
    let mounted = "mount -t tmpfs -o size=8m,mode=700 conformance \"$1\" && exec \"$2\"";
    // The kernel unmounts the file system when the last process in the mount namespace ends.
    shell.args(["--mount", "--map-root-user", "sh", "-c", mounted, "sh"]).arg(folder.path());
    let command = process::command("fill", &[], &t.address_in(folder.path())?)?;
    filled(Process::start(with_folder(command_under(shell, &command), folder.path()), t.patience())?, t.patience() * 10)
        .await
}

/// Like [`full_disk`], but with a limit on the file size instead of a small file system.
pub(crate) async fn file_size_limit(t: Subject) -> Checked {
    let folder = temporary_folder()?;
    let mut shell = Command::new("sh");
    // The signal `XFSZ` is ignored, so a write beyond the file size limit fails with an error instead of killing the
    // process. The unit of the shell's file size limit is a block of 512 or 1024 bytes.
    shell.args(["-c", "trap '' XFSZ; ulimit -S -f 4000; exec \"$0\""]);
    let command = process::command("fill", &[], &t.address_in(folder.path())?)?;
    filled(Process::start(command_under(shell, &command), t.patience())?, t.patience() * 10).await
}

/// If a write fails because the store was closed, the outcome in its error must say whether the write happened.
pub(crate) async fn closed_under_writers(mut t: Subject) -> Checked {
    for round in 0..5 {
        let writers: Vec<_> = (0..16)
            .map(|writer| {
                let store = t.handle();
                tokio::spawn(async move {
                    let mut tried = Vec::new();
                    while tried.last().is_none_or(|one: &PutAttempt| one.failed.is_none()) {
                        let key = format!("closed/{round}/{writer}/{}", tried.len());
                        tried.push(PutAttempt::put(&store, key, 20).await);
                    }
                    tried
                })
            })
            .collect();
        // First wait until one of the writers has written some keys, and only then close the store, so that writes are
        // in flight during the close.
        while t.get(format!("closed/{round}/0/{}", round * 3)).await?.is_none() {
            tokio::task::yield_now().await;
        }
        t.close().await?;
        let tried: Vec<_> = join_all(writers).await.into_iter().collect::<Result<_, _>>()?;
        t.reopen().await?;
        check_all(&t, &tried.into_iter().flatten().collect::<Vec<_>>()).await?;
    }
    Ok(())
}

/// Opening and closing a store repeatedly must not change its contents or its size.
pub(crate) async fn many_short_lives(mut t: Subject) -> Checked {
    let steps = Steps { width: 2, base: t.revision().await? };
    let mut early = 0;
    for n in 0..100 {
        t.next_round();
        t.txn(Steps::txn(2, n)).await?;
        t.reopen().await?;
        if n % 10 == 9 {
            steps.check(&t, n + 1).await?;
        }
        if n == 29 {
            early = t.stored_bytes().await?;
        }
    }
    let late = t.stored_bytes().await?;
    holds(&format!("not much more than {early} bytes after 30 openings, with 70 more"), late <= early * 4, &late)
        .of("C7")
}

/// Number of traced writes for which the trace must show a sync before the acknowledgement.
const TRACED_WRITES: u64 = 40;

/// A trace of system calls must show that the store syncs a file between any two acknowledged writes.
pub(crate) async fn synced_before_acknowledged(t: Subject) -> Checked {
    let folder = temporary_folder()?;
    let trace = folder.path().join("trace");
    let kept = folder.path().join("kept");
    fs::create_dir(&kept).map_err(|error| broken("a folder", &error))?;
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-y", "-e", "trace=fsync,fdatasync,write", "-o"]).arg(&trace);
    let command = process::command("write", &[2, 0, TRACED_WRITES], &t.address_in(&kept)?)?;
    let process = Process::start(command_under(strace, &command), t.patience())?;
    same("how many writes were acknowledged", process.end().await?.len() as u64, TRACED_WRITES)?;
    let trace = fs::read_to_string(&trace).map_err(|error| broken("reading what strace wrote", &error))?;
    let kept = fs::canonicalize(&kept).map_err(|error| broken("the folder's real path", &error))?;
    let syncs = SyncTrace::count(&trace, &kept);
    same("how many acknowledgements were seen", syncs.before_each.len() as u64, TRACED_WRITES)?;
    let bare = syncs.before_each.iter().position(|count| *count == 0);
    holds("one sync or more before each acknowledgement", bare.is_none(), &syncs.before_each)
}

/// Counts of the sync calls (`fsync` and the like) in a trace of system calls.
#[derive(Debug, Default)]
struct SyncTrace {
    /// For each acknowledgement of a write, the number of syncs that began and ended since the previous
    /// acknowledgement.
    before_each: Vec<usize>,
}

impl SyncTrace {
    fn count(trace: &str, folder: &Path) -> Self {
        let place = format!("<{}/", folder.display());
        let mut syncs = Self::default();
        let mut since = 0;
        // The threads that are inside a sync call; only calls that began after the last acknowledged write are listed.
        let mut begun: Vec<&str> = Vec::new();
        for line in trace.lines() {
            let (thread, call) = line.split_once(' ').unwrap_or((line, ""));
            let call = call.trim_start();
            let is_sync = call.starts_with("fsync(") || call.starts_with("fdatasync(");
            if call.starts_with("write(1<") && call.contains("\"done ") {
                syncs.before_each.push(since);
                since = 0;
                begun.clear();
            } else if is_sync && call.contains(&place) {
                if call.ends_with("= 0") {
                    since += 1;
                } else {
                    begun.push(thread);
                }
            } else if call.contains("sync resumed>") && call.ends_with("= 0") && begun.contains(&thread) {
                begun.retain(|one| *one != thread);
                since += 1;
            }
        }
        syncs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syncs_count_only_when_whole_and_of_store() {
        let trace = "7 fdatasync(5</s/db>) = 0\n7 write(1<pipe:[1]>, \"done 0\\n\", 7) = 7\n\
                     8 fsync(6</elsewhere/db>) = 0\n8 fsync(6</s/db> <unfinished ...>\n\
                     7 write(1<pipe:[1]>, \"done 1\\n\", 7) = 7\n8 <... fsync resumed>) = 0\n\
                     8 fdatasync(6</s/db> <unfinished ...>\n8 <... fdatasync resumed>) = 0\n\
                     9 fdatasync(6</s/db>) = -1 EIO\n7 write(1<pipe:[1]>, \"done 2\\n\", 7) = 7\n";
        assert_eq!(SyncTrace::count(trace, Path::new("/s")).before_each, [1, 0, 1]);
    }
}
