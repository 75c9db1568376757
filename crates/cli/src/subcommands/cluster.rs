//! Sets up a cluster in which Margay runs without Calico, for the command `margay cluster`.

use async_trait::async_trait;
use clap::{Args, Subcommand};
use ipam_core::forwarding::{ForwardingOwner, StoreScope};
use ipam_core::model::{ClusterInformation, NewPool, Pool, check_new_pool, fitting_block_size};
use ipam_core::net::Family;
use ipam_operator::Operator;
use ipam_operator::cluster::{
    ClusterSetup, FirstPool, NatOutgoing, Presence, SetupOutcome, SetupRefusal, SetupReport, SetupScope,
};
use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;

use super::pool::cidr;
use crate::command::{CommandAnswer, OpenStoreCommand, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;
use crate::store::{StoreAccess, StoreUse};

pub(crate) const CLUSTER: &str = "\
Examples:
  margay cluster init --pool 10.65.0.0/16
  margay node register";

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterSubcommand {
    /// Create what the plugins need in an empty etcd: ClusterInformation and the first pools
    #[command(after_help = "\
What exists stays as it is, so the command can be repeated. Then register each
node with: margay node register. Where Calico runs, its node agent does both.

Examples:
  margay cluster init --pool 10.65.0.0/16
  margay cluster init --pool 10.65.0.0/16 --pool fd00:10:65::/48
  margay cluster init --pool 10.65.0.0/16 --nat-outgoing false --dry-run")]
    Init(ClusterInit),
}

#[derive(Debug, Args)]
pub(crate) struct ClusterInit {
    /// Range of the first pool; at most one IPv4 and one IPv6 range
    #[arg(long = "pool", value_name = "CIDR", value_parser = cidr)]
    pools: Vec<IpNet>,

    /// Whether packets to the world leave a node with the node's address [default: true for IPv4, false for IPv6]
    #[arg(long, value_name = "true|false", requires = "pools")]
    nat_outgoing: Option<bool>,

    /// Prefix length of a block: IPv4 20 to 32 [default: 26], IPv6 116 to 128 [default: 122]; may be given for both
    #[arg(long = "block-size", value_name = "BITS", requires = "pools")]
    block_sizes: Vec<u8>,

    /// Dry run: do all checks, but create nothing
    #[arg(long)]
    dry_run: bool,
}

/// The name that Calico's node agent gives to the first pool of a family.
fn pool_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "default-ipv4-ippool",
        Family::V6 => "default-ipv6-ippool",
    }
}

impl ClusterInit {
    fn first_pools(&self) -> CommandResult<Vec<FirstPool>> {
        for size in &self.block_sizes {
            let fits = |cidr: &IpNet| Family::of_net(*cidr).block_sizes().contains(size);
            if !self.pools.iter().any(fits) {
                return Err(CommandFailure::new(format!("no --pool can have blocks of /{size}"))
                    .hint("IPv4 blocks have 20 to 32 bits, and IPv6 blocks 116 to 128"));
            }
        }
        let mut pools: Vec<FirstPool> = Vec::new();
        for cidr in &self.pools {
            let family = Family::of_net(*cidr);
            let name = pool_name(family);
            if pools.iter().any(|other| other.new.name == name) {
                let text = format!("--pool {cidr} is the second range of its family");
                return Err(CommandFailure::new(text)
                    .hint(format!("leave it out, and create it afterwards with: margay pool create NAME {cidr}")));
            }
            let size = self.block_sizes.iter().rev().find(|size| family.block_sizes().contains(size)).copied();
            let new = NewPool::new(name, *cidr).with_block_size(fitting_block_size(*cidr, size));
            check_new_pool(&new, &[], &[]).map_err(CommandFailure::new)?;
            let nat = match self.nat_outgoing.unwrap_or(family == Family::V4) {
                true => NatOutgoing::On,
                false => NatOutgoing::Off,
            };
            pools.push(FirstPool { new, nat });
        }
        Ok(pools)
    }
}

#[async_trait(?Send)]
impl StoreCommand for ClusterInit {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let scope = if at.location.is_shared() { SetupScope::Cluster } else { SetupScope::Machine };
        let setup = ClusterSetup { scope, pools: self.first_pools()? };
        at.carry_out(&SetUpCluster { setup, dry_run: self.dry_run }).await
    }
}

struct SetUpCluster {
    setup: ClusterSetup,
    dry_run: bool,
}

/// The answer of `cluster init` as JSON.
#[derive(Serialize)]
struct ClusterRow {
    cluster: Option<InformationRow>,
    pools: Vec<FirstPoolRow>,
    /// The program that forwards and masquerades on this machine: `margay` or `felix`.
    forwarding: &'static str,
}

#[derive(Serialize)]
struct InformationRow {
    guid: String,
    #[serde(rename = "type")]
    kind: String,
    state: &'static str,
}

#[derive(Serialize)]
struct FirstPoolRow {
    name: String,
    cidr: String,
    block_size: u8,
    nat_outgoing: bool,
    state: &'static str,
}

