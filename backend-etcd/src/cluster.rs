//! Sends requests to an etcd cluster: chooses a member, limits the time, and fails over to the next member. The cluster
//! module also tracks the newest revision in any answer, and checks that servers have a supported version.
//!
//! All requests are sent to one member until that member fails; then they are sent to the next member. No member is
//! excluded for good: the rotation returns to each member, so a member that has recovered is used again. An answer from
//! another cluster, or with a lower revision than an earlier answer, is reported as an error.

use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{CompactionResponse, GetResponse, ResponseHeader, StatusResponse, TxnResponse};
use kv::{Auth, Error, ErrorKind, Operation, Outcome, Result, Revision};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::error::{STORE_NAME, advice, is_silent, map, refuses_our_certificate, speaks_other_protocol};
use crate::members::{Connection, Endpoint, MemberList, Members};
use crate::options::{Options, refused};

/// Maximum number of rounds in one store call; in each round, every etcd member is tried once.
const MAX_ROUNDS: usize = 2;
/// Pause between two rounds of requests in one store call.
const ROUND_INTERVAL: Duration = Duration::from_millis(100);

/// The client of an etcd cluster: its members, and the cluster id and newest revision that answers have shown.
#[derive(Debug)]
pub(crate) struct EtcdCluster {
    members: Members,
    pub(crate) seen: ObservedCluster,
    call_timeout: Duration,
    /// The deadline that all calls of the store share; `None` for no deadline.
    end: Option<Instant>,
    pub(crate) watch_patience: Duration,
    pub(crate) closed: watch::Sender<bool>,
}

/// Says whether the client may send a request to etcd more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resend {
    /// For requests that change nothing in the store: after a failure, the request may be sent again, even if a member
    /// received the first attempt.
    Always,
    /// The request may be sent again only if no earlier attempt was sent to a member.
    IfNeverSent,
}

/// An answer from etcd.
pub(crate) trait EtcdResponse {
    /// The header of etcd's answer, which contains the cluster id and the revision.
    fn header(&self) -> Option<&ResponseHeader>;

    /// Says how new the state in the answer must be.
    fn freshness(&self) -> Freshness {
        Freshness::SinceCall
    }
}

impl EtcdResponse for GetResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header()
    }
}

impl EtcdResponse for TxnResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header()
    }
}

impl EtcdResponse for StatusResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header()
    }

    fn freshness(&self) -> Freshness {
        Freshness::OfMember
    }
}

impl EtcdResponse for CompactionResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header()
    }
}

/// After a failed attempt, says whether the store call may start another round over all members (`OfRound`) or must
/// fail (`OfCall`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastOf {
    OfRound,
    OfCall,
}

/// A failed attempt to send a request to one member.
struct MemberFailure {
    error: Error,
    /// True if the client certainly never sent the request to the member.
    never_sent: bool,
}

/// The parameters that all attempts of one store call share.
#[derive(Clone, Copy)]
struct MemberCall {
    operation: Operation,
    resend: Resend,
    deadline: Instant,
}

/// The members that failed during one store call, in the order of their last attempts, with the error kinds.
#[derive(Default)]
struct FailedMembers(Vec<(String, String)>);

impl FailedMembers {
    fn note(&mut self, url: &str, error: &Error) {
        self.0.retain(|(known, _)| known != url);
        self.0.push((url.to_owned(), error.kind().to_string()));
    }

    /// Adds the failures of the other members to the error of the member that was tried last.
    fn reported_with(&self, error: Error) -> Error {
        let Some((_, others)) = self.0.split_last().filter(|(_, others)| !others.is_empty()) else { return error };
        let others: Vec<_> = others.iter().map(|(url, why)| format!("{url} ({why})")).collect();
        let others = format!("before it {} failed", others.join(", "));
        let detail = error.detail().map_or(others.clone(), |detail| format!("{detail}; {others}"));
        error.with_detail(detail)
    }
}

