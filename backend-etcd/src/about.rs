//! A cluster's report about itself, for operators.

use kv::{Operation, Result, Revision};

use crate::EtcdStore;
use crate::cluster::Resend;
use crate::endpoint::Connection;

/// A cluster as one of its members describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct About {
    /// The cluster's id.
    pub cluster: u64,
    /// The endpoints through which it can be reached, those of SRV records included.
    pub endpoints: Vec<String>,
    /// The version of etcd that the member runs.
    pub version: String,
    /// The newest revision that the member has.
    pub revision: Revision,
    /// The bytes of the member's database file.
    pub db_bytes: u64,
    /// How many of them are in use.
    pub db_bytes_in_use: u64,
    /// The bytes at which the member refuses writes; `None` from an etcd before 3.6, which does not say.
    pub db_quota_bytes: Option<u64>,
    /// The member's complaints, such as an alarm that is raised.
    pub problems: Vec<String>,
}

impl EtcdStore {
    /// The cluster's id; `None` before the first answer. Nothing is sent.
    pub fn cluster_id(&self) -> Option<u64> {
        self.cluster.seen.cluster()
    }

    /// The report of the member that is queried first, about itself and its cluster; one small request.
    ///
    /// # Errors
    /// Those of any call.
    pub async fn about(&self) -> Result<About> {
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
