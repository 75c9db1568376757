//! Implements the etcd driver of Margay's programs, and reports the status of a cluster to operators.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use driver::{
    Access, ClusterAddress, ClusterDescription, ClusterProblemKind, ClusterStore, ConfigError, DEFAULT_QUOTA_BYTES,
    Driver, DriverFacts, MAX_QUOTA_PERCENT_IN_USE, MemberReport, MemberRole, Opened, Scope, Settings, StorePlace,
};
use etcd_client::{ResponseHeader, StatusResponse};
use kv::{Error, ErrorKind, Operation, Result, Revision, Store};
use kv_local::OpenOptions;
use kv_mvcc::Blocking;

use crate::cluster::Resend;
use crate::error::{CORRUPT_ADVICE, NO_SPACE_ADVICE, STORE_NAME};
use crate::members::Connection;
use crate::problems::describe_problem;
use crate::{Credentials, Discovery, EtcdStore, Options, Pem, Tls};

/// The value of `datastore_type` that means etcd in Calico's configuration.
const DATASTORE_TYPE: &str = "etcdv3";

/// The number of large transactions that the driver sends to etcd concurrently; more would not be faster.
const WRITES_IN_FLIGHT: usize = 32;

/// The driver for stores on an etcd cluster (`etcd://` addresses).
pub static DRIVER: EtcdDriver = EtcdDriver;

/// The type of the etcd driver, whose only value is [`DRIVER`].
#[derive(Clone, Copy, Debug)]
pub struct EtcdDriver;

#[async_trait]
impl Driver for EtcdDriver {
    fn facts(&self) -> DriverFacts {
        DriverFacts::new(STORE_NAME, Scope::Cluster)
            .with_datastore_type(DATASTORE_TYPE)
            .with_writes_in_flight(WRITES_IN_FLIGHT)
    }

    fn url_form(&self) -> Option<String> {
        Some("etcd://host:port and, with TLS, etcd+https://host:port".to_owned())
    }

    fn place_of_url(&self, scheme: &str, rest: &str) -> Result<StorePlace, ConfigError> {
        ClusterAddress::of_url(STORE_NAME, scheme, rest).map(StorePlace::Cluster)
    }

    fn place_of_settings(&self, settings: &Settings) -> Result<StorePlace, ConfigError> {
        ClusterAddress::of_settings(settings).map(StorePlace::Cluster)
    }

    fn url(&self, place: &StorePlace) -> String {
        match place {
            StorePlace::Cluster(address) => address.url(STORE_NAME),
            _ => format!("no cluster of {STORE_NAME}"),
        }
    }

    async fn open(&self, place: &StorePlace, options: &OpenOptions) -> Result<Box<dyn Opened>> {
        let StorePlace::Cluster(address) = place else {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Open, STORE_NAME));
        };
        match options.blocking {
            Blocking::InPlace => Ok(Box::new(connect(address, Some(Instant::now() + options.wait))?)),
            Blocking::OnThreads => {
                let address = address.clone();
                // Opening the store reads certificate files, which blocks the thread.
                let opening = tokio::task::spawn_blocking(move || connect(&address, None));
                let store = opening.await.unwrap_or_else(|panic| {
                    Err(Error::new(ErrorKind::Io, Operation::Open, STORE_NAME).with_source(panic))
                })?;
                store.check().await?;
                Ok(Box::new(store))
            }
        }
    }
}

#[async_trait]
impl Opened for EtcdStore {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn cluster(&self) -> Option<Arc<dyn ClusterStore>> {
        Some(Arc::new(self.clone()))
    }

    async fn check_room(&self) -> Result<()> {
        self.check_alarms().await
    }

    async fn close(&self) -> Result<()> {
        Self::close(self);
        Ok(())
    }
}

/// Creates a store on the etcd cluster at `address` without sending a request; reads certificate files, which blocks.
/// If `end` is set, all calls of the created store share this deadline.
///
/// # Errors
/// An error about the first invalid endpoint, certificate or key.
fn connect(address: &ClusterAddress, end: Option<Instant>) -> Result<EtcdStore> {
    let options = options(address);
    EtcdStore::open(&match end {
        Some(end) => options.with_end(end),
        None => options,
    })
}

fn options(address: &ClusterAddress) -> Options {
    let mut options = Options::new(address.endpoints.iter().cloned());
    if !address.discovery_srv.is_empty() {
        options = options.with_discovery(Discovery::new(&address.discovery_srv));
    }
    if address.access.names_certificates() {
        if address.all_without_tls() {
            tracing::warn!(
                store = %address.url(STORE_NAME),
                "every etcd URL begins with http:// or unix:, so the connections are not encrypted; ignoring the \
                 configured certificates"
            );
        } else {
            options = options.with_tls(tls(&address.access));
        }
    }
    match &address.access.login {
        Some(login) => options.with_credentials(Credentials::new(&login.user, &login.password)),
        None => options,
    }
}

fn tls(access: &Access) -> Tls {
    let tls = match &access.authority {
        Some(authority) => Tls::new().with_authority(pem(authority)),
        None => Tls::new(),
    };
    match &access.identity {
        Some(identity) => tls.with_identity(pem(&identity.certificate), pem(&identity.key)),
        None => tls,
    }
}

fn pem(pem: &driver::Pem) -> Pem {
    match pem {
        driver::Pem::File(path) => Pem::File(path.clone()),
        driver::Pem::Inline(text) => Pem::Inline(text.clone().into_bytes()),
    }
}

