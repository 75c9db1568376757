//! `get`: documents as calicoctl shows them.

use ipam_core::Ipam;
use ipam_core::documents::{DocumentKind, Shown};
use kv::Deadline;
use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::output::{Ordered, aligned, printable};

/// The number of the system of a node that says none.
const USUAL_AS: &str = "64512";

/// The longest list of networks in a cell.
const LONGEST_CELL: usize = 80;

/// How much of a document is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// All that is stored.
    Stored,
    /// Without what only this store knows.
    Export,
}

/// The metadata that only this store knows.
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

/// What a resource or a list is shown as in tables.
struct Table {
    kind: DocumentKind,
    rows: Vec<Map<String, Value>>,
}

/// Shows all documents of a kind, as one list.
pub(super) async fn all(ipam: &Ipam, kind: DocumentKind, deadline: Deadline) -> Result<Answer> {
    let documents = ipam.documents(kind, deadline).await?;
    let rows: Vec<_> = documents.items.into_iter().map(|shown| shown.document).collect();
    let list = json!({
        "kind": format!("{kind}List"),
        "apiVersion": "projectcalico.org/v3",
        "metadata": {"resourceVersion": documents.revision.to_string()},
        "items": rows,
    });
    answer(&[Table { kind, rows }], &list)
}

/// Shows the documents of these names, each by itself; a name that there is not is an error after the others.
pub(super) async fn named(
    ipam: &Ipam,
    names: &[(DocumentKind, String)],
    form: Form,
    deadline: Deadline,
) -> Result<Answer> {
    let found = ipam.documents_named(names, deadline).await?;
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
        Some(failure) => Ok(answer(&tables, &value)?.incomplete(failure)),
        None => answer(&tables, &value),
    }
}

fn answer(tables: &[Table], value: &Value) -> Result<Answer> {
    let text = |columns: fn(DocumentKind) -> &'static [&'static str]| -> String {
        tables.iter().map(|table| table.text(columns(table.kind))).collect()
    };
    Ok(Answer::new("", &Ordered(value))?.laid_out(text(columns), text(wide_columns)))
}

impl Table {
    fn text(&self, columns: &[&str]) -> String {
        let headings = columns.iter().map(|column| (*column).to_owned()).collect();
        let row =
            |document: &Map<String, Value>| columns.iter().map(|column| printable(&cell(document, column))).collect();
        let rows: Vec<Vec<String>> = std::iter::once(headings).chain(self.rows.iter().map(row)).collect();
        aligned(&rows)
    }
}

fn columns(kind: DocumentKind) -> &'static [&'static str] {
    match kind {
        DocumentKind::Pool => &["NAME", "CIDR", "SELECTOR"],
        DocumentKind::Reservation | DocumentKind::Node => &["NAME"],
        DocumentKind::Settings => &["NAME", "STRICTAFFINITY", "AUTOALLOCATEBLOCKS"],
    }
}

fn wide_columns(kind: DocumentKind) -> &'static [&'static str] {
    match kind {
        DocumentKind::Pool => &[
            "NAME",
            "CIDR",
            "NAT",
            "IPIPMODE",
            "VXLANMODE",
            "DISABLED",
            "DISABLEBGPEXPORT",
            "SELECTOR",
            "ASSIGNMENTMODE",
        ],
        DocumentKind::Reservation => &["NAME", "CIDRS"],
        DocumentKind::Node => &["NAME", "ASN", "IPV4", "IPV6"],
        DocumentKind::Settings => &["NAME", "STRICTAFFINITY", "AUTOALLOCATEBLOCKS", "MAXBLOCKSPERHOST"],
    }
}

