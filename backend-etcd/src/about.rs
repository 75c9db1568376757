//! A cluster's report about itself, for operators.

use async_trait::async_trait;
use driver::{About, ClusterStore};
use kv::{Error, ErrorKind, Operation, Result, Revision};

use crate::EtcdStore;
use crate::cluster::Resend;
use crate::endpoint::Connection;
use crate::error::{CORRUPT, MAKE_ROOM, NAME};

impl EtcdStore {
    /// Fails while an alarm is raised, so that the cluster takes no writes. One small request, which a member answers by itself.
    ///
    /// # Errors
    /// `NoSpace` and `Corrupt`, with the commands that end the alarm; those of any call.
    pub async fn check_alarms(&self) -> Result<()> {
        let work = |connection: Connection| async move { connection.client().status().await };
        let deadline = self.cluster.deadline();
        let asked = self.cluster.call(Operation::Open, Resend::Always, deadline, work).await;
        let answer = match asked {
            Ok(answer) => answer,
            // A proxy or a login that lets nobody see it.
            Err(error) if matches!(error.kind(), ErrorKind::Auth(_) | ErrorKind::Unsupported) => return Ok(()),
            Err(error) => return Err(error),
        };
        let is_raised = |alarm: &str| answer.errors().iter().any(|problem| problem.contains(alarm));
        let (kind, advice) = if is_raised("alarm:NOSPACE") {
            (ErrorKind::NoSpace, MAKE_ROOM)
        } else if is_raised("alarm:CORRUPT") {
            (ErrorKind::Corrupt, CORRUPT)
        } else {
            return Ok(());
        };
        let endpoints = self.cluster.endpoints(Operation::Open, deadline).await?.join(",");
        Err(Error::new(kind, Operation::Open, format!("{NAME} {endpoints}")).with_detail(advice))
    }
}

#[async_trait]
impl ClusterStore for EtcdStore {
    fn cluster_id(&self) -> Option<u64> {
        self.cluster.seen.cluster()
    }

    /// The report of the member that is queried first.
    async fn about(&self) -> Result<About> {
        let deadline = self.cluster.deadline();
        let work = |connection: Connection| async move { connection.client().status().await };
        let answer = self.cluster.call(Operation::Range, Resend::Always, deadline, work).await?;
        let bytes = |number: i64| u64::try_from(number).unwrap_or_default();
        let header = answer.header();
        Ok(About {
            cluster: header.map_or(0, etcd_client::ResponseHeader::cluster_id),
            endpoints: self.cluster.endpoints(Operation::Range, deadline).await?,
            version: answer.version().to_owned(),
            revision: header.map_or(Revision::UNSET, |header| Revision::new(header.revision())),
            db_bytes: bytes(answer.db_size()),
            db_bytes_in_use: bytes(answer.raft_used_db_size()),
            db_quota_bytes: Some(bytes(answer.db_size_quota())).filter(|quota| *quota > 0),
            problems: answer.errors().to_vec(),
        })
    }
}
