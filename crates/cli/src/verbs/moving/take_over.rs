//! Taking over addresses that another plugin has assigned: each is recorded for its container, as if Margay's plugin
//! had assigned it.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use clap::Args;
use ipam_core::assign::{AssignRequest, Bridge, Wanted};
use ipam_core::attachment::{Attachment, NAMESPACE, POD, TIMESTAMP};
use ipam_core::timestamps::go_string;
use ipam_core::{Error, Standing};
use ipam_operator::Operator;
use kv::Deadline;
use serde::Serialize;

use crate::answer::Answer;
use crate::cni::{is_cni_name, is_interface_name};
use crate::command::OnStore;
use crate::error::{Failure, Result};
use crate::output::printable;
use crate::store::{Need, StoreAt};

/// In whose name addresses are taken over.
#[derive(Debug, Args)]
pub(crate) struct Terms {
    /// The network's name, as its configuration has it
    #[arg(long, value_name = "NAME", value_parser = network_name)]
    pub(crate) network: String,

    /// The node's name, if the network's configuration names another than this machine has
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Only say what would be taken over
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Reads a network's name. A runtime calls the plugin with no other, so no DEL could release what is taken over.
fn network_name(text: &str) -> Result<String, String> {
    match is_cni_name(text) {
        true => Ok(text.to_owned()),
        false => {
            Err("a network's name has letters, digits, '_', '.' and '-', and begins with a letter or digit".to_owned())
        }
    }
}

/// The longest time for one operation on the store.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of leases that are taken over before the store is closed for a moment, so that containers can start.
const AT_ONCE: usize = 16;

/// The leases of another plugin.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// The leases, one for each interface of a container.
    pub(super) leases: Vec<Lease>,
    /// The files and containers that cannot be taken over.
    pub(super) left_out: Vec<LeftOut>,
}

/// The lease of one interface of one container.
#[derive(Clone, Debug, Default)]
pub(super) struct Lease {
    /// The container's id.
    pub(super) container: String,
    /// The interface's name.
    pub(super) interface: String,
    /// Its addresses.
    pub(super) addresses: Vec<IpAddr>,
    /// The time of their assignment, if that is known.
    pub(super) given_at: Option<SystemTime>,
    /// The namespace and the name of its pod, if that is known.
    pub(super) pod: Option<(String, String)>,
    /// The pod's node, if it is known and may be another than the others have.
    pub(super) node: Option<String>,
}

impl Lease {
    /// Its addresses and its container.
    fn name(&self) -> String {
        let addresses: Vec<_> = self.addresses.iter().map(IpAddr::to_string).collect();
        format!("{} of container {}", addresses.join(", "), printable(&self.container))
    }
}

/// A file or lease that is not taken over.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LeftOut {
    what: String,
    why: String,
}

impl LeftOut {
    /// It is left out for the reason `why`.
    pub(super) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
}

#[derive(Default, Serialize)]
struct Report {
    store: String,
    network: String,
    node: String,
    /// The number of nodes that the other plugin's records name.
    #[serde(skip)]
    nodes: usize,
    dry_run: bool,
    /// The number of addresses that were taken over now.
    taken_over: usize,
    /// The number of addresses that were taken over before.
    there_already: usize,
    left_out: Vec<LeftOut>,
}

/// The outcome for one lease.
enum Outcome {
    TakenOver,
    ThereAlready,
    Conflict(String),
}

/// Leases to take over.
pub(super) struct TakingOver<'a> {
    found: Cell<Leases>,
    terms: &'a Terms,
}

impl<'a> TakingOver<'a> {
    pub(super) fn new(found: Leases, terms: &'a Terms) -> Self {
        Self { found: Cell::new(found), terms }
    }
}

#[async_trait(?Send)]
impl OnStore for TakingOver<'_> {
    fn doing(&self) -> Option<&'static str> {
        Some("taking over into")
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let Leases { mut leases, mut left_out } = self.found.take();
        for lease in leases.extract_if(.., |lease| !is_cni_name(&lease.container)) {
            left_out.push(LeftOut::new(lease.name(), "its container's id is none that a runtime gives"));
        }
        for lease in leases.extract_if(.., |lease| !is_interface_name(&lease.interface)) {
            let why = format!("{:?} is no interface's name", printable(&lease.interface));
            left_out.push(LeftOut::new(lease.name(), why));
        }
        let node = host::node_name(self.terms.node.as_deref().unwrap_or_default());
        if at.location.path().is_some() {
            let is_of_other = |lease: &mut Lease| lease.node.as_ref().is_some_and(|other| *other != node);
            for lease in leases.extract_if(.., is_of_other) {
                let other = lease.node.as_deref().unwrap_or_default();
                let why = format!("its pod is on node {}, and this store is for one machine, {node}", printable(other));
                left_out.push(LeftOut::new(lease.name(), why));
            }
        }
        let nodes_of_leases: BTreeSet<&String> = leases.iter().filter_map(|lease| lease.node.as_ref()).collect();
        let mut report = Report {
            nodes: nodes_of_leases.len(),
            store: at.to_string(),
            network: self.terms.network.clone(),
            node,
            dry_run: self.terms.dry_run,
            left_out,
            ..Report::default()
        };
        for leases in leases.chunks(AT_ONCE) {
            at.on_ipam(Need::Write, async |operator| some(operator, leases, &mut report).await).await?;
        }
        report.answer()
    }
}

