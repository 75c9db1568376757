//! Tests a store whose process is killed hundreds of times, at random moments.

use std::collections::BTreeMap;
use std::time::Duration;

use kv::{Event, Op, Range, Revision, StoreExt, Txn, WatchRequest};

use crate::expect::{Checked, Failure, JudgedByRule, holds, same};
use crate::harness::BoxError;
use crate::process::{Process, RoleJob, moment, number, say, temporary_folder};
use crate::steps::Steps;
use crate::subject::{BoundedHandle, Subject};

/// Repeatedly kills a process that writes numbered steps, and checks the store after each kill.
async fn killed_writers(mut t: Subject, width: u64, rounds: u64) -> Checked {
    let steps = Steps { width, base: t.revision().await? };
    let mut kills = KillTimes::default();
    let mut done = 0;
    t.let_go().await?;
    for round in 0..rounds {
        t.next_round();
        let writer = t.process("write", &[width, done])?;
        let last = kills.at_any_moment(writer, round, "done").await?;
        t.retake().await?;
        done = steps.check_crashed(&t, last.map_or(done, |last| last + 1)).await.map_err(|f| in_round(f, round))?;
        t.let_go().await?;
    }
    holds("writes were acknowledged in most rounds", done >= rounds / 2, &done)
}

pub(super) fn in_round(failure: Failure, round: u64) -> Failure {
    failure.with_note(&format!("after kill {round}"))
}

/// Chooses the moments at which processes are killed.
#[derive(Debug, Default)]
struct KillTimes {
    /// The measured time from the start of a child process to its first line of output.
    start: Duration,
}

impl KillTimes {
    /// Kills a child process at a moment that depends on `round`: for odd rounds shortly before or after its first line
    /// of output, for even rounds after a few lines. Returns the last number that the child process printed after
    /// `word`.
    async fn at_any_moment(&mut self, mut process: Process, round: u64, word: &str) -> Checked<Option<u64>> {
        let mut last = None;
        if round.is_multiple_of(2) || self.start.is_zero() {
            last = Some(number(&process.say(word).await?)?);
            self.start = process.age();
            for _ in 0..round % 9 {
                last = Some(number(&process.say(word).await?)?);
            }
            moment(Duration::from_micros(round * 37 % 1500)).await;
        } else {
            moment(self.start * u32::try_from(round * 13 % 100).unwrap_or_default() / 80).await;
        }
        let rest = process.kill().await?;
        for line in rest {
            if let Some(said) = line.strip_prefix(word) {
                last = Some(number(said)?);
            }
        }
        Ok(last)
    }
}

/// Parses all numbers in a line that a child process printed.
fn numbers(said: &str) -> Checked<Vec<u64>> {
    said.split_whitespace().map(number).collect()
}

/// Child role: writes steps; its arguments are the number of keys per step and the number of the first step to write.
/// The third argument of the role is the number of steps; without it, the child process writes until it is killed.
pub(crate) async fn write(job: RoleJob<'_>) -> Result<(), BoxError> {
    let (width, first) = (job.argument(0)?, job.argument(1)?);
    let last = job.argument(2).map_or(u64::MAX, |count| first + count - 1);
    let fixture = job.join().await?;
    let store = fixture.store();
    for n in first..=last {
        store.txn(Steps::txn(width, n)).await?;
        say(format_args!("done {n}"))?;
    }
    Ok(())
}

pub(crate) async fn acknowledged_writes(t: Subject) -> Checked {
    killed_writers(t, 1, 200).await
}

pub(crate) async fn acknowledged_txns(t: Subject) -> Checked {
    killed_writers(t, 5, 100).await
}

/// Number of concurrent writers in one child process.
const WRITERS: usize = 8;

fn writers_keys(writer: usize) -> [String; 2] {
    [format!("many/{writer}/a"), format!("many/{writer}/b")]
}

/// Child role: runs writers that each increment two keys of their own as fast as possible.
pub(crate) async fn write_many(job: RoleJob<'_>) -> Result<(), BoxError> {
    let fixture = job.join().await?;
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = fixture.store();
        tasks.spawn(async move {
            let [key, _] = writers_keys(writer);
            let mut n = match store.get(key).await? {
                Some(kv) => std::str::from_utf8(kv.value.as_bytes())?.parse()?,
                None => 0_u64,
            };
            loop {
                n += 1;
                let puts = writers_keys(writer).map(|key| Op::put(key, n.to_string()));
                let revision = store.txn(Txn::new().with_success(puts)).await?.revision;
                say(format_args!("done {writer} {n} {revision}"))?;
            }
        });
    }
    match tasks.join_next().await {
        Some(ended) => ended?,
        None => Ok(()),
    }
}

