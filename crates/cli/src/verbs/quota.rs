//! Quotas.

use async_trait::async_trait;
use ipam_core::Error;
use ipam_core::model::{Quotas, Subject};
use ipam_operator::Operator;
use kv::Deadline;
use serde::Serialize;
use serde_json::json;

use crate::answer::Answer;
use crate::args::{QuotaDelete, QuotaSet};
use crate::command::OnOpenStore;
use crate::error::{Failure, Result};
use crate::output::{Column, Columns, Row, printable};
use crate::store::Need;

/// A quota as a row.
#[derive(Debug, Serialize)]
struct QuotaRow {
    kind: &'static str,
    limit: u64,
    name: String,
    percent: Option<u64>,
    /// `None` for the limit of any other subject.
    used: Option<u64>,
}

impl Row for QuotaRow {
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
impl OnOpenStore for QuotaSet {
    fn need(&self) -> Need {
        Need::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let (of, limit) = (self.of.subject(), self.limit);
        let before = operator.set_quota(&of, limit, deadline).await?;
        let was = before.map(|before| format!(" (was {before})")).unwrap_or_default();
        let done = if self.dry_run { "Dry run: would set" } else { "Successfully set" };
        Answer::new(
            format!("{done} the quota of {of} to {limit}{was}"),
            &json!({ "kind": of.kind.as_str(), "name": of.name, "limit": limit, "before": before,
                "dry_run": self.dry_run }),
        )
    }
}

#[async_trait(?Send)]
impl OnOpenStore for QuotaDelete {
    fn need(&self) -> Need {
        Need::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let of = self.of.subject();
        let limit = operator.delete_quota(&of, deadline).await.map_err(|error| match error {
            Error::NotFound { .. } => Failure::from(error).hint("see which there are with: margay quota list"),
            _ => error.into(),
        })?;
        let done = if self.dry_run { "Dry run: would delete" } else { "Successfully deleted" };
        Answer::new(
            format!("{done} the quota of {of} ({limit})"),
            &json!({ "kind": of.kind.as_str(), "name": of.name, "limit": limit, "dry_run": self.dry_run }),
        )
    }
}

/// The quotas with their use.
pub(super) struct List;

#[async_trait(?Send)]
impl OnOpenStore for List {
    fn need(&self) -> Need {
        Need::ReadAll
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let (uses, others) = operator.quotas(deadline).await?;
        let others = others.into_iter().map(|(subject, limit)| (subject, limit, None));
        let uses = uses.into_iter().map(|one| {
            let numbers = (one.used, one.percent());
            (one.subject, one.limit, Some(numbers))
        });
        let mut all: Vec<_> = others.chain(uses).collect();
        all.sort();
        let row = |(Subject { kind, name }, limit, numbers): (_, _, Option<(u64, u64)>)| QuotaRow {
            kind: kind.as_str(),
            limit,
            name,
            percent: numbers.map(|(_, percent)| percent),
            used: numbers.map(|(used, _)| used),
        };
        Answer::rows("quotas", &all.into_iter().map(row).collect::<Vec<_>>())
    }
}