async fn some(operator: &Operator, leases: &[Lease], report: &mut Report) -> Result<()> {
    for lease in leases {
        match one(operator, lease, report).await? {
            Outcome::TakenOver => report.taken_over += lease.addresses.len(),
            Outcome::ThereAlready => report.there_already += lease.addresses.len(),
            Outcome::Conflict(why) => {
                report.left_out.push(LeftOut::new(lease.name(), why));
            }
        }
    }
    Ok(())
}

/// Takes over the addresses of one interface, in one commit.
async fn one(operator: &Operator, lease: &Lease, report: &Report) -> Result<Outcome> {
    let request = request(lease, report);
    let soon = || Deadline::after(PATIENCE);
    let compared = operator.ipam().compare(&request.attachment, &[], &lease.addresses, soon()).await?;
    if compared.standings.iter().all(|(_, standing)| *standing == Standing::Own) {
        return Ok(Outcome::ThereAlready);
    }
    let assigned = match report.dry_run {
        true => operator.ipam().would_assign(&request, soon()).await.map(|trial| trial.assigned),
        false => operator.ipam().assign(&request, soon()).await,
    };
    match assigned {
        Ok(_) => Ok(Outcome::TakenOver),
        Err(error @ (Error::AlreadyAssigned(_) | Error::Reserved(_) | Error::Bridge(_) | Error::NotOwner(_))) => {
            Ok(Outcome::Conflict(error.to_string()))
        }
        // The text is Calico's and ends in a line break.
        Err(Error::Pool(error)) => Ok(Outcome::Conflict(error.to_string().trim_end().to_owned())),
        Err(error) => Err(error.into()),
    }
}

fn request(lease: &Lease, report: &Report) -> AssignRequest {
    let attachment = Attachment {
        network: report.network.clone(),
        container: lease.container.clone(),
        interface: lease.interface.clone(),
        node: lease.node.clone().unwrap_or_else(|| report.node.clone()),
        // The boot is that of this machine.
        boot: host::boot_id()
            .filter(|_| lease.node.is_none() && is_of_this_boot(lease))
            .and_then(|id| host::short_boot(&id)),
    };
    let mut request = AssignRequest::new(attachment, Wanted::these(lease.addresses.clone()));
    request.bridge = Some(Bridge::default());
    let given_at = lease.given_at.unwrap_or_else(SystemTime::now);
    request.attributes.insert(TIMESTAMP.to_owned(), go_string(given_at.into()));
    if let Some((namespace, name)) = &lease.pod {
        request.attributes.insert(NAMESPACE.to_owned(), namespace.clone());
        request.attributes.insert(POD.to_owned(), name.clone());
    }
    request
}

/// True if the addresses were assigned in this boot, or at an unknown time: then they are not leftovers.
fn is_of_this_boot(lease: &Lease) -> bool {
    let (Some(given_at), Some(up)) = (lease.given_at, host::uptime()) else { return lease.given_at.is_none() };
    given_at.elapsed().is_ok_and(|age| age < up)
}

impl Report {
    fn answer(self) -> Result<Answer> {
        let count = |count: usize| format!("{count} address{}", if count == 1 { "" } else { "es" });
        let verb = if self.dry_run { "Would take over" } else { "Successfully took over" };
        let node = match self.nodes {
            0 => format!("node {}", self.node),
            1 => "1 node".to_owned(),
            several => format!("{several} nodes"),
        };
        let mut text = format!("{verb} {} in network {} for {node}", count(self.taken_over), self.network);
        if self.there_already > 0 {
            _ = write!(text, "; {} were taken over before", count(self.there_already));
        }
        for LeftOut { what, why } in &self.left_out {
            _ = write!(text, "\nleft out: {what}: {why}");
        }
        let failure = (!self.left_out.is_empty()).then(|| {
            let several = if self.left_out.len() == 1 { "thing was" } else { "things were" };
            Failure::new(format!("{} {several} left out; see above", self.left_out.len()))
                .hint("see who has an address with: margay ipam show --ip ADDRESS; and which pools there are with: margay pool list")
        });
        let answer = Answer::new(text, &self)?;
        Ok(match failure {
            Some(failure) => answer.incomplete(failure),
            None => answer,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_a_name_that_cni_takes() {
        assert!(network_name("my_net.v4-1").is_ok());
        for text in ["", " ", "-a", "a b", "a/b", "\u{feff}lab"] {
            assert!(network_name(text).is_err(), "{text:?}");
        }
    }
}
