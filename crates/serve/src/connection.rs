//! Serves one connection on the private socket: carries out CNI verbs for plugins, and answers requests to the store.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::{Answer, Verb, VerbRequest};
use datastore::shared_store::SharedStore;
use futures::StreamExt;
use kv::{Error, ErrorKind, Operation, Purpose, Store, WatchRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval_at, timeout};
use wire::{Frame, FrameKind, Hello, MAX_REQUEST_BODY_BYTES, StallReport, keys};

use crate::daemon::Daemon;
use crate::metrics::{Metrics, RequestResult};
use crate::write_queue::{CancellableStore, Client, QueuedVerb, replaced_answer, request_deadline};

/// Idle time after which the daemon closes a connection. Clients expect the daemon to close idle connections, and
/// reconnect.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for sending a frame to a client.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of the Alive frames to a client that waits for the answer to a verb.
const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// Serves a client's connection until the connection ends.
///
/// # Errors
/// Any I/O error of the client's connection; `InvalidData` if the client sends bytes that Margay's clients never send.
pub(crate) async fn serve(daemon: &Arc<Daemon>, stream: UnixStream) -> io::Result<()> {
    let (identity, generation) = daemon.shared_store.identity().await;
    let (mut reader, mut writer) = stream.into_split();
    send(&mut writer, &Frame::new(FrameKind::Hello, &Hello::new(identity))?).await?;
    loop {
        let Ok(frame) = timeout(IDLE_TIMEOUT, Frame::read(&mut reader, MAX_REQUEST_BODY_BYTES)).await else {
            return Ok(());
        };
        let Some(frame) = frame? else { return Ok(()) };
        match frame.kind {
            FrameKind::Yield => daemon.yield_requested.notify_one(),
            FrameKind::Verb => {
                let asked: VerbRequest = frame.decode()?;
                send(&mut writer, &Frame::empty(FrameKind::Taken)).await?;
                let (received_at, name) = (Instant::now(), asked.verb.name());
                let work = answer_verb(daemon, generation, asked, &reader);
                let answer = report_until_done(daemon, &writer, work).await??;
                record_answer(&daemon.metrics, name, &answer, received_at.elapsed());
                send(&mut writer, &Frame::new(FrameKind::Answer, &answer)?).await?;
            }
            FrameKind::Keys => {
                let asked: keys::TimedRequest = frame.decode()?;
                send(&mut writer, &Frame::empty(FrameKind::Taken)).await?;
                if let keys::Request::Watch(request) = asked.request {
                    return serve_watch(&daemon.shared_store, generation, request, &mut reader, &mut writer).await;
                }
                let answer = answer_store_request(daemon, generation, asked, &reader).await;
                send(&mut writer, &Frame::new(FrameKind::Answer, &answer)?).await?;
            }
            FrameKind::Hello | FrameKind::Taken | FrameKind::Alive | FrameKind::Answer => {
                return Err(wire::malformed(format!("a client's frame is {:?}", frame.kind)));
            }
        }
    }
}

/// Runs `work`, and sends the client an Alive frame every [`ALIVE_INTERVAL`] until `work` is complete.
///
/// # Errors
/// Any I/O error of the connection.
async fn report_until_done<T>(
    daemon: &Daemon,
    writer: &OwnedWriteHalf,
    work: impl Future<Output = T>,
) -> io::Result<T> {
    let received_at = Instant::now();
    // A cluster store has no engine that can hang, because each request to the cluster has its own deadline.
    let has_engine = daemon.shared_store.location().path().is_some();
    let mut work = pin!(work);
    let mut ticks = interval_at(tokio::time::Instant::now() + ALIVE_INTERVAL, ALIVE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            done = &mut work => return Ok(done),
            _ = ticks.tick() => {
                let stalled_for = if has_engine { daemon.metrics.pulse.stalled_for(received_at) } else { Duration::ZERO };
                let frame = Frame::new(FrameKind::Alive, &StallReport { stalled_for })?.to_bytes();
                // `work` must be polled even while the client reads nothing, so the write of an Alive frame does not
                // wait for buffer space. An Alive frame is so short that the kernel accepts all of it or none of it.
                match writer.try_write(&frame) {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                    Ok(sent) if sent < frame.len() => return Err(io::ErrorKind::WriteZero.into()),
                    _ => {}
                }
            }
        }
    }
}

