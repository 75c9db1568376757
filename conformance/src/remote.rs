//! The reference store behind TCP, and clients of it that are wrong in one way each. They serve the tests of the cases
//! that need a network.
//!
//! Only numbers go over the wire; what they stand for is left at a desk that client and server share.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use kv::{
    Batch, Error, ErrorKind, Operation, Outcome, RangeRequest, RangeResponse, Result, Revision, Store, Txn,
    TxnResponse, WatchRequest, WatchStream,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::harness::{Ability, BoxError, Fixture, Harness, Server};
use crate::reference::Reference;

const NAME: &str = "remote";
/// How long a client waits for the server.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often the server of a watch shows that it is there.
const BEAT: Duration = Duration::from_millis(50);
/// The number that the server of a watch sends then.
const ALIVE: u64 = 0;

/// The fault of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    Healthy,
    /// A watch that loses its connection says nothing any more.
    FallsSilent,
    /// A watch that loses its connection goes on with the changes after it has a new one.
    SkipsTheGap,
    /// A write without an answer is sent again.
    SendsAgain,
    /// A write without an answer is reported as not applied.
    CallsItCertain,
    /// An answer is waited for without end.
    WaitsForEver,
    /// A member that did not answer gets the next request first again.
    NeverLearns,
}

#[derive(Debug)]
enum Request {
    Range(RangeRequest),
    Txn(Txn),
    Watch(WatchRequest),
    Compact(Revision),
}

#[derive(Debug)]
enum Answer {
    Range(Result<RangeResponse>),
    Txn(Result<TxnResponse>),
    Watched(Result<Batch>),
    Compacted(Result<()>),
}

#[derive(Debug, Default)]
struct Desk {
    next: AtomicU64,
    requests: Mutex<HashMap<u64, Request>>,
    answers: Mutex<HashMap<u64, Answer>>,
}

impl Desk {
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn ask(&self, request: Request) -> u64 {
        let number = self.number();
        self.requests.lock().unwrap().insert(number, request);
        number
    }

    fn answer(&self, answer: Answer) -> u64 {
        let number = self.number();
        self.answers.lock().unwrap().insert(number, answer);
        number
    }
}

async fn serve(mut stream: TcpStream, store: Reference, desk: Arc<Desk>) -> std::io::Result<()> {
    loop {
        let number = stream.read_u64().await?;
        // One that was sent again is carried out again.
        let request = desk.requests.lock().unwrap().get(&number).map(|request| match request {
            Request::Range(request) => Request::Range(request.clone()),
            Request::Txn(txn) => Request::Txn(txn.clone()),
            Request::Watch(request) => Request::Watch(request.clone()),
            Request::Compact(revision) => Request::Compact(*revision),
        });
        let answer = match request {
            Some(Request::Range(request)) => Answer::Range(store.range(request).await),
            Some(Request::Txn(txn)) => Answer::Txn(store.txn(txn).await),
            Some(Request::Compact(revision)) => Answer::Compacted(store.compact(revision).await),
            Some(Request::Watch(request)) => return serve_watch(stream, &store, &desk, request).await,
            None => return Ok(()),
        };
        stream.write_u64(desk.answer(answer)).await?;
    }
}

async fn serve_watch(
    mut stream: TcpStream,
    store: &Reference,
    desk: &Desk,
    request: WatchRequest,
) -> std::io::Result<()> {
    let mut batches = store.watch(request).await.map_err(std::io::Error::other)?;
    stream.write_u64(ALIVE).await?;
    loop {
        match timeout(BEAT, batches.next()).await {
            Err(_) => stream.write_u64(ALIVE).await?,
            Ok(None) => return Ok(()),
            Ok(Some(batch)) => stream.write_u64(desk.answer(Answer::Watched(batch))).await?,
        }
    }
}

/// A client.
#[derive(Clone, Debug)]
struct Remote {
    addresses: Vec<SocketAddr>,
    preferred: Arc<AtomicUsize>,
    desk: Arc<Desk>,
    manner: Manner,
}