fn state(presence: Presence) -> &'static str {
    match presence {
        Presence::Created => "created",
        Presence::Existed => "exists",
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for SetUpCluster {
    fn store_use(&self) -> StoreUse {
        // Without a pool to create, the command must not create a store, either.
        if self.setup.pools.is_empty() { StoreUse::Write } else { StoreUse::Make }
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    fn changes_pools(&self) -> bool {
        true
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        match operator.set_up_cluster(&self.setup, deadline).await? {
            SetupOutcome::Done(report) => self.answer(&report),
            SetupOutcome::Refused(refusal) => Err(refused(&refusal)),
        }
    }
}

impl SetUpCluster {
    fn answer(&self, report: &SetupReport) -> CommandResult<CommandAnswer> {
        let cluster = report.cluster.as_ref().map(|(cluster, _)| cluster);
        let scope = if report.cluster.is_some() { StoreScope::Cluster(cluster) } else { StoreScope::Machine };
        let owner = ForwardingOwner::decide(scope, host::felix_file());
        let row = ClusterRow {
            cluster: report.cluster.as_ref().map(|(cluster, presence)| InformationRow {
                guid: cluster.guid().to_owned(),
                kind: cluster.cluster_type().to_owned(),
                state: state(*presence),
            }),
            pools: report.pools.iter().map(|(pool, presence)| pool_row(pool, *presence)).collect(),
            forwarding: forwarding_name(&owner),
        };
        let mut lines = Vec::new();
        if let Some(InformationRow { state, .. }) = &row.cluster {
            lines.push(line(state, "ClusterInformation default"));
        }
        for FirstPoolRow { name, cidr, block_size, nat_outgoing, state } in &row.pools {
            let nat = if *nat_outgoing { "on" } else { "off" };
            let text = format!("pool {}: {cidr} in blocks of /{block_size}, natOutgoing {nat}", printable(name));
            lines.push(line(state, &text));
        }
        let answer = CommandAnswer::new(lines.join("\n"), &row)?;
        Ok(match cluster.filter(|cluster| !cluster.is_margay_alone()) {
            Some(cluster) => answer.note(calicos_cluster(cluster)),
            None if scope_is_cluster(scope) => answer.note("next, on each node: margay node register"),
            None => answer,
        })
    }
}

fn scope_is_cluster(scope: StoreScope<'_>) -> bool {
    matches!(scope, StoreScope::Cluster(_))
}

fn line(state: &str, text: &str) -> String {
    if state == "created" { format!("Successfully created {text}") } else { format!("Exists: {text}") }
}

fn pool_row(pool: &Pool, presence: Presence) -> FirstPoolRow {
    FirstPoolRow {
        name: pool.name().to_owned(),
        cidr: pool.cidr().to_string(),
        block_size: pool.block_size(),
        nat_outgoing: pool.is_nat_outgoing(),
        state: state(presence),
    }
}

/// Returns the note for a cluster that Calico has set up.
fn calicos_cluster(cluster: &ClusterInformation) -> String {
    let kind = match (cluster.cluster_type(), cluster.calico_version()) {
        ("", "") => "unset".to_owned(),
        (kind, "") => printable(kind),
        (kind, version) => printable(&format!("{kind}, Calico {version}")),
    };
    format!(
        "this is Calico's cluster (clusterType {kind}): Calico's node agent registers nodes, and its Felix forwards and \
         masquerades; Margay's plugin does not"
    )
}

/// Returns the name of the program that forwards and masquerades, for JSON.
pub(crate) fn forwarding_name(owner: &ForwardingOwner) -> &'static str {
    if owner.is_plugin() { "margay" } else { "felix" }
}

/// Describes the program that forwards and masquerades, for people.
pub(crate) fn forwarding_text(owner: &ForwardingOwner) -> String {
    match owner {
        ForwardingOwner::Plugin => "Margay's plugin".to_owned(),
        ForwardingOwner::FelixOfCluster => "Felix".to_owned(),
        ForwardingOwner::FelixOfMachine(file) => format!("Felix ({} exists)", file.display()),
    }
}

fn refused(refusal: &SetupRefusal) -> CommandFailure {
    match refusal {
        SetupRefusal::Locked => CommandFailure::new(
            "the datastore is locked: datastoreReady of ClusterInformation default is not true",
        )
        .hint(
            "wait until the upgrade or the migration has ended, or end it with: calicoctl datastore migrate unlock; \
             nothing was changed",
        ),
        SetupRefusal::NoPool => CommandFailure::new("the store has no pool, and no --pool is given")
            .hint("name a range that no network uses yet: margay cluster init --pool 10.65.0.0/16"),
        SetupRefusal::OtherCidr { name, stored, wanted } => {
            CommandFailure::new(format!("pool {name} exists, and has the range {stored}, not {wanted}")).hint(format!(
                "to keep it, name its range: --pool {stored}; for one more pool: margay pool create NAME {wanted}; \
                 nothing was changed"
            ))
        }
    }
}