/// The deadlines for one attempt to get an answer from one member.
#[derive(Clone, Copy)]
struct MemberDeadlines {
    /// Deadline for connecting to the member and logging in.
    connect: Instant,
    /// Deadline for the member's answer.
    answer: Instant,
}

impl EtcdCluster {
    /// Creates the client of a cluster without sending a request.
    ///
    /// # Errors
    /// An error about the first invalid option.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            members: Members::new(options)?,
            seen: ObservedCluster::default(),
            call_timeout: options.call_timeout,
            end: options.end.map(Instant::from_std),
            watch_patience: options.watch_patience,
            closed: watch::Sender::new(false),
        })
    }

    /// Fails if the store is closed.
    ///
    /// # Errors
    /// `Closed`.
    fn check_open(&self, operation: Operation) -> Result<()> {
        if *self.closed.borrow() { Err(Error::new(ErrorKind::Closed, operation, STORE_NAME)) } else { Ok(()) }
    }

    /// Returns the URLs of the cluster's members, which are looked up in DNS if no members are known.
    ///
    /// # Errors
    /// Any error of looking up the members in DNS.
    pub(crate) async fn endpoints(&self, operation: Operation, deadline: Instant) -> Result<Vec<String>> {
        let members = self.members.current(operation, deadline).await?;
        Ok((0..members.count()).filter_map(|place| Some(members.get(place)?.address.url.clone())).collect())
    }

    /// Returns the deadline of a store call that begins now.
    pub(crate) fn deadline(&self) -> Instant {
        let now = Instant::now();
        let usual = now + self.call_timeout;
        self.end.map_or(usual, |end| usual.min(now + end.saturating_duration_since(now) * 2 / 3))
    }

    /// Sends a request to one member after another until a member answers, the deadline passes, or the request must not
    /// be sent again.
    pub(crate) async fn call<T, F>(
        &self,
        operation: Operation,
        resend: Resend,
        deadline: Instant,
        work: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<T>
    where
        T: EtcdResponse + Send,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        self.check_open(operation)?;
        let before = self.seen.revision();
        let mut tried = FailedMembers::default();
        let mut round = 1;
        loop {
            let members = self.members.current(operation, deadline).await?;
            let asked = MemberCall { operation, resend, deadline };
            let (failure, last) = match self.try_members(&members, asked, &mut tried, &work).await {
                Ok((answer, endpoint)) => return self.judge(answer, before, operation, &endpoint.address.url),
                Err(failed) => failed,
            };
            if last == LastOf::OfCall || round == MAX_ROUNDS || Instant::now() >= deadline {
                return Err(tried.reported_with(failure.error));
            }
            round += 1;
            tokio::time::sleep_until(deadline.min(Instant::now() + ROUND_INTERVAL)).await;
        }
    }

    /// Returns the quota of each member in bytes, as its metrics report it.
    ///
    /// # Errors
    /// `Closed` if the store is closed, or any error of looking up the members.
    pub(crate) async fn quotas(&self, operation: Operation, deadline: Instant) -> Result<Vec<Option<u64>>> {
        self.check_open(operation)?;
        let members = self.members.current(operation, deadline).await?;
        let endpoints = (0..members.count()).filter_map(|place| members.get(place));
        Ok(futures::future::join_all(endpoints.map(|endpoint| endpoint.quota())).await)
    }

    /// Sends a request to every member at the same time, and returns each member with its answer. If the preferred
    /// member does not answer, a member that has answered becomes the preferred one, so that the next call does not wait
    /// for the silent member.
    ///
    /// # Errors
    /// `Closed` if the store is closed, or any error of looking up the members.
    pub(crate) async fn call_each<T, F>(
        &self,
        operation: Operation,
        deadline: Instant,
        work: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<Vec<(Arc<Endpoint>, Result<T>)>>
    where
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        self.check_open(operation)?;
        let members = self.members.current(operation, deadline).await?;
        let limits = MemberDeadlines { connect: deadline, answer: deadline };
        let endpoints = (0..members.count()).filter_map(|place| members.get(place));
        let asked = endpoints.map(async |endpoint| {
            let answer = attempt(endpoint, operation, limits, &work).await;
            (endpoint.clone(), answer.map_err(|failure| failure.error))
        });
        let answers = futures::future::join_all(asked).await;
        let has_answered = |place: &usize| answers.get(*place).is_some_and(|(_, answer)| answer.is_ok());
        if !has_answered(&members.first())
            && let Some(place) = (0..members.count()).find(has_answered)
        {
            members.prefer(place);
        }
        Ok(answers)
    }

    /// Sends a request to each member at most once, until a member answers. If no member answers, the error comes with
    /// a `LastOf`, which says whether the caller may send the request to all members again.
    async fn try_members<T, F>(
        &self,
        members: &MemberList,
        asked: MemberCall,
        tried: &mut FailedMembers,
        work: &(impl Fn(Connection) -> F + Send + Sync),
    ) -> Result<(T, Arc<Endpoint>), (MemberFailure, LastOf)>
    where
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        let MemberCall { operation, resend, deadline } = asked;
        let (first, count) = (members.first(), members.count());
        let mut failure =
            MemberFailure { error: Error::new(ErrorKind::NotSent, operation, STORE_NAME), never_sent: true };
        for step in 0..count {
            let Some(endpoint) = members.get(first + step) else { break };
            // Divide the time until the deadline equally among this member and the members that are tried after it.
            let share = share(deadline, count - step);
            let limits = match resend {
                Resend::Always => MemberDeadlines { connect: share, answer: share },
                Resend::IfNeverSent => MemberDeadlines { connect: share, answer: deadline },
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
            if !may_try_next(&failure, resend) || Instant::now() >= deadline {
                return Err((failure, LastOf::OfCall));
            }
            tracing::debug!(endpoint = endpoint.address.url, error = %failure.error, "an etcd member failed; trying the next member");
        }
        Err((failure, LastOf::OfRound))
    }

    fn judge<T: EtcdResponse>(&self, answer: T, before: Revision, operation: Operation, url: &str) -> Result<T> {
        let store = format!("{STORE_NAME} {url}");
        // Even if a member's answer is unusable, the member may have executed the request.
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

fn may_try_next(failure: &MemberFailure, resend: Resend) -> bool {
    failure.error.kind().is_transient() && (failure.never_sent || resend == Resend::Always)
}

fn with_hint(error: Error, hint: Option<Cow<'static, str>>) -> Error {
    match hint {
        Some(hint) => error.with_detail(hint),
        None => error,
    }
}

/// Sends the request to one member, and renews the login token and sends the request again if the member rejects the
/// token. Sending the request again is safe, because a server that rejects a token has not executed the request.
async fn attempt<T, F>(
    endpoint: &Endpoint,
    operation: Operation,
    limits: MemberDeadlines,
    work: &(impl Fn(Connection) -> F + Send + Sync),
) -> Result<T, MemberFailure>
where
    F: Future<Output = Result<T, etcd_client::Error>> + Send,
{
    let store = format!("{STORE_NAME} {}", endpoint.address.url);
    let timeout = || with_hint(Error::new(ErrorKind::Timeout, operation, store.clone()), endpoint.silence());
    let reported = |error: etcd_client::Error| {
        let hint = match endpoint.identity_fault().filter(|_| refuses_our_certificate(&error)) {
            Some(fault) => Some(fault.into()),
            None if speaks_other_protocol(&error) => endpoint.hint(),
            None if is_silent(&error) => endpoint.port_hint().map(Cow::from).or(advice(&error).map(Cow::from)),
            None => advice(&error).map(Cow::from),
        };
        with_hint(map(error, operation, &store), hint)
    };
    // Until the connection to a member is ready, the client has sent this member nothing except perhaps a login
    // request.
    let never_sent = |error: Error| MemberFailure { error: error.with_outcome(Outcome::NotApplied), never_sent: true };
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
            Err(_) => return Err(MemberFailure { error: timeout(), never_sent: false }),
        };
        let refused = matches!(error.kind(), ErrorKind::Auth(Auth::Unauthenticated | Auth::OldRevision))
            && error.outcome() == Outcome::NotApplied;
        if renewed || !refused || !endpoint.can_renew() {
            let never_sent = *error.kind() == ErrorKind::NotSent;
            return Err(MemberFailure { error, never_sent });
        }
        match timeout_at(limits.answer, Box::pin(endpoint.renew(&connection, renewals))).await {
            Ok(Ok(())) => renewed = true,
            Ok(Err(error)) => return Err(never_sent(reported(error))),
            Err(_) => return Err(never_sent(timeout())),
        }
    }
}

