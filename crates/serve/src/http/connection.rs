//! Connections, with a bound on their number and on the time of each.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Shown;
use super::answer::secure;
use super::route::{Origin, answer};
use super::stall::Stalling;
use crate::accept::{Acceptor, Excess, Listener, Stream};

/// The bytes that a connection reads ahead and holds back.
const BUFFER: usize = 16 * 1024;
/// The most headers of a request.
const HEADERS: usize = 64;
/// The time that requests have to end when the daemon does.
const FAREWELL: Duration = Duration::from_millis(500);
/// The most clients that are refused at a time because there are too many.
const TURNED_AWAY: usize = 64;
/// The longest time to tell one.
const TELLING: Duration = Duration::from_millis(500);

/// The answer to a client that is one too many.
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n\
    content-length: 32\r\ncache-control: no-store\r\nretry-after: 5\r\nconnection: close\r\n\r\n\
    too many connections; try again\n";

/// Answers the clients of a listener until `stop` is done. Open requests then have half a second; streams of events end after it.
///
/// # Errors
/// None now; an error of a connection ends that connection.
pub async fn serve(listener: Listener, shown: Arc<Shown>, stop: impl Future<Output = ()>) -> io::Result<()> {
    let origin = match &listener {
        Listener::Tcp(_) => Origin::Network,
        Listener::Unix(_) => Origin::Socket,
    };
    let room = Arc::new(Semaphore::new(shown.limits.connections));
    let acceptor = Acceptor::new("the page", listener, room, Excess::IsAccepted);
    let lobby = Arc::new(Semaphore::new(TURNED_AWAY));
    let (stopper, stopped) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        let (client, place) = tokio::select! {
            () = &mut stop => break,
            next = acceptor.next() => next,
            // The outcome of a connection is no concern of others.
            Some(_) = connections.join_next() => continue,
        };
        let stream = client.into_stream();
        match place {
            Some(place) => {
                let (shown, stopped) = (Arc::clone(&shown), stopped.clone());
                connections.spawn(async move {
                    let _place = place;
                    let _counted = shown.metrics.viewer();
                    converse(stream, origin, &shown, stopped).await;
                });
            }
            None => {
                if let Ok(place) = Arc::clone(&lobby).try_acquire_owned() {
                    connections.spawn(async move {
                        let _place = place;
                        _ = timeout(TELLING, turn_away(stream)).await;
                    });
                }
            }
        }
    }
    drop(stopper);
    _ = timeout(FAREWELL, async { while connections.join_next().await.is_some() {} }).await;
    Ok(())
}

/// Answers the requests of a connection, one after the other.
async fn converse(stream: Box<dyn Stream>, origin: Origin, shown: &Arc<Shown>, mut stopped: watch::Receiver<()>) {
    let service = service_fn(|request: Request<Incoming>| async move {
        let mut answer = answer(&request, origin, shown).await;
        secure(answer.headers_mut());
        Ok::<_, Infallible>(answer)
    });
    let limits = shown.limits;
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.headers)
        .max_headers(HEADERS)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(Stalling::new(stream, limits.stall)), service);
    let mut connection = pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        // The sender says nothing; it goes with the daemon.
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "an HTTP connection ended");
    }
}

/// Tells a client that there are too many, and lets it read that: a connection that is closed with something unread takes
/// the answer with it.
async fn turn_away(mut stream: Box<dyn Stream>) {
    if stream.write_all(BUSY).await.is_ok() && stream.shutdown().await.is_ok() {
        let mut unread = [0; 1024];
        while stream.read(&mut unread).await.is_ok_and(|read| read > 0) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busy_answer_is_as_long_as_it_says() {
        let text = std::str::from_utf8(BUSY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{} bytes", body.len());
    }
}
