//! A store's requests on a connection.

use std::sync::Arc;
use std::time::Instant;

use datastore::held::Held;
use futures::StreamExt;
use kv::{Error, ErrorKind, Operation, Purpose, Store, WatchRequest};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use wire::keys::{Answer, Asked, Failed, Request};
use wire::{Frame, Kind};

use crate::asker::{AskedStore, Asker, until};
use crate::connection::{client_speaks, send};
use crate::daemon::Daemon;

/// Carries out a request that is no watch.
pub(crate) async fn answer(daemon: &Daemon, generation: u64, asked: Asked, connection: &OwnedReadHalf) -> Answer {
    let operation = match asked.request {
        Request::Range(_) | Request::Oldest => Operation::Range,
        Request::Txn(..) => Operation::Txn,
        Request::Watch(_) => Operation::Watch,
        Request::Compact(_) => Operation::Compact,
    };
    let until = until(asked.within);
    match carry_out(daemon, generation, asked.request, until, connection).await {
        Ok(answer) => answer,
        Err(error) => Answer::Failed(Failed::from(&at_operation(error, operation))),
    }
}

/// An error of opening the store, as the client's request has it: nothing was done.
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
    request: Request,
    until: Instant,
    connection: &OwnedReadHalf,
) -> kv::Result<Answer> {
    let kept = daemon.held.keep_open(until).await?;
    if kept.generation != generation {
        return Err(daemon.held.replaced(Operation::Open));
    }
    let asked = |store| {
        let asker = Asker::new(connection.as_ref(), until);
        let asker =
            asker.map_err(|error| Error::new(ErrorKind::Throttled, Operation::Open, "serve").with_source(error))?;
        Ok::<_, Error>(AskedStore::new(store, vec![asker], Arc::clone(&daemon.metrics)))
    };
    Ok(match request {
        Request::Range(request) => Answer::Range(kept.store(Purpose::Any)?.range(request).await?),
        Request::Txn(txn, purpose) => {
            let store = kept.store(purpose)?;
            // Reads of other clients go on while a commit hangs, so they are no beat of the store.
            Answer::Txn(if txn.is_read_only() { store.txn(txn).await? } else { asked(store)?.txn(txn).await? })
        }
        Request::Compact(revision) => {
            kept.store(Purpose::Any)?.compact(revision).await?;
            Answer::Compacted
        }
        Request::Oldest => match kept.open()?.embedded() {
            Some(store) => {
                let oldest = store.oldest().await?;
                Answer::Oldest(oldest.revision, oldest.time)
            }
            None => return Err(Error::new(ErrorKind::Unsupported, Operation::Range, "serve")),
        },
        Request::Watch(_) => return Err(Error::new(ErrorKind::Unsupported, Operation::Watch, "serve")),
    })
}

/// Sends what a watch delivers until it ends or the client is gone.
pub(crate) async fn watch(
    held: &Held,
    generation: u64,
    request: WatchRequest,
    reader: &mut OwnedReadHalf,
    writer: &mut OwnedWriteHalf,
) -> std::io::Result<()> {
    let mut stream = match held.watch_of(generation, request).await {
        Ok(stream) => stream,
        Err(error) => return send(writer, &Frame::new(Kind::Answer, &Answer::Failed(Failed::from(&error)))?).await,
    };
    send(writer, &Frame::new(Kind::Answer, &Answer::Watching)?).await?;
    loop {
        let item = tokio::select! {
            item = stream.next() => item,
            // A client says nothing more once it watches.
            () = client_speaks(reader) => return Ok(()),
        };
        let answer = match item {
            Some(Ok(batch)) => Answer::Happened(batch),
            Some(Err(error)) => {
                let answer = Answer::Failed(Failed::from(&error));
                return send(writer, &Frame::new(Kind::Answer, &answer)?).await;
            }
            None => return Ok(()),
        };
        send(writer, &Frame::new(Kind::Answer, &answer)?).await?;
    }
}