/// The id of the cluster, from the first answer, and the newest revision in any answer.
#[derive(Debug, Default)]
pub(crate) struct ObservedCluster {
    cluster: AtomicU64,
    revision: AtomicI64,
}

/// The consistency that a request needs: linearizable, or possibly stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// The answer must be at least as new as every answer that arrived before the call began.
    SinceCall,
    /// The answer may be older than earlier answers, because the member that sends it may lag behind. Status requests
    /// and new watches go to one given member, so they need only `OfMember`.
    OfMember,
}

impl ObservedCluster {
    /// The id of the etcd cluster; `None` before the first answer.
    pub(crate) fn cluster(&self) -> Option<u64> {
        Some(self.cluster.load(Ordering::SeqCst)).filter(|cluster| *cluster != 0)
    }

    /// The newest revision that any answer has shown so far.
    pub(crate) fn revision(&self) -> Revision {
        Revision::new(self.revision.load(Ordering::SeqCst))
    }

    pub(crate) fn note(&self, revision: Revision) {
        self.revision.fetch_max(revision.get(), Ordering::SeqCst);
    }

    /// Checks the header of an answer and records its cluster id and revision; `before` is the newest revision that was
    /// known when the call began.
    ///
    /// # Errors
    /// The error is a description of what is wrong with the answer.
    fn judge(&self, header: &ResponseHeader, before: Revision, freshness: Freshness) -> Result<(), String> {
        self.judge_numbers(header.cluster_id(), Revision::new(header.revision()), before, freshness)
    }