impl Remote {
    fn error(kind: ErrorKind, operation: Operation) -> Error {
        Error::new(kind, operation, NAME)
    }

    async fn in_time<T>(&self, work: impl Future<Output = std::io::Result<T>>) -> Result<T, ErrorKind> {
        let lost = |_| ErrorKind::Disconnected { resume_from: Revision::UNSET };
        match self.manner {
            Manner::WaitsForEver => work.await.map_err(lost),
            _ => timeout(PATIENCE, work).await.map_err(|_| ErrorKind::Timeout)?.map_err(lost),
        }
    }

    /// A connection to a member, and the first number that came back.
    async fn send(&self, request: Request, operation: Operation) -> Result<(TcpStream, u64)> {
        let number = self.desk.ask(request);
        let first = self.preferred.load(Ordering::Relaxed);
        let mut last = ErrorKind::NotSent;
        for step in 0..self.addresses.len() {
            let index = (first + step) % self.addresses.len();
            let Ok(mut stream) = TcpStream::connect(self.addresses[index]).await else { continue };
            let exchange = async {
                stream.write_u64(number).await?;
                stream.read_u64().await
            };
            let answered = self.in_time(exchange).await;
            let next = if answered.is_ok() { index } else { index + 1 };
            if self.manner != Manner::NeverLearns {
                self.preferred.store(next, Ordering::Relaxed);
            }
            match answered {
                Ok(answer) => return Ok((stream, answer)),
                Err(kind) => last = kind,
            }
            if operation == Operation::Txn && self.manner != Manner::SendsAgain {
                break;
            }
        }
        if self.manner == Manner::SendsAgain && last != ErrorKind::NotSent {
            let mut stream =
                TcpStream::connect(self.addresses[0]).await.map_err(|_| Self::error(last.clone(), operation))?;
            stream.write_u64(number).await.unwrap();
            if let Ok(answer) = stream.read_u64().await {
                return Ok((stream, answer));
            }
        }
        let error = Self::error(last, operation);
        Err(if self.manner == Manner::CallsItCertain { error.with_outcome(Outcome::NotApplied) } else { error })
    }

    async fn call(&self, request: Request, operation: Operation) -> Result<Answer> {
        let (_, number) = self.send(request, operation).await?;
        let answer = self.desk.answers.lock().unwrap().remove(&number);
        answer.ok_or_else(|| Self::error(ErrorKind::Undecodable, operation))
    }

    /// The next item of a watch; `None` for a sign of life.
    async fn item(&self, stream: &mut TcpStream) -> Result<Option<Result<Batch>>, ErrorKind> {
        let number = self.in_time(stream.read_u64()).await?;
        match self.desk.answers.lock().unwrap().remove(&number) {
            Some(Answer::Watched(batch)) => Ok(Some(batch)),
            _ if number == ALIVE => Ok(None),
            _ => Err(ErrorKind::Undecodable),
        }
    }

    /// The outcome of a lost connection of a watch: an error, or for some broken clients a new connection or silence.
    async fn cut_off(&self, request: &WatchRequest, resume_from: Revision) -> Result<TcpStream> {
        let error = Self::error(ErrorKind::Disconnected { resume_from }, Operation::Watch);
        match self.manner {
            Manner::FallsSilent => std::future::pending().await,
            Manner::SkipsTheGap => loop {
                let latest = self.range(RangeRequest::new(request.range.clone())).await.map(|found| found.revision);
                let Ok(latest) = latest else { continue };
                let mut request = request.clone();
                request.start = latest.next();
                if let Ok((stream, _)) = self.send(Request::Watch(request), Operation::Watch).await {
                    return Ok(stream);
                }
            },
            _ => Err(error),
        }
    }
}

