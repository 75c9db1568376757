//! Sets, shows and deletes address quotas, for the command `margay quota`.

use async_trait::async_trait;
use clap::{Args, Subcommand};
use ipam_core::Error;
use ipam_core::model::{QuotaKind, QuotaSubject, Quotas};
use ipam_operator::{Operator, QuotaRow};
use kv::Deadline;
use serde_json::json;

use crate::command::{CommandAnswer, OpenStoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{Column, Columns, TableRow, printable};
use crate::store::StoreUse;

pub(crate) const QUOTA: &str = "\
Examples:
  margay quota set --namespace shop 50
  margay quota list";

#[derive(Debug, Subcommand)]
pub(crate) enum QuotaSubcommand {
    /// Set the maximum number of addresses of a namespace, a network or a node
    #[command(after_help = "\
The name * stands for each one without a limit of its own. Addresses in use
stay in use; only further ones are refused. Each family counts: a container with
an IPv4 and an IPv6 address has two.

Examples:
  margay quota set --namespace shop 50
  margay quota set --namespace '*' 200
  margay quota set --network storage 1000
  margay quota set --node node1 110 --dry-run")]
    Set(QuotaSet),
    /// List the quotas with the number of addresses in use
    #[command(visible_alias = "ls", after_help = "Examples:\n  margay quota list\n  margay quota list -o json")]
    List,
    /// Delete a quota
    #[command(
        visible_alias = "rm",
        after_help = "\
Examples:
  margay quota delete --namespace shop
  margay quota delete --namespace '*' --dry-run"
    )]
    Delete(QuotaDelete),
}

#[derive(Debug, Args)]
pub(crate) struct QuotaSet {
    #[command(flatten)]
    pub(crate) of: QuotaSubjectArgs,

    /// Maximum number of addresses that the quota allows
    #[arg(value_name = "N")]
    pub(crate) limit: u64,

    /// Dry run: do all checks, but set no quota
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct QuotaDelete {
    #[command(flatten)]
    pub(crate) of: QuotaSubjectArgs,

    /// Dry run: do all checks, but delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Whose addresses a quota limits.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct QuotaSubjectArgs {
    /// Namespace whose pods the quota limits
    #[arg(long, value_name = "NAME", value_parser = name)]
    namespace: Option<String>,
    /// Network that the quota limits, by the name in its CNI configuration
    #[arg(long, value_name = "NAME", value_parser = name)]
    network: Option<String>,
    /// Node that the quota limits
    #[arg(long, value_name = "NAME", value_parser = name)]
    node: Option<String>,
}

impl QuotaSubjectArgs {
    pub(crate) fn subject(&self) -> QuotaSubject {
        let named = [
            (QuotaKind::Namespace, &self.namespace),
            (QuotaKind::Network, &self.network),
            (QuotaKind::Node, &self.node),
        ];
        let named = named.into_iter().find_map(|(kind, name)| Some(QuotaSubject::new(kind, name.as_ref()?)));
        named.unwrap_or_else(|| QuotaSubject::new(QuotaKind::Node, ""))
    }
}

fn name(text: &str) -> Result<String, String> {
    match text {
        "" => Err("a name has at least one letter".to_owned()),
        _ if text.chars().any(char::is_control) => Err("a name has no control characters".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

impl TableRow for QuotaRow {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("KIND"), |row| row.kind.to_owned()),
            (Column::Text("NAME"), |row| match row.name.as_str() {
                Quotas::ANY_OTHER => "* (any other)".to_owned(),
                name => printable(name),
            }),
            (Column::Number("IN USE"), |row| row.used.map(|used| used.to_string()).unwrap_or_default()),
            (Column::Number("LIMIT"), |row| row.limit.to_string()),
            (Column::Number("PERCENT"), |row| row.percent.map(|percent| format!("{percent}%")).unwrap_or_default()),
        ]
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for QuotaSet {
    fn store_use(&self) -> StoreUse {
        StoreUse::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let (of, limit) = (self.of.subject(), self.limit);
        let before = operator.set_quota(&of, limit, deadline).await?;
        let was = before.map(|before| format!(" (was {before})")).unwrap_or_default();
        let done = if self.dry_run { "Dry run: would set" } else { "Successfully set" };
        CommandAnswer::new(
            format!("{done} the quota of {of} to {limit}{was}"),
            &json!({ "kind": of.kind.as_str(), "name": of.name, "limit": limit, "before": before,
                "dry_run": self.dry_run }),
        )
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for QuotaDelete {
    fn store_use(&self) -> StoreUse {
        StoreUse::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let of = self.of.subject();
        let limit = operator.delete_quota(&of, deadline).await.map_err(|error| match error {
            Error::NotFound { .. } => CommandFailure::from(error).hint("list the quotas with: margay quota list"),
            _ => error.into(),
        })?;
        let done = if self.dry_run { "Dry run: would delete" } else { "Successfully deleted" };
        CommandAnswer::new(
            format!("{done} the quota of {of} ({limit})"),
            &json!({ "kind": of.kind.as_str(), "name": of.name, "limit": limit, "dry_run": self.dry_run }),
        )
    }
}

pub(crate) struct ListQuotas;

#[async_trait(?Send)]
impl OpenStoreCommand for ListQuotas {
    fn store_use(&self) -> StoreUse {
        StoreUse::ReadAll
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        CommandAnswer::rows("quotas", &operator.quotas(deadline).await?)
    }
}
