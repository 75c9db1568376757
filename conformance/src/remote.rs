//! Serves the reference store over TCP, and provides clients that have one fault each. The tests of this module use the
//! faulty clients to check those conformance cases that need a network.
//!
//! Only numbers that identify requests and answers are sent over the TCP connection. The requests and answers are
//! entries of a table in memory that client and server share.

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
use crate::reference::ReferenceStore;

const NAME: &str = "remote";
const SERVER_TIMEOUT: Duration = Duration::from_millis(500);
/// The interval at which the server sends a heartbeat on the connection of a watch.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(50);
/// The number that represents a heartbeat on the connection of a watch.
const HEARTBEAT_NUMBER: u64 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientFault {
    Healthy,
    /// A faulty client whose watches stay silent when they lose their connection, instead of ending.
    FallsSilent,
    /// A faulty client whose watches reconnect after a lost connection, but skip the changes in between.
    SkipsTheGap,
    /// A faulty client that sends a write a second time if the first request got no answer.
    SendsAgain,
    /// A faulty client that reports a write as not applied if the write gets no answer.
    CallsItCertain,
    /// A faulty client that waits for an answer without a time limit.
    WaitsForEver,
    /// A faulty client that always tries the cluster's members in the same order, even if the first member does not
    /// answer.
    NeverLearns,
}

#[derive(Debug)]
enum RemoteRequest {
    Range(RangeRequest),
    Txn(Txn),
    Watch(WatchRequest),
    Compact(Revision),
}

#[derive(Debug)]
enum RemoteAnswer {
    Range(Result<RangeResponse>),
    Txn(Result<TxnResponse>),
    Watched(Result<Batch>),
    Compacted(Result<()>),
}

#[derive(Debug, Default)]
struct RequestBoard {
    next: AtomicU64,
    requests: Mutex<HashMap<u64, RemoteRequest>>,
    answers: Mutex<HashMap<u64, RemoteAnswer>>,
}

impl RequestBoard {
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn ask(&self, request: RemoteRequest) -> u64 {
        let number = self.number();
        self.requests.lock().unwrap().insert(number, request);
        number
    }

    fn answer(&self, answer: RemoteAnswer) -> u64 {
        let number = self.number();
        self.answers.lock().unwrap().insert(number, answer);
        number
    }
}

async fn serve(mut stream: TcpStream, store: ReferenceStore, desk: Arc<RequestBoard>) -> std::io::Result<()> {
    loop {
        let number = stream.read_u64().await?;
        // The server executes a request again if a faulty client sends it again.
        let request = desk.requests.lock().unwrap().get(&number).map(|request| match request {
            RemoteRequest::Range(request) => RemoteRequest::Range(request.clone()),
            RemoteRequest::Txn(txn) => RemoteRequest::Txn(txn.clone()),
            RemoteRequest::Watch(request) => RemoteRequest::Watch(request.clone()),
            RemoteRequest::Compact(revision) => RemoteRequest::Compact(*revision),
        });
        let answer = match request {
            Some(RemoteRequest::Range(request)) => RemoteAnswer::Range(store.range(request).await),
            Some(RemoteRequest::Txn(txn)) => RemoteAnswer::Txn(store.txn(txn).await),
            Some(RemoteRequest::Compact(revision)) => RemoteAnswer::Compacted(store.compact(revision).await),
            Some(RemoteRequest::Watch(request)) => return serve_watch(stream, &store, &desk, request).await,
            None => return Ok(()),
        };
        stream.write_u64(desk.answer(answer)).await?;
    }
}

async fn serve_watch(
    mut stream: TcpStream,
    store: &ReferenceStore,
    desk: &RequestBoard,
    request: WatchRequest,
) -> std::io::Result<()> {
    let mut batches = store.watch(request).await.map_err(std::io::Error::other)?;
    stream.write_u64(HEARTBEAT_NUMBER).await?;
    loop {
        match timeout(HEARTBEAT_INTERVAL, batches.next()).await {
            Err(_) => stream.write_u64(HEARTBEAT_NUMBER).await?,
            Ok(None) => return Ok(()),
            Ok(Some(batch)) => stream.write_u64(desk.answer(RemoteAnswer::Watched(batch))).await?,
        }
    }
}

