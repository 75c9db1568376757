//! Tests several processes that open one store.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use kv::{Compare, ErrorKind, Op, Range, Revision, StoreExt, Txn};

use crate::expect::{Checked, Failure, JudgedByRule, holds, refused, same, some};
use crate::harness::{Ability, BoxError};
use crate::process::{self, Process, RoleJob, broken, number, say, temporary_folder};
use crate::steps::Steps;
use crate::subject::{Subject, text};

/// How long a process waits for the store lock in a test where it must not get the lock.
const SHORT_WAIT_TIMEOUT: Duration = Duration::from_millis(200);
/// Number of times that each child process opens the store between two lines of its output. The time limit for each
/// line must be long enough for ten openings of the store by every child process.
const REPORTED_TURNS: u64 = 10;

/// Child role: opens the store and prints the result. The role's argument is the maximum time to wait for the store, in
/// milliseconds.
pub(crate) async fn try_to_join(job: RoleJob<'_>) -> Result<(), BoxError> {
    let wait = Duration::from_millis(job.argument(0)?);
    let started = Instant::now();
    match job.join_within(wait).await {
        Ok(fixture) => {
            let found = fixture.store().get("k").await?;
            say(format_args!("joined {}", found.map_or_else(String::new, |kv| text(&kv.value))))?;
        }
        Err(error) if *error.kind() == ErrorKind::Locked => {
            say(format_args!("locked after {}", started.elapsed().as_millis()))?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// If a process holds the store, any other process must wait for the store for exactly the requested time.
pub(crate) async fn second_one_waits(mut t: Subject) -> Checked {
    t.put("k", "v").await?;
    let address = t.address()?;
    for wait in [Duration::ZERO, SHORT_WAIT_TIMEOUT] {
        let started = Instant::now();
        refused("joining in this process while it is in use", t.join(&address, wait).await, ErrorKind::Locked)?;
        holds("as long a wait as was asked", started.elapsed() >= wait, &started.elapsed())?;
        let wait = u64::try_from(wait.as_millis()).unwrap_or_default();
        let said = t.process("try", &[wait])?.say("locked after").await?;
        let waited: u64 = said.parse().map_err(|_| Failure::new("what another process says", "a number", &said))?;
        holds("as long a wait in another process", waited >= wait, &waited)?;
    }
    same("the store after all that", t.value("k").await?.as_deref(), Some("v"))?;
    // A waiting process gets the store as soon as the holder closes the store.
    let mut waiting = t.process("try", &[60_000])?;
    t.let_go().await?;
    same("what a waiting process finds", waiting.say("joined").await?, "v".to_owned())?;
    waiting.end().await?;
    t.retake().await
}

/// Child role: opens the store, increments a counter and closes the store, as often as the role's argument says.
pub(crate) async fn count(job: RoleJob<'_>) -> Result<(), BoxError> {
    for turn in 0..job.argument(0)? {
        if turn % REPORTED_TURNS == 0 {
            say(format_args!("turn {turn}"))?;
        }
        let fixture = job.join().await?;
        let store = fixture.store();
        loop {
            let (compare, number) = match store.get("counter").await? {
                Some(kv) => {
                    let number: u64 = text(&kv.value).parse()?;
                    (Compare::unchanged("counter", kv.mod_revision), number)
                }
                None => (Compare::absent("counter"), 0),
            };
            let put = Op::put("counter", (number + 1).to_string());
            if store.txn(Txn::new().with_compares([compare]).with_success([put])).await?.succeeded {
                break;
            }
        }
    }
    Ok(())
}

/// Several processes take turns: each repeatedly opens the store, increments a counter and closes the store. When
/// several processes increment the counter in turn, no increment may be lost, and no process may starve.
pub(crate) async fn take_turns_and_count(mut t: Subject) -> Checked {
    const PROCESSES: u64 = 8;
    const TURNS: u64 = 200;
    t.let_go().await?;
    let counting: Checked<Vec<Process>> = (0..PROCESSES).map(|_| t.process("count", &[TURNS])).collect();
    for mut process in counting? {
        while process.line().await?.is_some() {
            t.next_round();
        }
        process.end().await?;
    }
    t.retake().await?;
    let counter = some("the counter", t.get("counter").await?)?;
    same("the counter", text(&counter.value), (PROCESSES * TURNS).to_string()).of("S1")?;
    same("its version", counter.version.unsigned_abs(), PROCESSES * TURNS).of("S1")
}

/// A process that waits for a store gets it when the process that holds the store is killed. After the process that
/// held the store lock is killed, the store must contain no part of an unfinished transaction.
pub(crate) async fn dead_holder_frees_it(mut t: Subject) -> Checked {
    let steps = Steps { width: 5, base: t.revision().await? };
    let address = t.address()?;
    let mut done = 0;
    t.let_go().await?;
    for round in 0..50_u32 {
        t.next_round();
        let mut writer = t.process("write", &[5, done])?;
        for _ in 0..=round % 5 {
            done = number(&writer.say("done").await?)? + 1;
        }
        let waiting = t.join(&address, t.patience());
        let killed = async {
            process::moment(Duration::from_micros(u64::from(round) * 37 % 1500)).await;
            writer.kill().await
        };
        let (joined, rest) = futures::join!(waiting, killed);
        for line in rest? {
            done = number(line.trim_start_matches("done"))? + 1;
        }
        done = steps.check_crashed(&*joined?, done).await?;
    }
    t.retake().await
}

/// Child role: opens the store, writes a step and closes the store, until it is killed.
pub(crate) async fn take_turns(job: RoleJob<'_>) -> Result<(), BoxError> {
    for n in job.argument(1)?.. {
        let fixture = job.join().await?;
        fixture.store().txn(Steps::txn(job.argument(0)?, n)).await?;
        drop(fixture);
        say(format_args!("done {n}"))?;
    }
    Ok(())
}

/// A reader that alternates with a writer process must see every transaction that was committed before the reader
/// opened the store, and must see each one whole.
pub(crate) async fn reader_beside_a_writer(mut t: Subject) -> Checked {
    let steps = Steps { width: 5, base: t.revision().await? };
    let address = t.address()?;
    t.let_go().await?;
    let mut writer = t.process("turns", &[5, 0])?;
    for _ in 0..50 {
        t.next_round();
        let done = number(&writer.say("done").await?)? + 1;
        let reader = t.join(&address, t.patience()).await?;
        let seen = steps.at(reader.revision().await?)?;
        holds(&format!("{done} steps or more"), seen >= done, &seen)?;
        steps.check(&reader, seen).await.of("S1")?;
        same("the steps at the end of the turn", steps.at(reader.revision().await?)?, seen)?;
    }
    writer.kill().await?;
    t.retake().await
}

/// A watch in the process of the test must deliver every write of other processes, once and in order.
pub(crate) async fn watched_from_elsewhere(mut t: Subject) -> Checked {
    let from = t.put("k", "v").await?.next();
    let mut live = t.watcher(Range::All, from).await?;
    if t.can(Ability::Embedded) {
        drop(live);
        t.let_go().await?;
        write_some(t.process("write", &[2, 0])?).await?;
        t.retake().await?;
        live = t.watcher(Range::All, from).await?;
    } else {
        write_some(t.process("write", &[2, 0])?).await?;
    }
    let steps = Steps { width: 2, base: Revision::new(from.get() - 1) };
    let now = t.revision().await?;
    for batch in live.until(now).await? {
        same("the events of a step", batch.events.len(), 2)?;
        let n = steps.at(batch.revision)? - 1;
        let keys: Vec<_> = batch.events.iter().map(|event| (event.kv.key.clone(), event.kv.value.clone())).collect();
        same(&format!("the keys and values of step {n}"), keys, puts_of(n))?;
    }
    steps.at(now).and_then(|written| holds("30 steps or more", written >= 30, &written))
}

async fn write_some(mut writer: Process) -> Checked {
    for _ in 0..30 {
        writer.say("done").await?;
    }
    writer.kill().await.map(drop)
}

fn puts_of(n: u64) -> Vec<(kv::Key, kv::Value)> {
    let put = |op| match op {
        Op::Put { key, value, .. } => Some((key, value)),
        _ => None,
    };
    Steps::txn(2, n).success.into_iter().filter_map(put).collect()
}

/// Child role: opens the store and starts a child process that outlives its parent.
pub(crate) async fn spawn_role(job: RoleJob<'_>) -> Result<(), BoxError> {
    let fixture = job.join().await?;
    fixture.store().put("k", "v").await?;
    let mut command = process::command("linger", &[], job.address()).map_err(|failure| failure.to_string())?;
    let child = command.stdin(Stdio::inherit()).stdout(Stdio::null()).spawn()?;
    say(format_args!("begot {}", child.id()))?;
    std::future::pending().await
}

/// Child role: waits until its standard input is closed.
pub(crate) async fn linger(_: RoleJob<'_>) -> Result<(), BoxError> {
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// A child process that outlives the holder of the store must not keep the store locked.
pub(crate) async fn child_does_not_hold_it(mut t: Subject) -> Checked {
    t.let_go().await?;
    let mut parent = t.process("spawn_role", &[])?;
    let child = parent.say("begot").await?;
    // The grandchild, which outlives its killed parent, ends when the test drops `stdin`, the write end of its input
    // pipe.
    let stdin = parent.take_stdin();
    parent.kill().await?;
    t.retake().await?;
    same("what the holder wrote", t.value("k").await?.as_deref(), Some("v"))?;
    let alive = Path::new("/proc").join(&child).exists();
    drop(stdin);
    holds("a child that is still there", alive, &child)
}

/// Different paths to one store's files, for example through a symlink, must open the same store.
pub(crate) async fn two_paths(t: Subject) -> Checked {
    let folder = temporary_folder()?;
    let (real, link) = (folder.path().join("real"), folder.path().join("link"));
    std::fs::create_dir(&real).map_err(|error| broken("a folder", &error))?;
    std::os::unix::fs::symlink(&real, &link).map_err(|error| broken("a link", &error))?;
    let (address, linked) = (t.address_in(&real)?, t.address_in(&link)?);
    let relative = t.address_in(Path::new("."))?;
    let beside = |wait: u64| -> Checked<Process> {
        let mut command = process::command("try", &[wait], &relative)?;
        command.current_dir(&real);
        Process::start(command, t.patience())
    };
    let store = t.join(&address, t.patience()).await?;
    store.put("k", "v").await?;
    refused("joining by a link while it is in use", t.join(&linked, SHORT_WAIT_TIMEOUT).await, ErrorKind::Locked)?;
    beside(0)?.say("locked").await?;
    drop(store);
    same("what is found by a relative path", beside(10_000)?.say("joined").await?, "v".to_owned()).of("S2")?;
    let store = t.join(&linked, t.patience()).await?;
    same("what is found by a link", store.value("k").await?.as_deref(), Some("v")).of("S2")?;
    refused(
        "joining by the path while the link is in use",
        t.join(&address, SHORT_WAIT_TIMEOUT).await,
        ErrorKind::Locked,
    )
}