async fn answer_verb(
    daemon: &Daemon,
    generation: u64,
    asked: VerbRequest,
    connection: &OwnedReadHalf,
) -> io::Result<Answer> {
    let client = Client::new(connection.as_ref(), request_deadline(asked.within))?;
    match asked.verb {
        Verb::Check(_) | Verb::Status(_) => Ok(answer_read_verb(daemon, generation, &asked.verb, &client).await),
        Verb::Add(_) | Verb::Del(_) | Verb::Gc(_) | Verb::Quarantine(_) => {
            let (answer, answered) = oneshot::channel();
            let (verb, lock_file, received_at) = (asked.verb, asked.lock_file, Instant::now());
            let job = QueuedVerb { verb, client, generation, lock_file, received_at, answer };
            if daemon.write_queue.submit(job).is_err() {
                return Ok(Answer::Declined("too many callers wait for the daemon".to_owned()));
            }
            // The write queue drops a verb whose client has disconnected or run out of time.
            answered.await.map_err(|_| io::ErrorKind::TimedOut.into())
        }
    }
}

/// Records in the metrics whether a verb was carried out, and how long its answer took.
fn record_answer(metrics: &Metrics, verb: &'static str, answer: &Answer, took: Duration) {
    let ending = match answer {
        Answer::Refused(_) | Answer::Declined(_) | Answer::NamespaceWanted => RequestResult::Failed,
        _ => RequestResult::Done,
    };
    metrics.count_answer(verb, ending);
    match verb {
        "ADD" => metrics.observe_add(took),
        "DEL" => metrics.observe_del(took),
        _ => {}
    }
}

/// Carries out a verb that only reads the store, outside the write queue.
async fn answer_read_verb(daemon: &Daemon, generation: u64, verb: &Verb, client: &Client) -> Answer {
    let kept = match daemon.shared_store.keep_open(client.until).await {
        Ok(kept) if kept.generation == generation => kept,
        Ok(_) => return replaced_answer(),
        Err(error) => return Answer::Declined(error.to_string()),
    };
    let open = match kept.open() {
        Ok(open) => open,
        Err(error) => return Answer::Declined(error.to_string()),
    };
    if matches!(verb, Verb::Status(_))
        && let Err(error) = open.check_room().await
    {
        return Answer::Declined(error.to_string());
    }
    let ipam = agent::ipam_for_store(open.store(), daemon.shared_store.location(), open.cluster());
    verb.carry_out(&ipam, daemon.shared_store.location(), client.deadline()).await.into()
}