    fn judge_numbers(
        &self,
        cluster: u64,
        revision: Revision,
        before: Revision,
        freshness: Freshness,
    ) -> Result<(), String> {
        let known = self.cluster.compare_exchange(0, cluster, Ordering::SeqCst, Ordering::SeqCst);
        match known {
            Err(known) if known != cluster => {
                return Err(format!("cluster {cluster:x} answers where cluster {known:x} did before"));
            }
            _ => {}
        }
        if freshness == Freshness::SinceCall {
            if revision < before {
                return Err(format!("revision {revision} after revision {before} had been seen"));
            }
            self.note(revision);
        }
        Ok(())
    }
}

/// The oldest etcd version with all features that `backend-etcd` uses.
const MIN_VERSION: [u32; 2] = [3, 4];

/// For each minor version of etcd, the first patch version that keeps a deletion in the history if the deletion is at
/// the compaction revision. On older etcd versions, a watch can miss a deletion at the compaction revision.
const MIN_SOUND_VERSIONS: [[u32; 3]; 2] = [[3, 4, 36], [3, 5, 18]];

/// For each minor version of etcd, the first patch version whose progress reports never arrive before an event that
/// they cover. To trust etcd's progress reports, Kubernetes requires these patch versions, too.
const MIN_HONEST_VERSIONS: [[u32; 3]; 2] = [[3, 4, 31], [3, 5, 13]];

/// Returns true if an etcd server with this version sends correct progress reports.
pub(crate) fn reports_progress(version: &str) -> bool {
    let Some(numbers) = version_numbers(version) else { return false };
    let honest = MIN_HONEST_VERSIONS.iter().find(|honest| numbers[..2] == honest[..2]);
    honest.map_or(numbers[..2] > MIN_HONEST_VERSIONS[1][..2], |honest| numbers >= *honest)
}

