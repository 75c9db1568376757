//! Takes over addresses that another IPAM plugin has assigned. Each taken-over address is recorded for its container,
//! as if Margay's plugin had assigned it. This module reads the addresses from host-local's files or from the output of
//! `podman inspect`. The module [`super::whereabouts`] reads addresses that whereabouts has assigned.
//!
//! host-local has a file for each assigned address, and the file is named after the address. Each file of host-local
//! contains the container id and the name of the interface.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use clap::Args;
use datastore::text_fault;
use ipam_core::assign::{AssignRequest, Bridge, RequestedAddresses};
use ipam_core::attachment::{Attachment, NAMESPACE, POD, TIMESTAMP};
use ipam_core::timestamps::go_string;
use ipam_core::{Error, Standing};
use ipam_operator::Operator;
use kv::Deadline;
use serde::{Deserialize, Serialize};

use crate::cni::{is_cni_name, is_interface_name};
use crate::command::{CommandAnswer, Invocation, StandaloneCommand, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;
use crate::store::{StoreAccess, StoreUse};

/// The network and node for which addresses are recorded.
#[derive(Debug, Args)]
pub(crate) struct TakeOverArgs {
    /// Name of the network in its CNI configuration
    #[arg(long, value_name = "NAME", value_parser = network_name)]
    pub(crate) network: String,

    /// Node name; needed only if the network's CNI configuration sets nodename, nodename_file or hostname
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Show what would be taken over, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Parses the name of a CNI network. Container runtimes never call the plugin with a name that CNI does not allow.
/// Addresses that were recorded under an invalid network name could never be released by a DEL.
fn network_name(text: &str) -> Result<String, String> {
    match is_cni_name(text) {
        true => Ok(text.to_owned()),
        false => {
            Err("a network's name has letters, digits, '_', '.' and '-', and begins with a letter or digit".to_owned())
        }
    }
}

/// Time limit of a single operation on the store.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of leases that are taken over before the store is closed for a moment, so that plugins can use the
/// store.
const MAX_LEASES_PER_OPENING: usize = 16;

/// The leases that were found in another plugin's records, and the records that were skipped.
#[derive(Debug, Default)]
pub(super) struct ForeignLeases {
    /// The leases that can be taken over, one lease for each interface of a container.
    pub(super) leases: Vec<ForeignLease>,
    /// The files and containers whose addresses cannot be taken over, with the reasons.
    pub(super) left_out: Vec<SkippedLease>,
}

/// The addresses that another IPAM plugin has assigned to one interface of a container.
#[derive(Clone, Debug, Default)]
pub(super) struct ForeignLease {
    pub(super) container: String,
    pub(super) interface: String,
    pub(super) addresses: Vec<IpAddr>,
    /// The time when the addresses were assigned, or `None` if the time is unknown.
    pub(super) given_at: Option<SystemTime>,
    /// The namespace and name of the container's pod, if they are known.
    pub(super) pod: Option<(String, String)>,
    /// The node on which the pod runs, if it is known. Leases from one source may belong to different nodes.
    pub(super) node: Option<String>,
}

impl ForeignLease {
    /// Describes the lease by its addresses and container, for messages.
    fn name(&self) -> String {
        let addresses: Vec<_> = self.addresses.iter().map(IpAddr::to_string).collect();
        format!("{} of container {}", addresses.join(", "), printable(&self.container))
    }
}

/// A file or lease whose addresses are not taken over, and why not.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SkippedLease {
    what: String,
    why: String,
}

impl SkippedLease {
    pub(super) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
}

#[derive(Default, Serialize)]
struct TakeOverReport {
    store: String,
    network: String,
    node: String,
    /// The number of nodes that the other plugin's records name.
    #[serde(skip)]
    nodes: usize,
    dry_run: bool,
    /// The number of addresses that this run of the command has taken over.
    taken_over: usize,
    /// The number of addresses that already had the right holder in the store before this run.
    there_already: usize,
    left_out: Vec<SkippedLease>,
}

enum TakeOverOutcome {
    TakenOver,
    ThereAlready,
    Conflict(String),
}

/// A command that takes over the addresses in another plugin's leases.
pub(super) struct LeaseTakeOver<'a> {
    found: Cell<ForeignLeases>,
    terms: &'a TakeOverArgs,
}