#[async_trait]
impl Store for Remote {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        match self.call(Request::Range(request), Operation::Range).await? {
            Answer::Range(answer) => answer,
            _ => Err(Self::error(ErrorKind::Undecodable, Operation::Range)),
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        match self.call(Request::Txn(txn), Operation::Txn).await? {
            Answer::Txn(answer) => answer,
            _ => Err(Self::error(ErrorKind::Undecodable, Operation::Txn)),
        }
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        let (stream, _) = self.send(Request::Watch(request.clone()), Operation::Watch).await?;
        let start = request.start;
        let cursor = Some((self.clone(), stream, request, start));
        Ok(futures::stream::unfold(cursor, |cursor| async {
            let (client, mut stream, request, mut next) = cursor?;
            loop {
                match client.item(&mut stream).await {
                    Ok(None) => {}
                    Ok(Some(Ok(batch))) => {
                        next = batch.revision.next();
                        return Some((Ok(batch), Some((client, stream, request, next))));
                    }
                    Ok(Some(Err(error))) => return Some((Err(error), None)),
                    Err(_) => match client.cut_off(&request, next).await {
                        Ok(again) => stream = again,
                        Err(error) => return Some((Err(error), None)),
                    },
                }
            }
        })
        .boxed())
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        match self.call(Request::Compact(revision), Operation::Compact).await? {
            Answer::Compacted(answer) => answer,
            _ => Err(Self::error(ErrorKind::Undecodable, Operation::Compact)),
        }
    }
}

/// Makes such stores, with clients of one manner.
struct Remotes(Manner);

#[derive(Debug)]
struct Served {
    address: SocketAddr,
    desk: Arc<Desk>,
    manner: Manner,
    server: AbortHandle,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Served {
    fn client(&self, addresses: &[SocketAddr], manner: Manner) -> Arc<dyn Store> {
        let (addresses, desk) = (addresses.to_vec(), self.desk.clone());
        Arc::new(Remote { addresses, preferred: Arc::default(), desk, manner })
    }
}

#[async_trait]
impl Harness for Remotes {
    fn abilities(&self) -> &[Ability] {
        &[Ability::Network]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (address, desk, store) = (listener.local_addr()?, Arc::<Desk>::default(), Reference::new());
        let at_desk = desk.clone();
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, store.clone(), at_desk.clone()));
            }
        });
        Ok(Box::new(Served { address, desk, manner: self.0, server: server.abort_handle() }))
    }
}

#[async_trait]
impl Fixture for Served {
    fn store(&self) -> Arc<dyn Store> {
        self.client(&[self.address], Manner::Healthy)
    }

    fn servers(&self) -> Vec<Server> {
        vec![Server { address: self.address, process: None }]
    }

    async fn connect(&self, addresses: &[SocketAddr]) -> Result<Arc<dyn Store>, BoxError> {
        Ok(self.client(addresses, self.manner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::{Options, Report, run};
    use crate::table::cases;

    /// The rules that a store with such clients breaks, of the cases that need a network and nothing more.
    fn broken_rules(manner: Manner) -> Vec<&'static str> {
        // Broken ones may hang, which is a failure, of the first rule of the case; healthy ones get time.
        let limit = Duration::from_secs(if manner == Manner::Healthy { 60 } else { 3 });
        let wanted = cases().into_iter().filter(|case| case.needs() == [Ability::Network]);
        let judge = |name: &str| {
            let options = Options::new().with_filter(name).with_patience(Duration::from_secs(2)).with_case_limit(limit);
            run(Remotes(manner), &options).unwrap()
        };
        let reports: Vec<Report> = wanted.flat_map(|case| judge(case.name())).collect();
        assert!(reports.len() >= 8, "only {} cases", reports.len());
        reports.iter().filter_map(Report::rule_broken).collect()
    }

    #[test]
    fn broken_clients_fail_by_their_rule() {
        assert_eq!(broken_rules(Manner::Healthy), Vec::<&str>::new());
        for (manner, rule) in [
            (Manner::FallsSilent, "W17"),
            (Manner::SkipsTheGap, "W17"),
            (Manner::SendsAgain, "E3"),
            (Manner::CallsItCertain, "E2"),
            (Manner::WaitsForEver, "N2"),
            (Manner::NeverLearns, "N1"),
        ] {
            let rules = broken_rules(manner);
            assert!(rules.contains(&rule), "{manner:?} fails by {rules:?} only");
        }
    }
}
