//! Calls to a cluster: the choice of the member, the time limit, and the next member after a failure.
//!
//! All calls go to one member until it fails them; then the next one is it. No member is ever given up: the round goes
//! on to it again, so its health comes back by itself.

use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{CompactionResponse, GetResponse, ResponseHeader, StatusResponse, TxnResponse};
use kv::{Auth, Error, ErrorKind, Operation, Outcome, Result, Revision};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::endpoint::{Connection, Endpoint};
use crate::error::{NAME, advice, is_silent, map, refuses_our_certificate, speaks_otherwise};
use crate::members::{Known, Members};
use crate::options::Options;
use crate::seen::{Freshness, Seen};

/// How often each member may be asked in one call.
const ROUNDS: usize = 2;
/// Between two rounds.
const PAUSE: Duration = Duration::from_millis(100);

/// All members, and what was seen of them.
#[derive(Debug)]
pub(crate) struct Cluster {
    members: Members,
    pub(crate) seen: Seen,
    call_timeout: Duration,
    /// When all calls together have to be over.
    end: Option<Instant>,
    pub(crate) watch_patience: Duration,
    /// True once the store was closed.
    pub(crate) closed: watch::Sender<bool>,
}

/// Whether something may be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resend {
    /// It changes nothing, so it may.
    Always,
    /// Only if it was never sent.
    IfNeverSent,
}

/// An answer of etcd.
pub(crate) trait Answer {
    /// The beginning of every answer.
    fn header(&self) -> Option<&ResponseHeader>;

    /// How fresh it has to be.
    fn freshness(&self) -> Freshness {
        Freshness::SinceCall
    }
}

impl Answer for GetResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header()
    }
}

impl Answer for TxnResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header()
    }
}

impl Answer for StatusResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header()
    }

    fn freshness(&self) -> Freshness {
        Freshness::OfMember
    }
}

impl Answer for CompactionResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header()
    }
}

/// The attempts that ended with a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    OfRound,
    OfCall,
}

/// Why one member did not do what it was asked to do.
struct Failure {
    error: Error,
    /// True if the request was certainly never sent to it.
    never_sent: bool,
}

/// A call to the members, and its time limit.
#[derive(Clone, Copy)]
struct Asked {
    operation: Operation,
    resend: Resend,
    deadline: Instant,
}

/// The members that failed in one call, in the order in which they were asked last, and how.
#[derive(Default)]
struct Tried(Vec<(String, String)>);

impl Tried {
    fn note(&mut self, url: &str, error: &Error) {
        self.0.retain(|(known, _)| known != url);
        self.0.push((url.to_owned(), error.kind().to_string()));
    }

    /// The error of the last one, with the others before it.
    fn reported_with(&self, error: Error) -> Error {
        let Some((_, others)) = self.0.split_last().filter(|(_, others)| !others.is_empty()) else { return error };
        let others: Vec<_> = others.iter().map(|(url, why)| format!("{url} ({why})")).collect();
        let others = format!("before it {} failed", others.join(", "));
        let detail = error.detail().map_or(others.clone(), |detail| format!("{detail}; {others}"));
        error.with_detail(detail)
    }
}

/// How long one member has.
#[derive(Clone, Copy)]
struct Limits {
    /// To let us in.
    connect: Instant,
    /// To answer.
    answer: Instant,
}

