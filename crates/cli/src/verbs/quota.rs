//! Quotas.

use ipam_core::Error;
use ipam_core::model::{Quotas, Subject};
use ipam_operator::Operator;
use kv::Deadline;
use serde::Serialize;
use serde_json::json;

use super::rehearsal::Run;
use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::output::{Column, printable, render};

/// A quota as a row.
#[derive(Debug, Serialize)]
struct QuotaRow {
    kind: &'static str,
    name: String,
    limit: u64,
    /// `None` for the limit of any other subject.
    used: Option<u64>,
    percent: Option<u64>,
}

/// Sets a limit.
pub(super) async fn set(ipam: &Operator, of: &Subject, limit: u64, run: Run, deadline: Deadline) -> Result<Answer> {
    let before = ipam.set_quota(of, limit, deadline).await?;
    let row = json!({ "kind": of.kind.as_str(), "name": of.name, "limit": limit, "before": before,
        "dry_run": run == Run::Dry });
    let was = before.map(|before| format!(" (was {before})")).unwrap_or_default();
    Answer::new(
        match run {
            Run::Dry => format!("Dry run: would set the quota of {of} to {limit}{was}"),
            Run::Real => format!("Successfully set the quota of {of} to {limit}{was}"),
        },
        &row,
    )
}

/// Deletes a limit.
pub(super) async fn delete(ipam: &Operator, of: &Subject, run: Run, deadline: Deadline) -> Result<Answer> {
    let limit = ipam.delete_quota(of, deadline).await.map_err(|error| match error {
        Error::NotFound { .. } => Failure::from(error).hint("see which there are with: margay quota list"),
        _ => error.into(),
    })?;
    let row = json!({ "kind": of.kind.as_str(), "name": of.name, "limit": limit, "dry_run": run == Run::Dry });
    Answer::new(
        match run {
            Run::Dry => format!("Dry run: would delete the quota of {of} ({limit})"),
            Run::Real => format!("Successfully deleted the quota of {of} ({limit})"),
        },
        &row,
    )
}

/// Lists the quotas with their use.
pub(super) async fn list(ipam: &Operator, deadline: Deadline) -> Result<Answer> {
    let (uses, others) = ipam.quotas(deadline).await?;
    let others = others.into_iter().map(|(subject, limit)| (subject, limit, None));
    let uses = uses.into_iter().map(|one| {
        let numbers = (one.used, one.percent());
        (one.subject, one.limit, Some(numbers))
    });
    let mut all: Vec<_> = others.chain(uses).collect();
    all.sort();
    let rows: Vec<QuotaRow> = all
        .into_iter()
        .map(|(Subject { kind, name }, limit, numbers)| QuotaRow {
            kind: kind.as_str(),
            name,
            limit,
            used: numbers.map(|(used, _)| used),
            percent: numbers.map(|(_, percent)| percent),
        })
        .collect();
    let columns = [
        Column::Text("KIND"),
        Column::Text("NAME"),
        Column::Number("IN USE"),
        Column::Number("LIMIT"),
        Column::Number("PERCENT"),
    ];
    let number = |number: Option<u64>, unit: &str| number.map(|number| format!("{number}{unit}")).unwrap_or_default();
    let name = |row: &QuotaRow| match row.name.as_str() {
        Quotas::ANY_OTHER => "* (any other)".to_owned(),
        name => printable(name),
    };
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![row.kind.to_owned(), name(row), number(row.used, ""), row.limit.to_string(), number(row.percent, "%")]
        })
        .collect();
    Answer::new(render(&columns, &cells), &json!({ "quotas": rows }))
}
