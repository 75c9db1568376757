//! The verbs as requests to the daemon, and its answers.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use datastore::Location;
use ipam_core::assign::{AssignRequest, Assigned};
use ipam_core::{CheckResult, Ipam, QuotaReached};
use kv::Deadline;
use serde::{Deserialize, Serialize};

use crate::allocator::failure::{Failure, explain};
use crate::error::CniError;
use crate::request::{Checked, Collected, Quarantine};
use crate::verbs::{self, Check, Del, Gc};

/// A request, and the time for which it is of use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Asked {
    /// After that time no work is begun for it.
    pub within: Duration,
    /// The file that Calico's plugins on this host lock while they work on a cluster.
    pub lock_file: PathBuf,
    /// The request.
    pub call: Call,
}

/// A verb.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Call {
    /// ADD. Pods of virtual machines are no case for the daemon.
    Add(Box<AssignRequest>),
    /// DEL.
    Del(Del),
    /// CHECK.
    Check(Check),
    /// STATUS, with the ADD that it checks.
    Status(Box<AssignRequest>),
    /// GC.
    Gc(Gc),
    /// A step of an ADD with a probe.
    Quarantine(Quarantine),
}

/// The outcome of a verb.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// ADD is done.
    Assigned(Vec<Assigned>),
    /// DEL is done, or a device's addresses are in quarantine.
    Released(Vec<IpAddr>),
    /// CHECK is done.
    Compared(CheckResult),
    /// CHECK could not compare, for this reason.
    Unknown(String),
    /// An ADD can be served.
    Ready,
    /// GC is done.
    Collected(Collected),
    /// A pool is chosen by the labels of the namespace. The plugin looks them up and sends the request again.
    NamespaceWanted,
    /// The daemon cannot do it, for this reason. The plugin does it by itself.
    ByYourself(String),
    /// The verb fails.
    Refused(CniError),
}

impl From<Failure> for Answer {
    /// After an error of the store the plugin tries by itself: it knows which errors count as success, and on an
    /// embedded store a DEL has room on a full disk.
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Store(error) => Self::ByYourself(error.to_string()),
            Failure::NamespaceWanted => Self::NamespaceWanted,
            Failure::Cni(error) => Self::Refused(error),
        }
    }
}

impl Answer {
    /// The outcome of an ADD. The daemon does not scan the machine: an ADD that finds no room is the plugin's, which
    /// may release the leftovers of earlier boots.
    pub fn of_assignment(request: &AssignRequest, assigned: ipam_core::Result<Vec<Assigned>>) -> Self {
        match assigned {
            Ok(assigned) => Self::Assigned(assigned),
            Err(error @ ipam_core::Error::Quota(QuotaReached { over_leftovers: false, .. })) => {
                explain(error, verbs::rules(request)).into()
            }
            Err(error) if error.is_exhaustion() => Self::ByYourself(error.to_string()),
            Err(error) => explain(error, verbs::rules(request)).into(),
        }
    }
}

impl Call {
    /// The name of the verb, as CNI spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Add(_) => "ADD",
            Self::Del(_) => "DEL",
            Self::Check(_) => "CHECK",
            Self::Status(_) => "STATUS",
            Self::Gc(_) => "GC",
            Self::Quarantine(_) => "QUARANTINE",
        }
    }

    /// Carries out a verb on the open store at a location.
    pub async fn carry_out(&self, ipam: &Ipam, location: &Location, deadline: Deadline) -> Answer {
        let done = match self {
            Self::Add(request) => return Answer::of_assignment(request, ipam.assign(request, deadline).await),
            Self::Del(del) => verbs::release(ipam, del, deadline).await.map(Answer::Released),
            Self::Check(check) => verbs::compare(ipam, check, deadline).await.map(|checked| match checked {
                Checked::Compared(comparison) => Answer::Compared(comparison),
                Checked::Unknown(why) => Answer::Unknown(why),
            }),
            Self::Status(request) => {
                verbs::would_assign(ipam, location, request, deadline).await.map(|()| Answer::Ready)
            }
            Self::Gc(gc) => verbs::collect(ipam, gc, deadline).await.map(Answer::Collected),
            Self::Quarantine(what) => verbs::quarantine(ipam, what, deadline).await.map(Answer::Released),
        };
        done.unwrap_or_else(Answer::from)
    }
}