impl<'a> LeaseTakeOver<'a> {
    pub(super) fn new(found: ForeignLeases, terms: &'a TakeOverArgs) -> Self {
        Self { found: Cell::new(found), terms }
    }
}

#[async_trait(?Send)]
impl StoreCommand for LeaseTakeOver<'_> {
    fn progress_text(&self) -> Option<&'static str> {
        Some("taking over into")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let ForeignLeases { mut leases, mut left_out } = self.found.take();
        for lease in leases.extract_if(.., |lease| !is_cni_name(&lease.container)) {
            left_out.push(SkippedLease::new(lease.name(), "its container's id is none that a runtime gives"));
        }
        for lease in leases.extract_if(.., |lease| !is_interface_name(&lease.interface)) {
            let why = format!("{:?} is no interface's name", printable(&lease.interface));
            left_out.push(SkippedLease::new(lease.name(), why));
        }
        let node = host::node_name(self.terms.node.as_deref().unwrap_or_default());
        if at.location.path().is_some() {
            let is_of_other = |lease: &mut ForeignLease| lease.node.as_ref().is_some_and(|other| *other != node);
            for lease in leases.extract_if(.., is_of_other) {
                let other = lease.node.as_deref().unwrap_or_default();
                let why = format!("its pod is on node {}, and this store is for one machine, {node}", printable(other));
                left_out.push(SkippedLease::new(lease.name(), why));
            }
        }
        let nodes_of_leases: BTreeSet<&String> = leases.iter().filter_map(|lease| lease.node.as_ref()).collect();
        let mut report = TakeOverReport {
            nodes: nodes_of_leases.len(),
            store: at.to_string(),
            network: self.terms.network.clone(),
            node,
            dry_run: self.terms.dry_run,
            left_out,
            ..TakeOverReport::default()
        };
        for leases in leases.chunks(MAX_LEASES_PER_OPENING) {
            at.with_operator(StoreUse::Write, async |operator| take_over_batch(operator, leases, &mut report).await)
                .await?;
        }
        report.answer()
    }
}

async fn take_over_batch(
    operator: &Operator,
    leases: &[ForeignLease],
    report: &mut TakeOverReport,
) -> CommandResult<()> {
    for lease in leases {
        match take_over_one(operator, lease, report).await? {
            TakeOverOutcome::TakenOver => report.taken_over += lease.addresses.len(),
            TakeOverOutcome::ThereAlready => report.there_already += lease.addresses.len(),
            TakeOverOutcome::Conflict(why) => {
                report.left_out.push(SkippedLease::new(lease.name(), why));
            }
        }
    }
    Ok(())
}

async fn take_over_one(
    operator: &Operator,
    lease: &ForeignLease,
    report: &TakeOverReport,
) -> CommandResult<TakeOverOutcome> {
    let request = assign_request(lease, report);
    let soon = || Deadline::after(TAKE_OVER_TIMEOUT);
    let compared = operator.ipam().compare(&request.attachment, &[], &lease.addresses, soon()).await?;
    if compared.standings.iter().all(|(_, standing)| *standing == Standing::Own) {
        return Ok(TakeOverOutcome::ThereAlready);
    }
    let assigned = match report.dry_run {
        true => operator.ipam().would_assign(&request, soon()).await.map(|trial| trial.assigned),
        false => operator.ipam().assign(&request, soon()).await,
    };
    match assigned {
        Ok(_) => Ok(TakeOverOutcome::TakenOver),
        Err(error @ (Error::AlreadyAssigned(_) | Error::Reserved(_) | Error::Bridge(_) | Error::NotOwner(_))) => {
            Ok(TakeOverOutcome::Conflict(error.to_string()))
        }
        // The message of a pool error is copied from Calico and ends in a line break.
        Err(Error::Pool(error)) => Ok(TakeOverOutcome::Conflict(error.to_string().trim_end().to_owned())),
        Err(error) => Err(error.into()),
    }
}

