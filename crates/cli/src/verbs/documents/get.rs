//! `get`: documents as calicoctl shows them.

use ipam_operator::Operator;
use ipam_operator::documents::{DocumentKind, Shown};
use kv::Deadline;
use serde_json::{Map, Value, json};

use super::namespace::Asked;
use super::table::{Table, Width};
use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::output::{Ordered, printable};

/// The part of a document that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The document as it is stored.
    Stored,
    /// The document without the metadata that only this store has.
    Export,
}

/// The metadata that only this store has.
const LOCAL: [&str; 6] =
    ["uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "generation", "namespace"];

impl Form {
    fn of(self, mut document: Map<String, Value>) -> Map<String, Value> {
        if self == Self::Export
            && let Some(metadata) = document.get_mut("metadata").and_then(Value::as_object_mut)
        {
            metadata.retain(|name, _| !LOCAL.contains(&name.as_str()));
        }
        document
    }
}

/// Shows all documents of a kind, as one list.
pub(super) async fn all(
    operator: &Operator,
    kind: DocumentKind,
    asked: &Asked<'_>,
    deadline: Deadline,
) -> Result<Answer> {
    let documents = operator.documents(kind, &asked.listed(), deadline).await?;
    let rows: Vec<_> = documents.items.into_iter().map(|shown| shown.document).collect();
    let list = json!({
        "kind": format!("{kind}List"),
        "apiVersion": "projectcalico.org/v3",
        "metadata": {"resourceVersion": documents.revision.to_string()},
        "items": rows,
    });
    answer(&[Table { kind, rows }], asked, &list)
}

/// Shows the documents of these full names, each by itself. A name without a document is an error after the others.
pub(super) async fn named(
    operator: &Operator,
    names: &[(DocumentKind, String)],
    form: Form,
    asked: &Asked<'_>,
    deadline: Deadline,
) -> Result<Answer> {
    let found = operator.documents_named(names, deadline).await?;
    let (mut tables, mut missing) = (Vec::new(), Vec::new());
    for ((kind, _), shown) in names.iter().zip(found) {
        match shown {
            Ok(Shown { document, .. }) => tables.push(Table { kind: *kind, rows: vec![form.of(document)] }),
            Err(error) => missing.push(printable(&error.to_string())),
        }
    }
    let mut values: Vec<Value> =
        tables.iter().flat_map(|table| table.rows.iter().cloned().map(Value::Object)).collect();
    let value = if values.len() == 1 { values.remove(0) } else { Value::Array(values) };
    let failure = (!missing.is_empty()).then(|| {
        let kind = names.first().map_or("ippool", |(kind, _)| short(*kind));
        Failure::new(missing.join("\n")).hint(format!("see which there are with: margay get {kind}"))
    });
    match failure {
        Some(failure) if tables.is_empty() => Err(failure),
        Some(failure) => Ok(answer(&tables, asked, &value)?.incomplete(failure)),
        None => answer(&tables, asked, &value),
    }
}

fn answer(tables: &[Table], asked: &Asked<'_>, value: &Value) -> Result<Answer> {
    let text = |width| -> String { tables.iter().map(|table| table.text(width, asked)).collect() };
    Ok(Answer::new("", &Ordered(value))?.laid_out(text(Width::Usual), text(Width::Wide)))
}

/// The word behind `margay get` that shows all documents of a kind.
pub(super) fn short(kind: DocumentKind) -> &'static str {
    match kind {
        DocumentKind::Pool => "ippool",
        DocumentKind::Reservation => "ipreservation",
        DocumentKind::Node => "node",
        DocumentKind::Settings => "ipamconfig",
        DocumentKind::WorkloadEndpoint => "workloadendpoint -A",
        DocumentKind::Profile => "profile",
    }
}