/// # Errors
/// `TimedOut` if the client does not read the frame in time; any other I/O error of the connection.
pub(crate) async fn send(writer: &mut OwnedWriteHalf, frame: &Frame) -> io::Result<()> {
    let sent = timeout(SEND_TIMEOUT, writer.write_all(&frame.to_bytes())).await;
    sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Waits until a client that should send nothing sends a byte or disconnects.
async fn client_speaks(reader: &mut OwnedReadHalf) {
    let _ = reader.read(&mut [0]).await;
}

/// Carries out any store request except a watch.
async fn answer_store_request(
    daemon: &Daemon,
    generation: u64,
    asked: keys::TimedRequest,
    connection: &OwnedReadHalf,
) -> keys::StoreReply {
    let operation = match asked.request {
        keys::Request::Range(_) | keys::Request::Oldest => Operation::Range,
        keys::Request::Txn(..) => Operation::Txn,
        keys::Request::Watch(_) => Operation::Watch,
        keys::Request::Compact(_) => Operation::Compact,
    };
    let until = request_deadline(asked.within);
    match carry_out(daemon, generation, asked.request, until, connection).await {
        Ok(answer) => answer,
        Err(error) => keys::StoreReply::Failed(keys::ErrorReply::from(&at_operation(error, operation))),
    }
}

/// In an error from opening the store, replaces the operation `Open` with the requested operation, which has not
/// started.
fn at_operation(error: Error, operation: Operation) -> Error {
    if error.operation() != Operation::Open {
        return error;
    }
    let outcome = error.outcome();
    Error::new(error.kind().clone(), operation, error.store().to_owned()).with_source(error).with_outcome(outcome)
}

async fn carry_out(
    daemon: &Daemon,
    generation: u64,
    request: keys::Request,
    until: Instant,
    connection: &OwnedReadHalf,
) -> kv::Result<keys::StoreReply> {
    let kept = daemon.shared_store.keep_open(until).await?;
    if kept.generation != generation {
        return Err(daemon.shared_store.replaced(Operation::Open));
    }
    let asked = |store| {
        let client = Client::new(connection.as_ref(), until);
        let client =
            client.map_err(|error| Error::new(ErrorKind::Throttled, Operation::Open, "serve").with_source(error))?;
        Ok::<_, Error>(CancellableStore::new(store, vec![client], Arc::clone(&daemon.metrics)))
    };
    Ok(match request {
        keys::Request::Range(request) => keys::StoreReply::Range(kept.store(Purpose::Any)?.range(request).await?),
        keys::Request::Txn(txn, purpose) => {
            let store = kept.store(purpose)?;
            // Reads of other clients succeed even while a commit hangs, so a read must not count as progress of the
            // store.
            keys::StoreReply::Txn(if txn.is_read_only() {
                store.txn(txn).await?
            } else {
                asked(store)?.txn(txn).await?
            })
        }
        keys::Request::Compact(revision) => {
            kept.store(Purpose::Any)?.compact(revision).await?;
            keys::StoreReply::Compacted
        }
        keys::Request::Oldest => match kept.open()?.embedded() {
            Some(store) => {
                let oldest = store.oldest().await?;
                keys::StoreReply::Oldest(oldest.revision, oldest.time)
            }
            None => return Err(Error::new(ErrorKind::Unsupported, Operation::Range, "serve")),
        },
        keys::Request::Watch(_) => return Err(Error::new(ErrorKind::Unsupported, Operation::Watch, "serve")),
    })
}

/// Sends the events of a watch until the watch ends or the client disconnects.
async fn serve_watch(
    shared_store: &SharedStore,
    generation: u64,
    request: WatchRequest,
    reader: &mut OwnedReadHalf,
    writer: &mut OwnedWriteHalf,
) -> io::Result<()> {
    let mut stream = match shared_store.watch_of(generation, request).await {
        Ok(stream) => stream,
        Err(error) => {
            return send(
                writer,
                &Frame::new(FrameKind::Answer, &keys::StoreReply::Failed(keys::ErrorReply::from(&error)))?,
            )
            .await;
        }
    };
    send(writer, &Frame::new(FrameKind::Answer, &keys::StoreReply::Watching)?).await?;
    loop {
        let item = tokio::select! {
            item = stream.next() => item,
            // A watching client sends nothing more, so this read ends only when the client disconnects.
            () = client_speaks(reader) => return Ok(()),
        };
        let answer = match item {
            Some(Ok(batch)) => keys::StoreReply::Happened(batch),
            Some(Err(error)) => {
                let answer = keys::StoreReply::Failed(keys::ErrorReply::from(&error));
                return send(writer, &Frame::new(FrameKind::Answer, &answer)?).await;
            }
            None => return Ok(()),
        };
        send(writer, &Frame::new(FrameKind::Answer, &answer)?).await?;
    }
}