fn assign_request(lease: &ForeignLease, report: &TakeOverReport) -> AssignRequest {
    let attachment = Attachment {
        network: report.network.clone(),
        container: lease.container.clone(),
        interface: lease.interface.clone(),
        node: lease.node.clone().unwrap_or_else(|| report.node.clone()),
        // The id of this machine's current boot is recorded only for containers that were started on this machine since
        // its last boot.
        boot: host::boot_id()
            .filter(|_| lease.node.is_none() && is_of_this_boot(lease))
            .and_then(|id| host::short_boot(&id)),
    };
    let mut request = AssignRequest::new(attachment, RequestedAddresses::these(lease.addresses.clone()));
    request.bridge = Some(Bridge::default());
    let given_at = lease.given_at.unwrap_or_else(SystemTime::now);
    request.attributes.insert(TIMESTAMP.to_owned(), go_string(given_at.into()));
    if let Some((namespace, name)) = &lease.pod {
        request.attributes.insert(NAMESPACE.to_owned(), namespace.clone());
        request.attributes.insert(POD.to_owned(), name.clone());
    }
    request
}

/// True if the addresses were assigned since this machine's last boot, or at an unknown time. Addresses that were
/// assigned before the last boot must not be recorded with the id of the current boot.
fn is_of_this_boot(lease: &ForeignLease) -> bool {
    let (Some(given_at), Some(up)) = (lease.given_at, host::uptime()) else { return lease.given_at.is_none() };
    given_at.elapsed().is_ok_and(|age| age < up)
}

impl TakeOverReport {
    fn answer(self) -> CommandResult<CommandAnswer> {
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
        for SkippedLease { what, why } in &self.left_out {
            _ = write!(text, "\nleft out: {what}: {why}");
        }
        let failure = (!self.left_out.is_empty()).then(|| {
            let several = if self.left_out.len() == 1 { "thing was" } else { "things were" };
            CommandFailure::new(format!("{} {several} left out; see above", self.left_out.len())).hint(
                "show who has an address with: margay ipam show --ip ADDRESS; list the pools with: margay pool list",
            )
        });
        let answer = CommandAnswer::new(text, &self)?;
        Ok(match failure {
            Some(failure) => answer.incomplete(failure),
            None => answer,
        })
    }
}

pub(crate) const HOST_LOCAL_HELP: &str = "\
Examples:
  margay pool create lab 10.88.0.0/24 --gateway 10.88.0.1
  margay import host-local /var/lib/cni/networks/lab --network lab --dry-run
  margay import host-local /var/lib/cni/networks/lab --network lab

Each address becomes its container's, as if Margay's plugin had given it, so that
the plugin's DEL takes it back. What is taken over already stays so. An address
that is in no pool, reserved, or another container's is listed and left out; the
exit code is then 1.";

#[derive(Debug, Args)]
pub(crate) struct FromHostLocal {
    /// Folder with one file per address, such as /var/lib/cni/networks/NAME
    pub(crate) folder: PathBuf,

    #[command(flatten)]
    pub(crate) terms: TakeOverArgs,
}

/// Maximum size of a lease file of host-local, in bytes. host-local's lease files are far smaller than this limit.
const MAX_LEASE_FILE_BYTES: u64 = 4096;
/// The interface that is assumed for a lease file without an interface. Old versions of host-local did not write the
/// interface name into their lease files.
const HOST_LOCAL_INTERFACE: &str = "eth0";

impl StandaloneCommand for FromHostLocal {
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let found = read_host_local(&self.folder)?;
        invocation.run_on_store(&LeaseTakeOver::new(found, &self.terms))
    }
}

