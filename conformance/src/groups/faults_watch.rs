//! Tests watches whose connection is cut, falls silent, or loses its server.

use kv::{ErrorKind, Range, Revision, StoreExt};
use nix::sys::signal::Signal;

use crate::expect::{Checked, Failure, JudgedByRule, is_compacted, same};
use crate::proxy::LinkCondition;
use crate::subject::{BoundedHandle, Subject};
use crate::watcher::Watcher;

const RANGE: &str = "w/";
/// The size of each written value, in bytes. The values are large, so that a cut happens in the middle of a message.
const VALUE_BYTES: usize = 4 << 10;

/// Writes `count` revisions in the watched key range, and returns the last revision.
async fn writes(t: &BoundedHandle, count: usize) -> Checked<Revision> {
    let mut last = Revision::UNSET;
    for i in 0..count {
        last = t.put(format!("{RANGE}{i}"), vec![b'v'; VALUE_BYTES]).await?;
    }
    Ok(last)
}

async fn watch_from(handle: &BoundedHandle, start: Revision) -> Checked<Watcher> {
    Ok(handle.watcher(Range::prefix(RANGE), start).await?.through_faults())
}

/// Opens the watch again at `resume_from`, once the store answers.
async fn watch_again(handle: &BoundedHandle, range: Range, resume_from: Revision) -> Checked<Watcher> {
    handle.heals().await?;
    Ok(handle.watcher(range, resume_from).await?.through_faults())
}

/// Reads a watch up to revision `last`, and checks that it delivers every revision once, in order. When a watch ends
/// with `Disconnected`, a new watch continues at the revision where the ended watch stopped.
pub(crate) async fn all_of(handle: &BoundedHandle, watcher: &mut Watcher, last: Revision) -> Checked {
    while watcher.resume_from() <= last {
        let next = watcher.resume_from();
        match watcher.step().await? {
            Ok(batch) => same("the next revision, without a gap", batch.revision, next).of("W17")?,
            Err(ErrorKind::Disconnected { resume_from }) => {
                same("where to go on", resume_from, next).of("W17")?;
                *watcher = watch_again(handle, watcher.range(), next).await?;
            }
            Err(kind) => {
                return Err(Failure::new(
                    "a watch that was cut off",
                    "its events, or Disconnected",
                    format!("{kind:?}"),
                ))
                .of("W17");
            }
        }
    }
    Ok(())
}

pub(crate) async fn cut_mid_stream(t: Subject) -> Checked {
    const WRITES: usize = 20;
    let (proxy, cut_off) = t.through_proxy().await?;
    let mut watcher = watch_from(&cut_off, t.revision().await?.next()).await?;
    for round in 0..6 {
        match round % 3 {
            0 => proxy.cut_after(VALUE_BYTES * WRITES / 2 + 1000 * round),
            1 => proxy.cut(),
            // The network stays down for longer than one attempt to reconnect.
            _ => {
                proxy.set(LinkCondition::Refusing);
                proxy.cut();
            }
        }
        let last = writes(&t, WRITES).await?;
        proxy.set(LinkCondition::Up);
        all_of(&cut_off, &mut watcher, last).await.map_err(|failure| failure.with_note(&format!("round {round}")))?;
    }
    Ok(())
}

pub(crate) async fn compacted_while_cut_off(t: Subject) -> Checked {
    let (proxy, cut_off) = t.through_proxy().await?;
    let last = writes(&t, 5).await?;
    let mut watcher = watch_from(&cut_off, last).await?;
    all_of(&cut_off, &mut watcher, last).await?;
    proxy.set(LinkCondition::Refusing);
    proxy.cut();
    let mark = writes(&t, 5).await?;
    t.compact(mark).await?;
    proxy.set(LinkCondition::Up);
    let kind = match watcher.step().await? {
        Err(ErrorKind::Disconnected { .. }) => {
            match watch_again(&cut_off, watcher.range(), last.next()).await?.step().await? {
                Err(kind) => kind,
                Ok(batch) => {
                    return Err(Failure::new("a watch from below the mark", "Compacted", format!("{batch:?}")));
                }
            }
        }
        Err(kind) => kind,
        Ok(batch) => return Err(Failure::new("a watch that the mark overtook", "Compacted", format!("{batch:?}"))),
    };
    is_compacted("a watch that the mark overtook while it was cut off", &kind, mark)
}

/// Checks that a watch on a silent server ends in time with `Disconnected`, and that the error has the resume position.
async fn falls_silent(watcher: &mut Watcher) -> Checked {
    let next = watcher.resume_from();
    match watcher.step().await? {
        Err(kind) => same("the end of a watch of which the server is silent", kind, disconnected_at(next)),
        Ok(batch) => Err(Failure::new("a watch of which the server is silent", "its end", format!("{batch:?}"))),
    }
}

fn disconnected_at(resume_from: Revision) -> ErrorKind {
    ErrorKind::Disconnected { resume_from }
}

pub(crate) async fn frozen_server(t: Subject) -> Checked {
    let watching = t.connect(&t.addresses()?).await?;
    let last = writes(&t, 3).await?;
    let mut watcher = watch_from(&watching, last).await?;
    all_of(&watching, &mut watcher, last).await?;
    t.while_frozen(0, falls_silent(&mut watcher)).await?;
    let mut again = watch_again(&watching, watcher.range(), last.next()).await?;
    t.heals().await?;
    let last = writes(&t, 3).await?;
    all_of(&watching, &mut again, last).await
}

pub(crate) async fn silent_network(t: Subject) -> Checked {
    let (proxy, watching) = t.through_proxy().await?;
    let last = writes(&t, 3).await?;
    let mut watcher = watch_from(&watching, last).await?;
    all_of(&watching, &mut watcher, last).await?;
    proxy.set(LinkCondition::Silent);
    let last = writes(&t, 3).await?;
    falls_silent(&mut watcher).await?;
    proxy.heal();
    let mut again = watch_again(&watching, watcher.range(), watcher.resume_from()).await?;
    all_of(&watching, &mut again, last).await
}

pub(crate) async fn killed_server(mut t: Subject) -> Checked {
    let watching = t.connect(&t.addresses()?).await?;
    let mut watcher = watch_from(&watching, t.revision().await?.next()).await?;
    for _ in 0..3 {
        writes(&t, 3).await?;
        t.signal(0, Signal::SIGKILL)?;
        t.restart(0).await?;
        t.heals().await?;
        let last = writes(&t, 3).await?;
        all_of(&watching, &mut watcher, last).await?;
    }
    Ok(())
}