/// After a crash under many writers, the store must contain their writes up to some revision, without a gap.
pub(crate) async fn prefix_of_many_writers(mut t: Subject) -> Checked {
    let rounds = 60;
    let mut counts = [0_u64; WRITERS];
    let mut start = t.revision().await?;
    t.let_go().await?;
    for round in 0..rounds {
        t.next_round();
        let mut process = t.process("write_many", &[])?;
        let mut said = Vec::new();
        for _ in 0..1 + round % 40 {
            said.push(process.say("done").await?);
        }
        moment(Duration::from_micros(round * 37 % 1500)).await;
        let rest = process.kill().await?;
        said.extend(rest.iter().filter_map(|line| line.strip_prefix("done")).map(str::to_owned));
        t.retake().await?;
        start = check_writers(&t, start, &mut counts, &said).await.map_err(|failure| in_round(failure, round))?;
        t.let_go().await?;
    }
    Ok(())
}

/// Checks that each revision after `start` contains one complete step of one writer, and that each acknowledged step is
/// at the revision that the store's answer named. Returns the current revision of the store.
async fn check_writers(t: &BoundedHandle, start: Revision, counts: &mut [u64], said: &[String]) -> Checked<Revision> {
    let now = t.revision().await?;
    let before = counts.to_vec();
    let (mut written, mut acknowledged) = (BTreeMap::new(), BTreeMap::new());
    let mut watcher = t.watcher(Range::prefix("many/"), start.next()).await?;
    let batches = if now > start { watcher.until(now).await? } else { Vec::new() };
    same("how many revisions there are", batches.len(), count_from(start, now)).of("S5")?;
    for batch in batches {
        let (writer, n) = whole_step(&batch.events).of("S5")?;
        let count =
            counts.get_mut(writer).ok_or_else(|| Failure::new("a writer", "one of ours", writer.to_string()))?;
        *count += 1;
        same("the step of a writer", n, *count).of("S5")?;
        written.insert((writer as u64, n), batch.revision.get().unsigned_abs());
    }
    for line in said {
        let said = numbers(line)?;
        let [writer, n, revision] = said[..] else {
            return Err(Failure::new("an acknowledgement", "three numbers", line));
        };
        same(&format!("the revision of step {n} of writer {writer}"), written.get(&(writer, n)), Some(&revision))
            .of("S3")?;
        acknowledged.insert(writer, n);
    }
    for (writer, (before, count)) in before.iter().zip(counts).enumerate() {
        let acknowledged = acknowledged.get(&(writer as u64)).unwrap_or(before);
        holds(
            &format!("no step of writer {writer} after {acknowledged} but the next"),
            *count <= acknowledged + 1,
            count,
        )
        .of("S5")?;
    }
    Ok(now)
}

fn count_from(start: Revision, now: Revision) -> usize {
    usize::try_from(now.get() - start.get()).unwrap_or_default()
}

/// If the events are the two puts of one transaction of a writer, returns the writer and the number of that
/// transaction.
fn whole_step(events: &[Event]) -> Checked<(usize, u64)> {
    let parts: Vec<(usize, u64)> = events
        .iter()
        .filter_map(|event| {
            let key = event.kv.key.to_string();
            let writer = key.split('/').nth(1)?.parse().ok()?;
            Some((writer, std::str::from_utf8(event.kv.value.as_bytes()).ok()?.parse().ok()?))
        })
        .collect();
    match parts[..] {
        [one, two] if one == two && events.len() == 2 => Ok(one),
        _ => Err(Failure::new("the events of one revision", "both puts of one transaction", format!("{events:?}"))),
    }
}

/// Child role: writes steps, and prints each revision that a reader or a watch in the same process has seen.
pub(crate) async fn observe(job: RoleJob<'_>) -> Result<(), BoxError> {
    let (width, first) = (job.argument(0)?, job.argument(1)?);
    let fixture = job.join().await?;
    let store = fixture.store();
    let from = store.list(Range::key("?")).await?.revision;
    let mut watch = store.watch(WatchRequest::new(Range::All, from.next())).await?;
    let (writer, reader) = (fixture.store(), fixture.store());
    let mut tasks = tokio::task::JoinSet::<Result<(), BoxError>>::new();
    tasks.spawn(async move {
        for n in first.. {
            writer.txn(Steps::txn(width, n)).await?;
        }
        Ok(())
    });
    tasks.spawn(async move {
        let mut seen = Revision::UNSET;
        loop {
            let now = reader.get("step/000/00").await?.map_or(seen, |kv| kv.mod_revision);
            let now = now.max(reader.list(Range::key("?")).await?.revision);
            if now > seen {
                seen = now;
                say(format_args!("read {now}"))?;
            }
        }
    });
    tasks.spawn(async move {
        while let Some(batch) = futures::StreamExt::next(&mut watch).await {
            say(format_args!("event {}", batch?.revision))?;
        }
        Err("the watch ended".into())
    });
    match tasks.join_next().await {
        Some(ended) => ended?,
        None => Ok(()),
    }
}

