//! One connection on the private socket.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::{Answer, Asked, Verb};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval_at, timeout};
use wire::{Frame, Hello, Kind, MAX_REQUEST, Progress, keys};

use crate::asker::{Asker, until};
use crate::daemon::Daemon;
use crate::keys as stores_keys;
use crate::lane::{Job, replaced};
use crate::metrics::{Ending, Metrics};

/// A connection on which nothing comes for so long is closed. Clients know that.
const IDLE: Duration = Duration::from_secs(60);
/// A client has so long to take an answer in.
const SEND: Duration = Duration::from_secs(10);
/// The interval of the reports on the store's progress to a client that waits for the answer to a verb.
const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// Serves a connection until it ends.
///
/// # Errors
/// Those of the connection; `InvalidData` for bytes that no client of ours sends.
pub(crate) async fn serve(daemon: &Arc<Daemon>, stream: UnixStream) -> io::Result<()> {
    let (identity, generation) = daemon.held.identity().await;
    let (mut reader, mut writer) = stream.into_split();
    send(&mut writer, &Frame::new(Kind::Hello, &Hello::new(identity))?).await?;
    loop {
        let Ok(frame) = timeout(IDLE, Frame::read(&mut reader, MAX_REQUEST)).await else { return Ok(()) };
        let Some(frame) = frame? else { return Ok(()) };
        match frame.kind {
            Kind::Yield => daemon.announced.notify_one(),
            Kind::Verb => {
                let asked: Asked = frame.decode()?;
                send(&mut writer, &Frame::empty(Kind::Taken)).await?;
                let (begun, name) = (Instant::now(), asked.verb.name());
                let work = verb(daemon, generation, asked, &reader);
                let answer = report_until_done(daemon, &writer, work).await??;
                note(&daemon.metrics, name, &answer, begun.elapsed());
                send(&mut writer, &Frame::new(Kind::Answer, &answer)?).await?;
            }
            Kind::Keys => {
                let asked: keys::Asked = frame.decode()?;
                send(&mut writer, &Frame::empty(Kind::Taken)).await?;
                if let keys::Request::Watch(request) = asked.request {
                    return stores_keys::watch(&daemon.held, generation, request, &mut reader, &mut writer).await;
                }
                let answer = stores_keys::answer(daemon, generation, asked, &reader).await;
                send(&mut writer, &Frame::new(Kind::Answer, &answer)?).await?;
            }
            Kind::Hello | Kind::Taken | Kind::Alive | Kind::Answer => {
                return Err(wire::malformed(format!("a client's frame is {:?}", frame.kind)));
            }
        }
    }
}

/// Carries out some work, and tells the client every [`ALIVE_INTERVAL`] how the store gets on meanwhile.
///
/// # Errors
/// Those of the connection.
async fn report_until_done<T>(
    daemon: &Daemon,
    writer: &OwnedWriteHalf,
    work: impl Future<Output = T>,
) -> io::Result<T> {
    let received_at = Instant::now();
    // On a cluster there is no engine that can hang: each request has a deadline of its own.
    let has_engine = daemon.held.location().path().is_some();
    let mut work = pin!(work);
    let mut ticks = interval_at(tokio::time::Instant::now() + ALIVE_INTERVAL, ALIVE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            done = &mut work => return Ok(done),
            _ = ticks.tick() => {
                let stalled_for = if has_engine { daemon.metrics.pulse.stalled_for(received_at) } else { Duration::ZERO };
                let frame = Frame::new(Kind::Alive, &Progress { stalled_for })?.to_bytes();
                // The work must be polled while a client reads nothing, so this waits for no room. A frame that is this
                // short is sent whole or not at all.
                match writer.try_write(&frame) {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                    Ok(sent) if sent < frame.len() => return Err(io::ErrorKind::WriteZero.into()),
                    _ => {}
                }
            }
        }
    }
}

async fn verb(daemon: &Daemon, generation: u64, asked: Asked, connection: &OwnedReadHalf) -> io::Result<Answer> {
    let asker = Asker::new(connection.as_ref(), until(asked.within))?;
    match asked.verb {
        Verb::Check(_) | Verb::Status(_) => Ok(scan(daemon, generation, &asked.verb, &asker).await),
        Verb::Add(_) | Verb::Del(_) | Verb::Gc(_) | Verb::Quarantine(_) => {
            let (answer, answered) = oneshot::channel();
            let (verb, lock_file, begun) = (asked.verb, asked.lock_file, Instant::now());
            let job = Job { verb, asker, generation, lock_file, begun, answer };
            if daemon.lane.enter(job).is_err() {
                return Ok(Answer::ByYourself("too many callers wait for the daemon".to_owned()));
            }
            // The lane drops a job whose client is gone or out of time.
            answered.await.map_err(|_| io::ErrorKind::TimedOut.into())
        }
    }
}

/// Notes an answer, and how long it took.
fn note(metrics: &Metrics, verb: &'static str, answer: &Answer, took: Duration) {
    let ending = match answer {
        Answer::Refused(_) | Answer::ByYourself(_) | Answer::NamespaceWanted => Ending::Failed,
        _ => Ending::Done,
    };
    metrics.count_answer(verb, ending);
    match verb {
        "ADD" => metrics.observe_add(took),
        "DEL" => metrics.observe_del(took),
        _ => {}
    }
}

/// Carries out a verb that changes nothing, beside the lane.
async fn scan(daemon: &Daemon, generation: u64, verb: &Verb, asker: &Asker) -> Answer {
    let kept = match daemon.held.keep_open(asker.until).await {
        Ok(kept) if kept.generation == generation => kept,
        Ok(_) => return replaced(),
        Err(error) => return Answer::ByYourself(error.to_string()),
    };
    let open = match kept.open() {
        Ok(open) => open,
        Err(error) => return Answer::ByYourself(error.to_string()),
    };
    if matches!(verb, Verb::Status(_))
        && let Err(error) = open.check_room().await
    {
        return Answer::ByYourself(error.to_string());
    }
    let ipam = agent::ipam_on(open.store(), daemon.held.location(), open.cluster());
    verb.carry_out(&ipam, daemon.held.location(), asker.deadline()).await.into()
}

/// Sends a frame.
///
/// # Errors
/// `TimedOut` if the client does not take it in.
pub(crate) async fn send(writer: &mut OwnedWriteHalf, frame: &Frame) -> io::Result<()> {
    let sent = timeout(SEND, writer.write_all(&frame.to_bytes())).await;
    sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Waits until a client that has nothing to say says something, or closes.
pub(crate) async fn client_speaks(reader: &mut OwnedReadHalf) {
    let _ = reader.read(&mut [0]).await;
}