fn cell(document: &Map<String, Value>, column: &str) -> String {
    let spec = |field: &str| document.get("spec").and_then(|spec| spec.get(field)).unwrap_or(&Value::Null);
    let bgp = |field: &str| text(spec("bgp").get(field).unwrap_or(&Value::Null));
    let switch = |field: &str| spec(field).as_bool().unwrap_or(false).to_string();
    match column {
        "NAME" => text(document.get("metadata").and_then(|metadata| metadata.get("name")).unwrap_or(&Value::Null)),
        "CIDR" => text(spec("cidr")),
        "SELECTOR" => text(spec("nodeSelector")),
        "NAT" => switch("natOutgoing"),
        "IPIPMODE" => text(spec("ipipMode")),
        "VXLANMODE" => text(spec("vxlanMode")),
        "DISABLED" => switch("disabled"),
        "DISABLEBGPEXPORT" => switch("disableBGPExport"),
        "ASSIGNMENTMODE" => text(spec("assignmentMode")),
        "CIDRS" => joined(spec("reservedCIDRs")),
        "ASN" if !spec("bgp").is_object() => String::new(),
        "ASN" => Some(bgp("asNumber")).filter(|number| !number.is_empty()).unwrap_or(format!("({USUAL_AS})")),
        "IPV4" => bgp("ipv4Address"),
        "IPV6" => bgp("ipv6Address"),
        "STRICTAFFINITY" => switch("strictAffinity"),
        "AUTOALLOCATEBLOCKS" => switch("autoAllocateBlocks"),
        "MAXBLOCKSPERHOST" => text(spec("maxBlocksPerHost")),
        _ => String::new(),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The items with commas between them, cut where they get too long for a table.
fn joined(value: &Value) -> String {
    let items: Vec<String> = value.as_array().into_iter().flatten().map(text).collect();
    let joined = items.join(",");
    if joined.len() <= LONGEST_CELL {
        return joined;
    }
    let cut: String = joined.chars().take(LONGEST_CELL - 3).collect();
    format!("{cut}...")
}

/// What a kind is called where one types it.
pub(super) fn short(kind: DocumentKind) -> &'static str {
    match kind {
        DocumentKind::Pool => "ippool",
        DocumentKind::Reservation => "ipreservation",
        DocumentKind::Node => "node",
        DocumentKind::Settings => "ipamconfig",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(kind: DocumentKind, document: Value, columns: fn(DocumentKind) -> &'static [&'static str]) -> String {
        let Value::Object(document) = document else { panic!("{document}") };
        Table { kind, rows: vec![document] }.text(columns(kind))
    }

    #[test]
    fn tables_are_calicoctls() {
        let pool = json!({"metadata": {"name": "main"}, "spec": {"cidr": "10.65.0.0/16", "nodeSelector": "all()",
            "ipipMode": "Never", "vxlanMode": "Always", "natOutgoing": true, "assignmentMode": "Automatic"}});
        assert_eq!(
            printed(DocumentKind::Pool, pool.clone(), columns),
            "NAME   CIDR           SELECTOR   \nmain   10.65.0.0/16   all()      \n\n"
        );
        assert_eq!(
            printed(DocumentKind::Pool, pool, wide_columns),
            "\
NAME   CIDR           NAT    IPIPMODE   VXLANMODE   DISABLED   DISABLEBGPEXPORT   SELECTOR   ASSIGNMENTMODE   \n\
main   10.65.0.0/16   true   Never      Always      false      false              all()      Automatic        \n\n"
        );
        let node = json!({"metadata": {"name": "n1"}, "spec": {"bgp": {"ipv4Address": "10.0.0.1/24"}}});
        assert_eq!(
            printed(DocumentKind::Node, node, wide_columns),
            "NAME   ASN       IPV4          IPV6   \nn1     (64512)   10.0.0.1/24          \n\n"
        );
        let bare = json!({"metadata": {"name": "n\u{1b}"}, "spec": {}});
        assert_eq!(
            printed(DocumentKind::Node, bare, wide_columns),
            "NAME      ASN   IPV4   IPV6   \nn\\u{1b}                       \n\n"
        );
        let networks: Vec<String> = (0..9).map(|n| format!("10.0.{n}.0/24")).collect();
        let reservation = json!({"metadata": {"name": "r"}, "spec": {"reservedCIDRs": networks}});
        let text = printed(DocumentKind::Reservation, reservation, wide_columns);
        let cell = text.lines().nth(1).unwrap().split_whitespace().nth(1).unwrap();
        assert!(cell.len() == 80 && cell.ends_with("..."), "{text}");
        let settings =
            json!({"metadata": {"name": "default"}, "spec": {"strictAffinity": true, "maxBlocksPerHost": 4}});
        assert_eq!(
            printed(DocumentKind::Settings, settings, wide_columns),
            "\
NAME      STRICTAFFINITY   AUTOALLOCATEBLOCKS   MAXBLOCKSPERHOST   \n\
default   true             false                4                  \n\n"
        );
    }
}
