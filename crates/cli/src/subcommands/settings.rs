//! Changes settings that apply to all nodes, and splits pools, for the commands `margay ipam configure` and `margay
//! ipam split`.

use async_trait::async_trait;
use clap::{ArgGroup, Args, ValueEnum};
use ipam_core::Error;
use ipam_core::model::{AddressPersistence, IpamConfig};
use ipam_operator::{Operator, PoolChoice};
use ipnet::IpNet;
use kv::Deadline;
use serde_json::json;

use crate::command::{CommandAnswer, OpenStoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, render};
use crate::store::StoreUse;

pub(crate) const CONFIGURE: &str = "\
Examples:
  margay ipam configure --strictaffinity=true
  margay ipam configure --strictaffinity=true --max-blocks-per-host=4
  margay ipam configure --ip-cooldown-seconds=60 --dry-run

See what is set with: margay ipam show --show-configuration";

pub(crate) const SPLIT: &str = "\
Blocks and addresses stay where they are, and containers may come and go
meanwhile. The parts are named split-NAME-0, split-NAME-1, ...; networks that
name the pool must name the parts from then on. An interrupted split continues
when the command is given again.

Examples:
  margay ipam split 2 --name main --dry-run
  margay ipam split 4 --cidr 10.65.0.0/16";

/// Settings that all nodes share.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("setting").required(true).multiple(true))]
pub(crate) struct Configure {
    /// Whether a node is limited to addresses of its own blocks
    #[arg(long, value_name = "true|false", group = "setting")]
    pub(crate) strictaffinity: Option<bool>,

    /// Maximum number of blocks per node, up to 1000000; 0 means the default, 20
    #[arg(long, value_name = "N", group = "setting", value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub(crate) max_blocks_per_host: Option<u32>,

    /// Whether a KubeVirt virtual machine keeps its addresses when it restarts or migrates
    #[arg(long, value_enum, group = "setting", value_name = "Enabled|Disabled")]
    pub(crate) kubevirt_ip_persistence: Option<Persistence>,

    /// Cooldown in seconds before a released address can be assigned again, up to 5000
    #[arg(long, value_name = "N", group = "setting", value_parser = clap::value_parser!(u32).range(..=5_000))]
    pub(crate) ip_cooldown_seconds: Option<u32>,

    /// Dry run: do all checks, but write nothing to the store
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Whether a KubeVirt machine keeps its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(crate) enum Persistence {
    Enabled,
    Disabled,
}

/// The arguments of `ipam split`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("pool").required(true))]
pub(crate) struct Split {
    /// Number of parts, a power of two
    pub(crate) number: u32,

    /// The range of the pool to split
    #[arg(long, group = "pool")]
    pub(crate) cidr: Option<IpNet>,

    /// The name of the pool
    #[arg(long, group = "pool")]
    pub(crate) name: Option<String>,

