//! The release of addresses.

use std::net::IpAddr;
use std::path::PathBuf;

use async_trait::async_trait;
use clap::{ArgGroup, Args};
use ipam_core::Error;
use ipam_core::model::ReleaseRequest;
use ipam_operator::Operator;
use kv::Deadline;
use serde::Serialize;

use crate::answer::Answer;
use crate::command::OnOpenStore;
use crate::error::{Failure, Result};
use crate::store::Need;

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true))]
pub(crate) struct Release {
    /// Release this address
    #[arg(long, value_name = "ADDRESS", group = "what")]
    pub(crate) ip: Option<IpAddr>,

    /// Release all addresses of this handle, as `ipam show --ip` prints it
    #[arg(long, value_name = "HANDLE", group = "what")]
    pub(crate) handle: Option<String>,

    /// Release all addresses of this container, in every network
    #[arg(long, value_name = "ID", group = "what")]
    pub(crate) container: Option<String>,

    /// Release what all these reports of `ipam check` say that nobody uses
    #[arg(long, value_name = "FILE", group = "what", num_args = 1..)]
    pub(crate) from_report: Vec<PathBuf>,

    /// Also if Calico's ClusterInformation has changed since the reports were made
    #[arg(long, requires = "from_report")]
    pub(crate) force: bool,

    /// Only say what would be released
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Serialize)]
struct Done<'a> {
    released: &'a [IpAddr],
}

#[async_trait(?Send)]
impl OnOpenStore for Release {
    fn need(&self) -> Need {
        Need::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        if let Some(ip) = self.ip {
            return by_address(operator, ip, deadline).await;
        }
        if let Some(handle) = &self.handle {
            let released = operator.ipam().release_by_handle(handle, deadline).await;
            return answer(&released.map_err(|error| unknown(error, "handle", handle))?, &format!("handle {handle}"));
        }
        let container = self.container.as_deref().unwrap_or_default();
        let released = operator.ipam().release_by_container(container, deadline).await.map_err(|error| {
            unknown(error, "container", container)
                .hint("what Calico itself assigned is not recorded by container; use --handle NETWORK.CONTAINER there")
        });
        answer(&released?, &format!("container {container}"))
    }
}

async fn by_address(operator: &Operator, ip: IpAddr, deadline: Deadline) -> Result<Answer> {
    let done = operator.ipam().release_ips(&[ReleaseRequest::new(ip)], deadline).await?;
    if done.released.is_empty() {
        return Err(Failure::new(format!("IP address {ip} is not assigned")));
    }
    Answer::new(format!("Successfully released IP address {ip}"), &Done { released: &done.released })
}

fn answer(released: &[IpAddr], whose: &str) -> Result<Answer> {
    let lines: Vec<String> = released.iter().map(|ip| format!("Successfully released IP address {ip}")).collect();
    let answer = Answer::new(lines.join("\n"), &Done { released })?;
    Ok(if released.is_empty() { answer.note(format!("{whose} was on record, but held no address")) } else { answer })
}

fn unknown(error: Error, kind: &str, name: &str) -> Failure {
    match error {
        Error::NotFound { .. } => Failure::new(format!("no IP address is assigned to {kind} {name}")),
        other => other.into(),
    }
}