/// After the store's process was killed, the store must still have every value that a reader or a watch saw before.
pub(crate) async fn nothing_seen_is_lost(mut t: Subject) -> Checked {
    let rounds = 60;
    let steps = Steps { width: 2, base: t.revision().await? };
    let mut done = 0;
    t.let_go().await?;
    for round in 0..rounds {
        t.next_round();
        let mut process = t.process("observe", &[2, done])?;
        let mut seen = 0;
        for _ in 0..2 + round % 20 {
            seen = seen.max(seen_in(&process.line().await?.unwrap_or_default())?);
        }
        moment(Duration::from_micros(round * 37 % 1500)).await;
        for line in process.kill().await? {
            seen = seen.max(seen_in(&line)?);
        }
        t.retake().await?;
        let now = t.revision().await?;
        holds(
            &format!("revision {seen}, which was seen before kill {round}, or a later one"),
            now.get().unsigned_abs() >= seen,
            &now,
        )?;
        done = steps.at(now)?;
        steps.check(&t, done).await?;
        t.let_go().await?;
    }
    Ok(())
}

/// The revision in an output line like `read 7` or `event 7`.
fn seen_in(line: &str) -> Checked<u64> {
    number(line.split_once(' ').map_or(line, |(_, revision)| revision))
}

/// Child role: opens and closes the store until it is killed.
pub(crate) async fn open(job: RoleJob<'_>) -> Result<(), BoxError> {
    loop {
        say("opening")?;
        drop(job.join().await?);
        say("opened")?;
    }
}

/// After a crash, the next two processes that open the store are killed while they open it. Opening a store must not
/// change its contents, even if the process is killed meanwhile.
pub(crate) async fn killed_while_opening(mut t: Subject) -> Checked {
    let steps = Steps { width: 5, base: t.revision().await? };
    let mut done = 0;
    t.let_go().await?;
    let mut opener = t.process("open", &[])?;
    opener.say("opening").await?;
    let start = opener.age();
    opener.say("opened").await?;
    let opening = opener.age() - start;
    drop(opener);
    for round in 0..100 {
        t.next_round();
        let mut writer = t.process("write", &[5, done])?;
        for _ in 0..=round % 4 {
            done = number(&writer.say("done").await?)? + 1;
        }
        let rest = writer.kill().await?;
        done = rest.last().map_or(Ok(done), |last| number(last.trim_start_matches("done")).map(|last| last + 1))?;
        for kill in 0..2 {
            let mut opener = t.process("open", &[])?;
            opener.say("opening").await?;
            moment(opening * (round * 7 % 20 + kill) / 20).await;
            opener.kill().await?;
        }
        t.retake().await?;
        done = steps.check_crashed(&t, done).await.map_err(|failure| in_round(failure, u64::from(round)))?;
        t.let_go().await?;
    }
    Ok(())
}

/// When a process is killed while it creates a store, the next process must be able to open or create the store.
pub(crate) async fn killed_while_created(t: Subject) -> Checked {
    let folder = temporary_folder()?;
    let mut whole = t.process_at(&t.address_in(&folder.path().join("whole"))?, "open", &[])?;
    whole.say("opening").await?;
    let start = whole.age();
    whole.say("opened").await?;
    let making = whole.age() - start;
    drop(whole);
    for round in 0..100 {
        t.next_round();
        let address = t.address_in(&folder.path().join(format!("store{round}")))?;
        let mut process = t.process_at(&address, "open", &[])?;
        process.say("opening").await?;
        moment(making * round / 90).await;
        process.kill().await?;
        for n in 0..2 {
            let store =
                t.join(&address, t.patience()).await.map_err(|error| in_round(error.into(), u64::from(round)))?;
            let steps = Steps { width: 2, base: Revision::new(1) };
            steps.check(&store, n).await.map_err(|failure| in_round(failure, u64::from(round)))?;
            store.txn(Steps::txn(2, n)).await?;
        }
    }
    Ok(())
}
