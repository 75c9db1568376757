//! The settings that all nodes share.

use async_trait::async_trait;
use ipam_core::model::{AddressPersistence, IpamConfig};
use ipam_operator::Operator;
use kv::Deadline;
use serde_json::json;

use crate::answer::Answer;
use crate::args::{Configure, Persistence};
use crate::command::OnOpenStore;
use crate::error::{Failure, Result};
use crate::output::{Column, render};
use crate::store::Need;

#[async_trait(?Send)]
impl OnOpenStore for Configure {
    fn need(&self) -> Need {
        Need::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        operator.ipam().change_config(|config| changed(config, self), deadline).await.map_err(|error| match error {
            ipam_core::Error::Settings(error) => refused(error),
            other => other.into(),
        })?;
        let prefix = if self.dry_run { "Dry run: would set" } else { "Successfully set" };
        let said = said(self);
        let lines: Vec<String> = said.iter().map(|(name, value)| format!("{prefix} {name} to: {value}")).collect();
        let set: serde_json::Map<_, _> =
            said.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
        Answer::new(lines.join("\n"), &json!({ "set": set, "dry_run": self.dry_run }))
    }
}

/// Shows all settings.
pub(super) async fn show(operator: &Operator, deadline: Deadline) -> Result<Answer> {
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
    Answer::new(render(&[Column::Text("PROPERTY"), Column::Text("VALUE")], &rows), &json)
}

fn changed(mut config: IpamConfig, args: &Configure) -> IpamConfig {
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

/// The names and values that were set, in calicoctl's order.
fn said(args: &Configure) -> Vec<(&'static str, String)> {
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

fn refused(error: ipam_core::model::ContradictorySettings) -> Failure {
    Failure::new(error).hint("nothing was changed; see what is set with: margay ipam show --show-configuration")
}