#[derive(Clone, Debug)]
struct RemoteStore {
    addresses: Vec<SocketAddr>,
    preferred: Arc<AtomicUsize>,
    desk: Arc<RequestBoard>,
    manner: ClientFault,
}

impl RemoteStore {
    fn error(kind: ErrorKind, operation: Operation) -> Error {
        Error::new(kind, operation, NAME)
    }

    async fn in_time<T>(&self, work: impl Future<Output = std::io::Result<T>>) -> Result<T, ErrorKind> {
        let lost = |_| ErrorKind::Disconnected { resume_from: Revision::UNSET };
        match self.manner {
            ClientFault::WaitsForEver => work.await.map_err(lost),
            _ => timeout(SERVER_TIMEOUT, work).await.map_err(|_| ErrorKind::Timeout)?.map_err(lost),
        }
    }

    /// Sends a request to a member; returns the connection and the first number of the member's answer.
    async fn send(&self, request: RemoteRequest, operation: Operation) -> Result<(TcpStream, u64)> {
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
            if self.manner != ClientFault::NeverLearns {
                self.preferred.store(next, Ordering::Relaxed);
            }
            match answered {
                Ok(answer) => return Ok((stream, answer)),
                Err(kind) => last = kind,
            }
            if operation == Operation::Txn && self.manner != ClientFault::SendsAgain {
                break;
            }
        }
        if self.manner == ClientFault::SendsAgain && last != ErrorKind::NotSent {
            let mut stream =
                TcpStream::connect(self.addresses[0]).await.map_err(|_| Self::error(last.clone(), operation))?;
            stream.write_u64(number).await.unwrap();
            if let Ok(answer) = stream.read_u64().await {
                return Ok((stream, answer));
            }
        }
        let error = Self::error(last, operation);
        Err(if self.manner == ClientFault::CallsItCertain { error.with_outcome(Outcome::NotApplied) } else { error })
    }

    async fn call(&self, request: RemoteRequest, operation: Operation) -> Result<RemoteAnswer> {
        let (_, number) = self.send(request, operation).await?;
        let answer = self.desk.answers.lock().unwrap().remove(&number);
        answer.ok_or_else(|| Self::error(ErrorKind::Undecodable, operation))
    }

    /// Reads the next item from the connection of a watch; `None` for a heartbeat.
    async fn item(&self, stream: &mut TcpStream) -> Result<Option<Result<Batch>>, ErrorKind> {
        let number = self.in_time(stream.read_u64()).await?;
        match self.desk.answers.lock().unwrap().remove(&number) {
            Some(RemoteAnswer::Watched(batch)) => Ok(Some(batch)),
            _ if number == HEARTBEAT_NUMBER => Ok(None),
            _ => Err(ErrorKind::Undecodable),
        }
    }

    /// Handles the lost connection of a watch: returns an error, or, for some client faults, reconnects or stays
    /// silent.
    async fn cut_off(&self, request: &WatchRequest, resume_from: Revision) -> Result<TcpStream> {
        let error = Self::error(ErrorKind::Disconnected { resume_from }, Operation::Watch);
        match self.manner {
            ClientFault::FallsSilent => std::future::pending().await,
            ClientFault::SkipsTheGap => loop {
                let latest = self.range(RangeRequest::new(request.range.clone())).await.map(|found| found.revision);
                let Ok(latest) = latest else { continue };
                let mut request = request.clone();
                request.start = latest.next();
                if let Ok((stream, _)) = self.send(RemoteRequest::Watch(request), Operation::Watch).await {
                    return Ok(stream);
                }
            },
            _ => Err(error),
        }
    }
}