/// Reads the leases of one network from host-local's folder.
fn read_host_local(folder: &Path) -> CommandResult<ForeignLeases> {
    let failed = |path: &Path, error: &io::Error| {
        CommandFailure::new(format!("cannot read {}: {error}", path.display()))
            .hint("name the folder in which host-local keeps a network's addresses, such as /var/lib/cni/networks/NAME")
    };
    let mut containers: BTreeMap<(String, String), ForeignLease> = BTreeMap::new();
    let mut left_out = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        let path = entry.map_err(|error| failed(folder, &error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name == "lock" || name.starts_with("last_reserved_ip") {
            continue;
        }
        let Ok(address) = name.parse::<IpAddr>() else {
            left_out.push(SkippedLease::new(printable(&name), "its name is no address"));
            continue;
        };
        let (text, given_at) = match lease_file_content(&path) {
            Ok(Ok(content)) => content,
            Ok(Err(why)) => {
                left_out.push(SkippedLease::new(address.to_string(), format!("its file cannot be used: {why}")));
                continue;
            }
            // The lease file was deleted while the folder was read, because its container was removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(&path, &error)),
        };
        let mut lines = text.lines().map(str::trim);
        let container = lines.next().unwrap_or_default();
        let interface = lines.next().filter(|name| !name.is_empty()).unwrap_or(HOST_LOCAL_INTERFACE);
        let lease = containers.entry((container.to_owned(), interface.to_owned())).or_insert_with(|| ForeignLease {
            container: container.to_owned(),
            interface: interface.to_owned(),
            addresses: Vec::new(),
            given_at: Some(given_at),
            ..ForeignLease::default()
        });
        lease.addresses.push(address);
        lease.addresses.sort_unstable();
    }
    Ok(ForeignLeases { leases: containers.into_values().collect(), left_out })
}

/// Reads a lease file's content and modification time. If the file cannot be a lease file of host-local, returns the
/// reason.
fn lease_file_content(path: &Path) -> io::Result<Result<(String, SystemTime), String>> {
    let about = fs::metadata(path)?;
    if !about.is_file() {
        return Ok(Err("it is no regular file".to_owned()));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_LEASE_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if let Some(fault) = text_fault(&bytes) {
        return Ok(Err(fault.to_string()));
    }
    if bytes.len() as u64 > MAX_LEASE_FILE_BYTES {
        return Ok(Err(format!("it has more than {MAX_LEASE_FILE_BYTES} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(io::Error::other)?;
    Ok(Ok((text, about.modified()?)))
}

pub(crate) const PODMAN_HELP: &str = "\
Examples:
  podman inspect $(podman ps -q) | margay import podman - --network lab

For podman with netavark, which keeps no files for host-local. A container in
several networks is left out: podman does not say which interface is in which.
With CNI podman uses host-local: margay import host-local.";

#[derive(Debug, Args)]
pub(crate) struct FromPodman {
    /// File with the output of `podman inspect`, or - for stdin
    pub(crate) file: PathBuf,

    #[command(flatten)]
    pub(crate) terms: TakeOverArgs,
}

/// The interface name that is assumed for a container that is in only one network.
const PODMAN_INTERFACE: &str = "eth0";
/// Maximum size in bytes of the input file. Large enough for the output of `podman inspect` for all containers of a
/// machine.
const MAX_INPUT_BYTES: u64 = 256 << 20;
const PODMAN_HINT: &str = "pass the output of `podman inspect` for the containers";
/// The offset and the value of the magic number by which bbolt files are recognised. podman's own database `ipam.db` is
/// a bbolt file.
const BOLT_MAGIC: (usize, [u8; 4]) = (16, 0xED0C_DAED_u32.to_le_bytes());

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", expecting = "struct Container")]
struct PodmanContainer {
    id: String,
    #[serde(default)]
    network_settings: Option<PodmanNetworkSettings>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", expecting = "struct NetworkSettings")]
struct PodmanNetworkSettings {
    networks: Option<BTreeMap<String, Option<PodmanNetwork>>>,
}

#[derive(Deserialize)]
#[serde(expecting = "struct Network")]
struct PodmanNetwork {
    #[serde(rename = "IPAddress")]
    v4: Option<String>,
    #[serde(rename = "GlobalIPv6Address")]
    v6: Option<String>,
}

impl StandaloneCommand for FromPodman {
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let found = read_podman(&self.file, &self.terms.network)?;
        invocation.run_on_store(&LeaseTakeOver::new(found, &self.terms))
    }
}

/// Reads the output of `podman inspect` from a file or from stdin, and selects the containers in one network.
fn read_podman(file: &Path, network: &str) -> CommandResult<ForeignLeases> {
    let bytes = read_input(file, PODMAN_HINT)?;
    if bytes.get(BOLT_MAGIC.0..).is_some_and(|rest| rest.starts_with(&BOLT_MAGIC.1)) {
        return Err(CommandFailure::new(format!(
            "{} is podman's own file, which margay does not read",
            file.display()
        ))
        .hint(format!(
            "use podman inspect instead: podman inspect $(podman ps -q) | margay import podman - --network {network}"
        )));
    }
    let containers: Vec<PodmanContainer> = serde_json::from_slice(&bytes).map_err(|error| {
        let fault = text_fault(&bytes).map_or_else(|| error.to_string(), |fault| fault.to_string());
        CommandFailure::new(format!("{} is no list of containers: {fault}", file.display())).hint(PODMAN_HINT)
    })?;
    require_network(&containers, network).map_err(|why| {
        CommandFailure::new(format!("{}: {why}", file.display())).hint("list the network names with: podman network ls")
    })?;
    Ok(podman_leases(containers, network))
}

/// Reads a file, or stdin if the path is `-`.
pub(super) fn read_input(path: &Path, hint: &str) -> CommandResult<Vec<u8>> {
    let failed = |error: io::Error| CommandFailure::new(format!("cannot read {}: {error}", path.display())).hint(hint);
    let mut bytes = Vec::new();
    let read = match path == Path::new("-") {
        true => io::stdin().take(MAX_INPUT_BYTES + 1).read_to_end(&mut bytes),
        false => File::open(path).and_then(|file| file.take(MAX_INPUT_BYTES + 1).read_to_end(&mut bytes)),
    };
    read.map_err(failed)?;
    match bytes.len() as u64 > MAX_INPUT_BYTES {
        true => {
            Err(CommandFailure::new(format!("{} has more than {} MiB", path.display(), MAX_INPUT_BYTES >> 20))
                .hint(hint))
        }
        false => Ok(bytes),
    }
}

impl PodmanContainer {
    fn networks(&self) -> impl Iterator<Item = (&String, &Option<PodmanNetwork>)> {
        self.network_settings.iter().filter_map(|settings| settings.networks.as_ref()).flatten()
    }
}

/// Fails if all containers are in other networks than `network`, because the user has probably mistyped the network's
/// name.
fn require_network(containers: &[PodmanContainer], network: &str) -> Result<(), String> {
    let names: BTreeSet<&str> =
        containers.iter().flat_map(PodmanContainer::networks).map(|(name, _)| name.as_str()).collect();
    if names.is_empty() || names.contains(network) {
        return Ok(());
    }
    let names: Vec<String> = names.into_iter().map(printable).collect();
    Err(format!("none of its containers is in network {}; they are in {}", printable(network), names.join(", ")))
}

/// Returns the leases of the containers in a network. Containers that do not run have no address.
fn podman_leases(containers: Vec<PodmanContainer>, network: &str) -> ForeignLeases {
    let mut found = ForeignLeases::default();
    for container in containers {
        let Some((_, Some(of))) = container.networks().find(|(name, _)| *name == network) else { continue };
        let texts = [&of.v4, &of.v6].into_iter().flatten().filter(|text| !text.is_empty());
        let addresses = texts.map(|text| text.parse::<IpAddr>().map_err(|_| text)).collect::<Result<Vec<_>, _>>();
        let mut leave_out = |why: String| {
            found.left_out.push(SkippedLease::new(format!("container {}", printable(&container.id)), why));
        };
        match addresses {
            _ if container.networks().count() > 1 => {
                leave_out(
                    "it is in several networks, and the file does not say which interface is in which".to_owned(),
                );
            }
            Err(text) => leave_out(format!("{:?} is no address", printable(text))),
            Ok(addresses) if addresses.is_empty() => {}
            Ok(addresses) => found.leases.push(ForeignLease {
                container: container.id,
                interface: PODMAN_INTERFACE.to_owned(),
                addresses,
                ..ForeignLease::default()
            }),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn take_over_network_name_is_what_cni_takes() {
        assert!(network_name("my_net.v4-1").is_ok());
        for text in ["", " ", "-a", "a b", "a/b", "\u{feff}lab"] {
            assert!(network_name(text).is_err(), "{text:?}");
        }
    }
}