impl Cluster {
    /// # Errors
    /// The fault of the options.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            members: Members::new(options)?,
            seen: Seen::default(),
            call_timeout: options.call_timeout,
            end: options.end.map(Instant::from_std),
            watch_patience: options.watch_patience,
            closed: watch::Sender::new(false),
        })
    }

    /// # Errors
    /// `Closed`, after the store was closed.
    pub(crate) fn check_open(&self, operation: Operation) -> Result<()> {
        if *self.closed.borrow() { Err(Error::new(ErrorKind::Closed, operation, NAME)) } else { Ok(()) }
    }

    /// The members' URLs.
    ///
    /// # Errors
    /// Why none could be found.
    pub(crate) async fn endpoints(&self, operation: Operation, deadline: Instant) -> Result<Vec<String>> {
        let members = self.members.current(operation, deadline).await?;
        Ok((0..members.count()).filter_map(|place| Some(members.get(place)?.address.url.clone())).collect())
    }

    /// When a call that begins now has to be over.
    pub(crate) fn deadline(&self) -> Instant {
        let now = Instant::now();
        let usual = now + self.call_timeout;
        self.end.map_or(usual, |end| usual.min(now + end.saturating_duration_since(now) * 2 / 3))
    }

    /// Asks one member after the other until one answers, time is up, or the request may not be sent again.
    pub(crate) async fn call<T, F>(
        &self,
        operation: Operation,
        resend: Resend,
        deadline: Instant,
        work: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<T>
    where
        T: Answer + Send,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        self.check_open(operation)?;
        let before = self.seen.revision();
        let mut tried = Tried::default();
        let mut round = 1;
        loop {
            let members = self.members.current(operation, deadline).await?;
            let asked = Asked { operation, resend, deadline };
            let (failure, last) = match self.ask_around(&members, asked, &mut tried, &work).await {
                Ok((answer, endpoint)) => return self.judge(answer, before, operation, &endpoint.address.url),
                Err(failed) => failed,
            };
            if last == Last::OfCall || round == ROUNDS || Instant::now() >= deadline {
                return Err(tried.reported_with(failure.error));
            }
            round += 1;
            tokio::time::sleep_until(deadline.min(Instant::now() + PAUSE)).await;
        }
    }

    /// Asks each member once, until one answers; also says whether anybody may be asked after a failure.
    async fn ask_around<T, F>(
        &self,
        members: &Known,
        asked: Asked,
        tried: &mut Tried,
        work: &(impl Fn(Connection) -> F + Send + Sync),
    ) -> Result<(T, Arc<Endpoint>), (Failure, Last)>
    where
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        let Asked { operation, resend, deadline } = asked;
        let (first, count) = (members.first(), members.count());
        let mut failure = Failure { error: Error::new(ErrorKind::NotSent, operation, NAME), never_sent: true };
        for step in 0..count {
            let Some(endpoint) = members.get(first + step) else { break };
            // Each of those who are still to be asked in this round gets the same share of what is left.
            let share = share(deadline, count - step);
            let limits = match resend {
                Resend::Always => Limits { connect: share, answer: share },
                Resend::IfNeverSent => Limits { connect: share, answer: deadline },
            };
            failure = match attempt(endpoint, operation, limits, work).await {
                Ok(answer) => {
                    endpoint.note_answer();
                    members.prefer(first + step);
                    return Ok((answer, endpoint.clone()));
                }
                Err(failure) => failure,
            };
            endpoint.note_failure();
            tried.note(&endpoint.address.url, &failure.error);
            if failure.error.kind().is_transient() {
                members.avoid(first + step);
            }
            if !may_go_on(&failure, resend) || Instant::now() >= deadline {
                return Err((failure, Last::OfCall));
            }
            tracing::debug!(endpoint = endpoint.address.url, error = %failure.error, "asking another member");
        }
        Err((failure, Last::OfRound))
    }

    fn judge<T: Answer>(&self, answer: T, before: Revision, operation: Operation, url: &str) -> Result<T> {
        let store = format!("{NAME} {url}");
        // The request was carried out, whatever the fault of the answer.
        let fail = |kind: ErrorKind, detail: String| {
            let error = Error::new(kind, operation, store).with_detail(detail);
            match operation {
                Operation::Txn | Operation::Compact => error.with_outcome(Outcome::Unknown),
                _ => error,
            }
        };
        let judged = match answer.header() {
            None => return Err(fail(ErrorKind::Undecodable, "an answer without a header".to_owned())),
            Some(header) => self.seen.judge(header, before, answer.freshness()),
        };
        match judged {
            Ok(()) => Ok(answer),
            Err(detail) => Err(fail(ErrorKind::RevisionRegressed, detail)),
        }
    }
}

fn share(deadline: Instant, among: usize) -> Instant {
    let now = Instant::now();
    let among = u32::try_from(among.max(1)).unwrap_or(u32::MAX);
    now + deadline.saturating_duration_since(now) / among
}

fn may_go_on(failure: &Failure, resend: Resend) -> bool {
    failure.error.kind().is_transient() && (failure.never_sent || resend == Resend::Always)
}

fn with_hint(error: Error, hint: Option<Cow<'static, str>>) -> Error {
    match hint {
        Some(hint) => error.with_detail(hint),
        None => error,
    }
}

/// Asks one member. A token that is refused is renewed once: who refuses a token has not looked at the request.
async fn attempt<T, F>(
    endpoint: &Endpoint,
    operation: Operation,
    limits: Limits,
    work: &(impl Fn(Connection) -> F + Send + Sync),
) -> Result<T, Failure>
where
    F: Future<Output = Result<T, etcd_client::Error>> + Send,
{
    let store = format!("{NAME} {}", endpoint.address.url);
    let timeout = || with_hint(Error::new(ErrorKind::Timeout, operation, store.clone()), endpoint.silence());
    let reported = |error: etcd_client::Error| {
        let hint = match endpoint.identity_fault().filter(|_| refuses_our_certificate(&error)) {
            Some(fault) => Some(fault.into()),
            None if speaks_otherwise(&error) => endpoint.hint(),
            None if is_silent(&error) => endpoint.port_hint().map(Cow::from).or(advice(&error).map(Cow::from)),
            None => advice(&error).map(Cow::from),
        };
        with_hint(map(error, operation, &store), hint)
    };
    // Until here nothing was sent but a login.
    let never_sent = |error: Error| Failure { error: error.with_outcome(Outcome::NotApplied), never_sent: true };
    let (connection, renewals) = match timeout_at(limits.connect, endpoint.connection()).await {
        Ok(Ok(connected)) => connected,
        Ok(Err(error)) => return Err(never_sent(reported(error))),
        Err(_) => return Err(never_sent(timeout())),
    };
    let mut renewed = false;
    loop {
        let error = match timeout_at(limits.answer, work(connection.clone())).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => reported(error),
            Err(_) => return Err(Failure { error: timeout(), never_sent: false }),
        };
        let refused = matches!(error.kind(), ErrorKind::Auth(Auth::Unauthenticated | Auth::OldRevision))
            && error.outcome() == Outcome::NotApplied;
        if renewed || !refused || !endpoint.can_renew() {
            let never_sent = *error.kind() == ErrorKind::NotSent;
            return Err(Failure { error, never_sent });
        }
        match timeout_at(limits.answer, Box::pin(endpoint.renew(&connection, renewals))).await {
            Ok(Ok(())) => renewed = true,
            Ok(Err(error)) => return Err(never_sent(reported(error))),
            Err(_) => return Err(never_sent(timeout())),
        }
    }
}