    /// Dry run: do all checks, but write nothing to the store
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[async_trait(?Send)]
impl OpenStoreCommand for Configure {
    fn store_use(&self) -> StoreUse {
        StoreUse::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        operator.ipam().change_config(|config| apply_changes(config, self), deadline).await.map_err(
            |error| match error {
                Error::Settings(error) => contradiction_failure(error),
                other => other.into(),
            },
        )?;
        let prefix = if self.dry_run { "Dry run: would set" } else { "Successfully set" };
        let said = list_changes(self);
        let lines: Vec<String> = said.iter().map(|(name, value)| format!("{prefix} {name} to: {value}")).collect();
        let set: serde_json::Map<_, _> =
            said.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
        CommandAnswer::new(lines.join("\n"), &json!({ "set": set, "dry_run": self.dry_run }))
    }
}

pub(super) async fn show(operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
    let config = operator.ipam().config(deadline).await?;
    let persistence = persistence_text(config.address_persistence());
    let rows = [
        ("StrictAffinity", config.strict_affinity().to_string()),
        ("AutoAllocateBlocks", config.auto_allocate_blocks().to_string()),
        ("MaxBlocksPerHost", config.max_blocks_per_host().to_string()),
        ("KubeVirtVMAddressPersistence", persistence.to_owned()),
        ("IPCooldownSeconds", config.cooldown_seconds().to_string()),
    ];
    let rows: Vec<Vec<String>> = rows.map(|(name, value)| vec![name.to_owned(), value]).into();
    let json = json!({
        "strict_affinity": config.strict_affinity(),
        "auto_allocate_blocks": config.auto_allocate_blocks(),
        "max_blocks_per_host": config.max_blocks_per_host(),
        "kubevirt_ip_persistence": persistence,
        "ip_cooldown_seconds": config.cooldown_seconds(),
    });
    CommandAnswer::new(render(&[Column::Text("PROPERTY"), Column::Text("VALUE")], &rows), &json)
}

fn apply_changes(mut config: IpamConfig, args: &Configure) -> IpamConfig {
    if let Some(strict) = args.strictaffinity {
        config = config.with_strict_affinity(strict);
    }
    if let Some(most) = args.max_blocks_per_host {
        config = config.with_max_blocks_per_host(most);
    }
    if let Some(persistence) = args.kubevirt_ip_persistence {
        config = config.with_address_persistence(match persistence {
            Persistence::Enabled => AddressPersistence::Enabled,
            Persistence::Disabled => AddressPersistence::Disabled,
        });
    }
    if let Some(seconds) = args.ip_cooldown_seconds {
        config = config.with_cooldown_seconds(seconds);
    }
    config
}

/// Returns the names and new values of the settings to change, in calicoctl's order.
fn list_changes(args: &Configure) -> Vec<(&'static str, String)> {
    let persistence = args.kubevirt_ip_persistence.map(|persistence| match persistence {
        Persistence::Enabled => "Enabled".to_owned(),
        Persistence::Disabled => "Disabled".to_owned(),
    });
    [
        ("StrictAffinity", args.strictaffinity.map(|strict| strict.to_string())),
        ("MaxBlocksPerHost", args.max_blocks_per_host.map(|most| most.to_string())),
        ("KubeVirtVMAddressPersistence", persistence),
        ("IPCooldownSeconds", args.ip_cooldown_seconds.map(|seconds| seconds.to_string())),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect()
}

fn persistence_text(persistence: AddressPersistence) -> &'static str {
    match persistence {
        AddressPersistence::Enabled => "Enabled",
        AddressPersistence::Disabled => "Disabled",
    }
}

fn contradiction_failure(error: ipam_core::model::ContradictorySettings) -> CommandFailure {
    CommandFailure::new(error)
        .hint("show the settings with: margay ipam show --show-configuration; nothing was changed")
}

#[async_trait(?Send)]
impl OpenStoreCommand for Split {
    fn store_use(&self) -> StoreUse {
        StoreUse::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        // clap guarantees that either the name or the address range of the pool is given.
        let which = match (&self.name, self.cidr) {
            (Some(name), _) => PoolChoice::Name(name),
            (None, Some(cidr)) => PoolChoice::Cidr(cidr),
            (None, None) => return Err(CommandFailure::new("no name or CIDR provided")),
        };
        let split = operator.split_pool(which, self.number, deadline).await.map_err(|error| match error {
            Error::NotFound { .. } => CommandFailure::from(error).hint("list the pools with: margay get ippool"),
            _ => error.into(),
        })?;
        let (first, made) = if self.dry_run {
            (
                format!("Dry run: IP Pool {} would be split into {} smaller pools.", split.pool, self.number),
                "Would create",
            )
        } else {
            (format!("IP Pool {} was successfully split into {} smaller pools.", split.pool, self.number), "Created")
        };
        let lines = split.parts.iter().map(|(name, cidr)| format!("{made} {name} with CIDR {cidr}."));
        let text: Vec<String> = std::iter::once(first).chain(lines).collect();
        let parts: Vec<_> =
            split.parts.iter().map(|(name, cidr)| json!({ "name": name, "cidr": cidr.to_string() })).collect();
        let json = json!({ "pool": split.pool, "parts": parts, "dry_run": self.dry_run });
        CommandAnswer::new(text.join("\n"), &json)
    }
}