/// Parses the major, minor and patch numbers of a version such as `3.5.21` or `3.6.0-rc.1`.
fn version_numbers(version: &str) -> Option<[u32; 3]> {
    let numbers: Vec<u32> = version.split(['.', '-', '+']).map_while(|number| number.parse().ok()).collect();
    numbers.first_chunk().copied()
}

/// Checks that an etcd server's version, for example `3.5.21`, is supported.
///
/// # Errors
/// The error `Unsupported` if the server is too old or not etcd v3.
pub(crate) fn judge_version(version: &str) -> Result<()> {
    let Some([major, minor, patch]) = version_numbers(version) else {
        return Err(refused(format!("the server says that its version is {version:?}: this is no etcd v3")));
    };
    if [major, minor] < MIN_VERSION {
        return Err(refused(format!("the server is etcd {version}: upgrade it, 3.4 or newer is needed")));
    }
    if MIN_SOUND_VERSIONS.iter().any(|sound| [major, minor] == sound[..2] && [major, minor, patch] < *sound) {
        tracing::debug!(
            version,
            "this etcd version has a bug by which a watch can miss a deletion; upgrade etcd to 3.4.36, 3.5.18 or newer"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_judgement_notices_older_revisions_and_other_clusters() {
        let seen = ObservedCluster::default();
        assert_eq!(seen.cluster(), None);
        let judge = |cluster, revision, freshness| {
            seen.judge_numbers(cluster, Revision::new(revision), seen.revision(), freshness)
        };
        assert_eq!(judge(7, 5, Freshness::SinceCall), Ok(()));
        assert_eq!(judge(7, 5, Freshness::SinceCall), Ok(()));
        assert!(judge(7, 4, Freshness::SinceCall).unwrap_err().contains("revision 4"));
        assert_eq!(judge(7, 4, Freshness::OfMember), Ok(()));
        assert!(judge(8, 9, Freshness::SinceCall).unwrap_err().contains("cluster 8"));
        assert!(judge(8, 9, Freshness::OfMember).is_err());
        assert_eq!(seen.cluster(), Some(7));
        seen.note(Revision::new(9));
        assert!(judge(7, 8, Freshness::SinceCall).is_err());
    }

    #[test]
    fn cluster_judgement_takes_any_order_when_calls_overlap() {
        let seen = ObservedCluster::default();
        let early = seen.revision();
        assert_eq!(seen.judge_numbers(7, Revision::new(10), early, Freshness::SinceCall), Ok(()));
        assert_eq!(seen.judge_numbers(7, Revision::new(9), early, Freshness::SinceCall), Ok(()));
        assert_eq!(seen.revision(), Revision::new(10));
    }

    #[test]
    fn server_version_reports_progress_when_fixed() {
        for version in ["3.4.31", "3.4.36", "3.5.13", "3.5.21", "3.6.0", "3.6.0-rc.1", "4.0.0"] {
            assert!(reports_progress(version), "{version}");
        }
        for version in ["3.4.23", "3.4.30", "3.5.0", "3.5.12", "3.3.99", "", "nginx"] {
            assert!(!reports_progress(version), "{version}");
        }
    }

    #[test]
    fn server_version_is_refused_when_too_old() {
        for version in ["3.4.0", "3.4.23", "3.5.18", "3.6.0-rc.1", "3.10.2", "4.0.0"] {
            assert!(judge_version(version).is_ok(), "{version}");
        }
        for version in ["3.3.27", "2.3.8", "3.2.0+git"] {
            assert!(judge_version(version).unwrap_err().to_string().contains("3.4 or newer"), "{version}");
        }
        for version in ["", "nginx", "3.4"] {
            assert!(judge_version(version).unwrap_err().to_string().contains("no etcd v3"), "{version}");
        }
    }
}