#[async_trait]
impl Store for RemoteStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        match self.call(RemoteRequest::Range(request), Operation::Range).await? {
            RemoteAnswer::Range(answer) => answer,
            _ => Err(Self::error(ErrorKind::Undecodable, Operation::Range)),
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        match self.call(RemoteRequest::Txn(txn), Operation::Txn).await? {
            RemoteAnswer::Txn(answer) => answer,
            _ => Err(Self::error(ErrorKind::Undecodable, Operation::Txn)),
        }
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        let (stream, _) = self.send(RemoteRequest::Watch(request.clone()), Operation::Watch).await?;
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
        match self.call(RemoteRequest::Compact(revision), Operation::Compact).await? {
            RemoteAnswer::Compacted(answer) => answer,
            _ => Err(Self::error(ErrorKind::Undecodable, Operation::Compact)),
        }
    }
}

/// A test harness that makes stores whose clients have one given fault.
struct RemoteHarness(ClientFault);

#[derive(Debug)]
struct RemoteFixture {
    address: SocketAddr,
    desk: Arc<RequestBoard>,
    manner: ClientFault,
    server: AbortHandle,
}

impl Drop for RemoteFixture {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl RemoteFixture {
    fn client(&self, addresses: &[SocketAddr], manner: ClientFault) -> Arc<dyn Store> {
        let (addresses, desk) = (addresses.to_vec(), self.desk.clone());
        Arc::new(RemoteStore { addresses, preferred: Arc::default(), desk, manner })
    }
}

#[async_trait]
impl Harness for RemoteHarness {
    fn abilities(&self) -> &[Ability] {
        &[Ability::Network]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (address, desk, store) = (listener.local_addr()?, Arc::<RequestBoard>::default(), ReferenceStore::new());
        let at_desk = desk.clone();
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, store.clone(), at_desk.clone()));
            }
        });
        Ok(Box::new(RemoteFixture { address, desk, manner: self.0, server: server.abort_handle() }))
    }
}

#[async_trait]
impl Fixture for RemoteFixture {
    fn store(&self) -> Arc<dyn Store> {
        self.client(&[self.address], ClientFault::Healthy)
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
    use crate::runner::{Report, RunOptions, run};
    use crate::table::cases;

    /// Runs the cases that need only [`Ability::Network`] on a store with this client fault, and returns the broken
    /// rules.
    fn broken_rules(manner: ClientFault) -> Vec<&'static str> {
        // A faulty client may hang, so it gets a short time limit; a case that exceeds the limit counts as breaking its
        // first rule.
        let limit = Duration::from_secs(if manner == ClientFault::Healthy { 60 } else { 3 });
        let wanted = cases().into_iter().filter(|case| case.needs() == [Ability::Network]);
        let judge = |name: &str| {
            let options =
                RunOptions::new().with_filter(name).with_patience(Duration::from_secs(2)).with_case_limit(limit);
            run(RemoteHarness(manner), &options).unwrap()
        };
        let reports: Vec<Report> = wanted.flat_map(|case| judge(case.name())).collect();
        assert!(reports.len() >= 8, "only {} cases", reports.len());
        reports.iter().filter_map(Report::rule_broken).collect()
    }

    #[test]
    fn broken_clients_fail_by_their_rule() {
        assert_eq!(broken_rules(ClientFault::Healthy), Vec::<&str>::new());
        for (manner, rule) in [
            (ClientFault::FallsSilent, "W17"),
            (ClientFault::SkipsTheGap, "W17"),
            (ClientFault::SendsAgain, "E3"),
            (ClientFault::CallsItCertain, "E2"),
            (ClientFault::WaitsForEver, "N2"),
            (ClientFault::NeverLearns, "N1"),
        ] {
            let rules = broken_rules(manner);
            assert!(rules.contains(&rule), "{manner:?} fails by {rules:?} only");
        }
    }
}