impl EtcdStore {
    /// Returns an error while the cluster has raised an alarm, because etcd then refuses writes. The alarm check sends
    /// one small request, which the member answers without contacting other members.
    ///
    /// # Errors
    /// `NoSpace` or `Corrupt` if the cluster has an alarm (the detail names the commands that clear it), or any error
    /// of the status request.
    pub async fn check_alarms(&self) -> Result<()> {
        let work = |connection: Connection| async move { connection.client().status().await };
        let deadline = self.cluster.deadline();
        let asked = self.cluster.call(Operation::Open, Resend::Always, deadline, work).await;
        let answer = match asked {
            Ok(answer) => answer,
            // Some etcd proxies do not support the status request, and the user may lack the permission for it.
            Err(error) if matches!(error.kind(), ErrorKind::Auth(_) | ErrorKind::Unsupported) => return Ok(()),
            Err(error) => return Err(error),
        };
        let is_raised = |alarm| answer.errors().iter().any(|reported| describe_problem(reported).kind == alarm);
        let (kind, advice) = if is_raised(ClusterProblemKind::NoSpace) {
            (ErrorKind::NoSpace, NO_SPACE_ADVICE)
        } else if is_raised(ClusterProblemKind::Corrupt) {
            (ErrorKind::Corrupt, CORRUPT_ADVICE)
        } else {
            self.warn_when_filled(&answer, deadline).await;
            return Ok(());
        };
        let endpoints = self.cluster.endpoints(Operation::Open, deadline).await?.join(",");
        Err(Error::new(kind, Operation::Open, format!("{STORE_NAME} {endpoints}")).with_detail(advice))
    }
}

/// Time limit of the answer of one member when all members are asked. It is shorter than the time limit of a store call,
/// because a member that hangs is itself a result.
const MEMBER_STATUS_TIMEOUT: Duration = Duration::from_secs(3);

impl EtcdStore {
    /// Logs a warning if much of the quota is in use. etcd before 3.6 reports no quota in its status. The quota is then
    /// read from the members' metrics (some 100 KB each), but only if the database already uses much of the default
    /// quota.
    async fn warn_when_filled(&self, answer: &StatusResponse, deadline: tokio::time::Instant) {
        let about = describe(answer, Vec::new());
        let percent = |quota: u64| about.db_bytes_in_use.saturating_mul(100) / quota.max(1);
        let quota = match about.db_quota_bytes {
            Some(quota) => quota,
            None if percent(DEFAULT_QUOTA_BYTES) <= MAX_QUOTA_PERCENT_IN_USE => return,
            None => {
                let quotas = self.cluster.quotas(Operation::Open, deadline).await.unwrap_or_default();
                quotas.into_iter().flatten().min().unwrap_or(DEFAULT_QUOTA_BYTES)
            }
        };
        if percent(quota) > MAX_QUOTA_PERCENT_IN_USE {
            tracing::warn!(
                in_use = about.db_bytes_in_use,
                quota,
                "more than {MAX_QUOTA_PERCENT_IN_USE} % of etcd's quota is in use; etcd refuses changes at 100 %: see margay etcd status"
            );
        }
    }
}

#[async_trait]
impl ClusterStore for EtcdStore {
    fn cluster_id(&self) -> Option<u64> {
        self.cluster.seen.cluster()
    }

    /// Requests the status of the cluster from the preferred member.
    async fn about(&self) -> Result<ClusterDescription> {
        let deadline = self.cluster.deadline();
        let work = |connection: Connection| async move { connection.client().status().await };
        let answer = self.cluster.call(Operation::Range, Resend::Always, deadline, work).await?;
        Ok(describe(&answer, self.cluster.endpoints(Operation::Range, deadline).await?))
    }

    async fn members(&self) -> Result<Vec<MemberReport>> {
        let work = |connection: Connection| async move { connection.client().status().await };
        let deadline = self.cluster.deadline().min(tokio::time::Instant::now() + MEMBER_STATUS_TIMEOUT);
        let answers = self.cluster.call_each(Operation::Range, deadline, work).await?;
        let endpoints: Vec<String> = answers.iter().map(|(member, _)| member.address.url.clone()).collect();
        let reports = answers.into_iter().map(async |(member, answer)| {
            let mut description = answer.map(|answer| describe(&answer, endpoints.clone()));
            // A member that has not answered the status request would not send its metrics, either.
            if let Ok(about) = &mut description
                && about.db_quota_bytes.is_none()
            {
                about.db_quota_bytes = member.quota().await;
            }
            MemberReport { endpoint: member.address.url.clone(), description }
        });
        Ok(futures::future::join_all(reports).await)
    }
}

/// Converts a member's answer to a status request into a description of the member and the cluster.
fn describe(answer: &StatusResponse, endpoints: Vec<String>) -> ClusterDescription {
    let bytes = |number: i64| u64::try_from(number).unwrap_or_default();
    let header = answer.header();
    let role = match answer.leader() {
        _ if answer.is_learner() => MemberRole::Learner,
        0 => MemberRole::Leaderless,
        leader if header.is_some_and(|header| header.member_id() == leader) => MemberRole::Leader,
        _ => MemberRole::Follower,
    };
    ClusterDescription {
        cluster: header.map_or(0, ResponseHeader::cluster_id),
        endpoints,
        version: answer.version().to_owned(),
        role,
        revision: header.map_or(Revision::UNSET, |header| Revision::new(header.revision())),
        db_bytes: bytes(answer.db_size()),
        db_bytes_in_use: bytes(answer.raft_used_db_size()),
        db_quota_bytes: Some(bytes(answer.db_size_quota())).filter(|quota| *quota > 0),
        problems: answer.errors().iter().map(|reported| describe_problem(reported)).collect(),
    }
}
