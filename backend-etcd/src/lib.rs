#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! A key-value store on etcd v3. The etcd store passes most requests and answers on unchanged.
//!
//! The crate `backend-etcd` adds failover, deadlines, checks of every answer, and resuming watches to etcd's client
//! library.
//!
//! - Each etcd member has its own connection; if a member fails, the request is sent to the next member.
//! - Each store call has one deadline for all of its attempts to get an answer.
//! - A write is sent again only if no earlier attempt was sent to a member.
//! - An answer from another cluster, or with a lower revision than an earlier answer, is reported as an error.
//! - A watch that has lost its connection resumes without gaps and without repeated events.
//! - A transaction that contains only compares is linearizable, like a read.
//!
//! The private module `error` defines what each failure means. If a key has a lease, a put of this key without a lease
//! is refused (see the private module `txn`).

mod address;
mod cluster;
mod discovery;
mod driver;
mod error;
mod members;
mod options;
mod problems;
mod quota;
mod tls;
mod txn;
mod watch;
mod wire;

use std::sync::Arc;

use async_trait::async_trait;
use kv::{
    Error, ErrorKind, InvalidArgument, Key, MAX_TXN_OPS, Operation, Outcome, RangeRequest, RangeResponse, Result,
    Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream,
};
use tokio::time::Instant;

use crate::cluster::{EtcdCluster, Resend};
use crate::error::STORE_NAME;
use crate::members::Connection;
use crate::txn::{PlanAnswer as Read, TxnPlan};

pub use self::driver::{DRIVER, EtcdDriver};
pub use options::{Credentials, Discovery, Options};
pub use tls::{Pem, Tls};

/// A store on an etcd cluster. An `EtcdStore` is cheap to clone; clones share their connections, and closing one of
/// them closes all.
#[derive(Clone, Debug)]
pub struct EtcdStore {
    cluster: Arc<EtcdCluster>,
}

impl EtcdStore {
    /// Creates a store on the etcd cluster that `options` describes. `open` reads certificate files, but sends no
    /// request: only the first store call shows whether the cluster answers and accepts the login. The calls of an
    /// `EtcdStore` need a tokio runtime with time and IO.
    ///
    /// # Errors
    /// `Unsupported` if an endpoint or a TLS setting is invalid; `Io` if a file cannot be read.
    pub fn open(options: &Options) -> Result<Self> {
        Ok(Self { cluster: Arc::new(EtcdCluster::new(options)?) })
    }

    /// Checks with one small request that the cluster answers, accepts the login, and has a supported version of etcd.
    ///
    /// # Errors
    /// The error `Unsupported` if the server is older than etcd 3.4 or is not etcd, or any other error of a request.
    pub async fn check(&self) -> Result<()> {
        let work = |connection: Connection| async move { connection.client().status().await };
        let answer = self.cluster.call(Operation::Open, Resend::Always, self.cluster.deadline(), work).await?;
        cluster::judge_version(answer.version())
    }

    /// Closes the store and its clones: later store calls fail with `Closed`, and open watches end with `Closed`. Store
    /// calls that are in flight when the store is closed may still finish.
    pub fn close(&self) {
        self.cluster.closed.send_replace(true);
    }

    /// Fails if any of the given keys has a lease.
    async fn refuse_leases(&self, keys: &[Key], deadline: Instant) -> Result<()> {
        for keys in keys.chunks(MAX_TXN_OPS) {
            let plan = TxnPlan::reading_keys(keys);
            let answer = self.send(&plan, Resend::Always, deadline).await.map_err(not_applied)?;
            if let Read::Leased(key) = plan.read(&answer, revision_of(answer.header())) {
                return Err(leased(&key));
            }
        }
        Ok(())
    }

    async fn send(&self, plan: &TxnPlan, resend: Resend, deadline: Instant) -> Result<etcd_client::TxnResponse> {
        let work = |connection: Connection| {
            let txn = plan.wire.clone();
            async move { connection.kv().txn(txn).await }
        };
        self.cluster.call(Operation::Txn, resend, deadline, work).await
    }
}

#[async_trait]
impl Store for EtcdStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        request.check(STORE_NAME)?;
        let (key, options) = wire::get_options(&request);
        let work = |connection: Connection| {
            let (key, options) = (key.clone(), options.clone());
            async move { connection.kv().get(key, Some(options)).await }
        };
        let deadline = self.cluster.deadline();
        let answer = self.cluster.call(Operation::Range, Resend::Always, deadline, work).await;
        let answer = answer.map_err(|error| txn::with_refused(error, "read", &request.range))?;
        let revision = revision_of(answer.header());
        Ok(wire::range_response(answer, revision))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        txn.check(STORE_NAME)?;
        let plan = TxnPlan::new(&txn);
        let deadline = self.cluster.deadline();
        self.refuse_leases(&plan.read_first, deadline).await?;
        let sent = if txn.is_read_only() {
            self.send(&plan, Resend::Always, deadline).await.map_err(not_applied)
        } else {
            self.send(&plan, Resend::IfNeverSent, deadline).await.map_err(|error| with_sizes(error, &txn))
        };
        let answer = match sent {
            Ok(answer) => answer,
            Err(error) => return Err(Box::pin(self.with_refused_key(error, &txn, deadline)).await),
        };
        match plan.read(&answer, revision_of(answer.header())) {
            Read::Answer(answer) => Ok(answer),
            Read::Leased(key) => Err(leased(&key)),
            Read::Nonsense => Err(Error::new(ErrorKind::Undecodable, Operation::Txn, STORE_NAME)),
        }
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        request.check(STORE_NAME)?;
        let span = wire::KeySpan::of(&request.range);
        if span.is_empty() {
            return Err(Error::new(InvalidArgument::EmptyWatchRange.into(), Operation::Watch, STORE_NAME));
        }
        watch::open(self.cluster.clone(), span, &request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        revision.check(STORE_NAME)?;
        let work = |connection: Connection| async move { connection.kv().compact(revision.get(), None).await };
        let deadline = self.cluster.deadline();
        self.cluster.call(Operation::Compact, Resend::IfNeverSent, deadline, work).await.map(|_| ())
    }
}

fn revision_of(header: Option<&etcd_client::ResponseHeader>) -> Revision {
    header.map_or(Revision::UNSET, |header| Revision::new(header.revision()))
}

/// Marks the failed write as "not applied", because only reads were sent before the failure.
fn not_applied(error: Error) -> Error {
    error.with_outcome(Outcome::NotApplied)
}

fn leased(key: &Key) -> Error {
    Error::new(ErrorKind::Unsupported, Operation::Txn, STORE_NAME)
        .with_detail(format!("key {key} has a lease, which a write would take away; nothing was written"))
}

/// Adds the size of the transaction, or its number of operations, to a store error about a limit. A server whose limits
/// are lower than etcd's defaults refuses a transaction with an error that contains neither the size nor the number of
/// operations.
fn with_sizes(error: Error, txn: &Txn) -> Error {
    let kind = match error.kind() {
        ErrorKind::TooLarge { bytes: 0 } => ErrorKind::TooLarge { bytes: txn.size() },
        ErrorKind::InvalidArgument(InvalidArgument::TooManyOps { count: 0 }) => {
            let count = txn.compares.len().max(txn.success.len()).max(txn.failure.len());
            InvalidArgument::TooManyOps { count }.into()
        }
        _ => return error,
    };
    Error::new(kind, error.operation(), error.store().to_owned())
        .with_detail("the server's own limits are lower than etcd's usual ones")
        .with_source(error)
}
