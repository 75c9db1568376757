//! Shows documents in calicoctl's format, with calicoctl's table columns, for the command `margay get`.

use ipam_operator::Operator;
use ipam_operator::documents::{DocumentKind, StoredDocument};
use kv::Deadline;
use serde_json::{Map, Value, json};

use super::NamespaceScope;
use crate::command::CommandAnswer;
use crate::error::{CommandFailure, CommandResult};
use crate::output::{SortedJson, aligned, printable};

/// Selects which metadata fields of a document are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DocumentForm {
    Stored,
    /// All metadata fields are shown except those in [`LOCAL_METADATA`].
    Export,
}

/// The metadata fields of a document that are meaningful only in this store.
const LOCAL_METADATA: [&str; 6] =
    ["uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "generation", "namespace"];

impl DocumentForm {
    fn of(self, mut document: Map<String, Value>) -> Map<String, Value> {
        if self == Self::Export
            && let Some(metadata) = document.get_mut("metadata").and_then(Value::as_object_mut)
        {
            metadata.retain(|name, _| !LOCAL_METADATA.contains(&name.as_str()));
        }
        document
    }
}

pub(super) async fn get_all(
    operator: &Operator,
    kind: DocumentKind,
    scope: &NamespaceScope<'_>,
    deadline: Deadline,
) -> CommandResult<CommandAnswer> {
    let documents = operator.documents(kind, &scope.listed(), deadline).await?;
    let rows: Vec<_> = documents.items.into_iter().map(|shown| shown.document).collect();
    let list = json!({
        "kind": format!("{kind}List"),
        "apiVersion": "projectcalico.org/v3",
        "metadata": {"resourceVersion": documents.revision.to_string()},
        "items": rows,
    });
    answer(&[DocumentTable { kind, rows }], scope, &list)
}

/// Shows the documents that are identified by kind and name. If some documents do not exist, the other documents are
/// shown, and then the command fails.
pub(super) async fn get_named(
    operator: &Operator,
    names: &[(DocumentKind, String)],
    form: DocumentForm,
    scope: &NamespaceScope<'_>,
    deadline: Deadline,
) -> CommandResult<CommandAnswer> {
    let found = operator.documents_named(names, deadline).await?;
    let (mut tables, mut missing) = (Vec::new(), Vec::new());
    for ((kind, _), shown) in names.iter().zip(found) {
        match shown {
            Ok(StoredDocument { document, .. }) => {
                tables.push(DocumentTable { kind: *kind, rows: vec![form.of(document)] });
            }
            Err(error) => missing.push(printable(&error.to_string())),
        }
    }
    let mut values: Vec<Value> =
        tables.iter().flat_map(|table| table.rows.iter().cloned().map(Value::Object)).collect();
    let value = if values.len() == 1 { values.remove(0) } else { Value::Array(values) };
    let failure = (!missing.is_empty()).then(|| {
        let kind = names.first().map_or("ippool", |(kind, _)| short(*kind));
        CommandFailure::new(missing.join("\n")).hint(format!("list the existing resources with: margay get {kind}"))
    });
    match failure {
        Some(failure) if tables.is_empty() => Err(failure),
        Some(failure) => Ok(answer(&tables, scope, &value)?.incomplete(failure)),
        None => answer(&tables, scope, &value),
    }
}

fn answer(tables: &[DocumentTable], scope: &NamespaceScope<'_>, value: &Value) -> CommandResult<CommandAnswer> {
    let text = |width| -> String { tables.iter().map(|table| table.text(width, scope)).collect() };
    Ok(CommandAnswer::new("", &SortedJson(value))?.with_layout(text(TableWidth::Usual), text(TableWidth::Wide)))
}

/// Returns the short name by which `margay get` shows all documents of a kind.
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

/// The AS number that is shown for a node without an AS number of its own.
const DEFAULT_AS_NUMBER: &str = "64512";

/// Maximum length in characters of a list in a table cell.
const MAX_CELL_CHARS: usize = 80;

struct DocumentTable {
    kind: DocumentKind,
    rows: Vec<Map<String, Value>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TableWidth {
    /// The columns that `-o ps` shows.
    Usual,
    /// The columns that `-o wide` shows.
    Wide,
}

impl DocumentTable {
    /// Formats the documents as a table. The table has a column for namespaces if `--namespace` or `--all-namespaces`
    /// was given.
    fn text(&self, width: TableWidth, scope: &NamespaceScope<'_>) -> String {
        let namespace = (self.kind.is_namespaced() && scope.is_explicit()).then_some("NAMESPACE");
        let columns: Vec<&str> = namespace.into_iter().chain(columns(self.kind, width).iter().copied()).collect();
        let headings = columns.iter().map(|column| (*column).to_owned()).collect();
        let row =
            |document: &Map<String, Value>| columns.iter().map(|column| printable(&cell(document, column))).collect();
        let rows: Vec<Vec<String>> = std::iter::once(headings).chain(self.rows.iter().map(row)).collect();
        aligned(&rows)
    }
}

fn columns(kind: DocumentKind, width: TableWidth) -> &'static [&'static str] {
    match (kind, width) {
        (DocumentKind::Pool, TableWidth::Usual) => &["NAME", "CIDR", "SELECTOR"],
        (DocumentKind::Pool, TableWidth::Wide) => &[
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
        (DocumentKind::Reservation | DocumentKind::Node | DocumentKind::Profile, TableWidth::Usual) => &["NAME"],
        (DocumentKind::Reservation, TableWidth::Wide) => &["NAME", "CIDRS"],
        (DocumentKind::Node, TableWidth::Wide) => &["NAME", "ASN", "IPV4", "IPV6"],
        (DocumentKind::Profile, TableWidth::Wide) => &["NAME", "LABELS"],
        (DocumentKind::Settings, TableWidth::Usual) => &["NAME", "STRICTAFFINITY", "AUTOALLOCATEBLOCKS"],
        (DocumentKind::Settings, TableWidth::Wide) => {
            &["NAME", "STRICTAFFINITY", "AUTOALLOCATEBLOCKS", "MAXBLOCKSPERHOST"]
        }
        (DocumentKind::WorkloadEndpoint, TableWidth::Usual) => &["WORKLOAD", "NODE", "NETWORKS", "INTERFACE"],
        (DocumentKind::WorkloadEndpoint, TableWidth::Wide) => {
            &["NAME", "WORKLOAD", "NODE", "NETWORKS", "INTERFACE", "PROFILES", "NATS"]
        }
    }
}

fn cell(document: &Map<String, Value>, column: &str) -> String {
    let spec = |field: &str| document.get("spec").and_then(|spec| spec.get(field)).unwrap_or(&Value::Null);
    let bgp = |field: &str| text(spec("bgp").get(field).unwrap_or(&Value::Null));
    let switch = |field: &str| spec(field).as_bool().unwrap_or(false).to_string();
    let metadata =
        |field: &str| text(document.get("metadata").and_then(|metadata| metadata.get(field)).unwrap_or(&Value::Null));
    match column {
        "NAME" => metadata("name"),
        "NAMESPACE" => metadata("namespace"),
        "CIDR" => text(spec("cidr")),
        "SELECTOR" => text(spec("nodeSelector")),
        "NAT" => switch("natOutgoing"),
        "IPIPMODE" => text(spec("ipipMode")),
        "VXLANMODE" => text(spec("vxlanMode")),
        "DISABLED" => switch("disabled"),
        "DISABLEBGPEXPORT" => switch("disableBGPExport"),
        "ASSIGNMENTMODE" => text(spec("assignmentMode")),
        "CIDRS" => shorten_list(joined(spec("reservedCIDRs"), text)),
        "ASN" if !spec("bgp").is_object() => String::new(),
        "ASN" => Some(bgp("asNumber")).filter(|number| !number.is_empty()).unwrap_or(format!("({DEFAULT_AS_NUMBER})")),
        "IPV4" => bgp("ipv4Address"),
        "IPV6" => bgp("ipv6Address"),
        "STRICTAFFINITY" => switch("strictAffinity"),
        "AUTOALLOCATEBLOCKS" => switch("autoAllocateBlocks"),
        "MAXBLOCKSPERHOST" => text(spec("maxBlocksPerHost")),
        "WORKLOAD" => Some(text(spec("workload"))).filter(|name| !name.is_empty()).unwrap_or(text(spec("pod"))),
        "NODE" => text(spec("node")),
        "NETWORKS" => joined(spec("ipNetworks"), text),
        "INTERFACE" => text(spec("interfaceName")),
        "PROFILES" => joined(spec("profiles"), text),
        "NATS" => {
            joined(spec("ipNATs"), |nat| format!("{{{} {}}}", text(&nat["internalIP"]), text(&nat["externalIP"])))
        }
        "LABELS" => pairs(spec("labelsToApply")),
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

/// Formats each item of a JSON array, and joins the resulting strings with commas.
fn joined(value: &Value, item: impl Fn(&Value) -> String) -> String {
    value.as_array().into_iter().flatten().map(item).collect::<Vec<_>>().join(",")
}

/// Lists the fields of an object as `name=value`, sorted by name and joined with commas.
fn pairs(value: &Value) -> String {
    let fields = value.as_object().into_iter().flatten();
    let mut pairs: Vec<String> = fields.map(|(name, value)| format!("{name}={}", text(value))).collect();
    pairs.sort_unstable();
    pairs.join(",")
}

/// Cuts off the end of a list that is too long for a table cell.
fn shorten_list(list: String) -> String {
    if list.len() <= MAX_CELL_CHARS {
        return list;
    }
    let cut: String = list.chars().take(MAX_CELL_CHARS - 3).collect();
    format!("{cut}...")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn printed(kind: DocumentKind, document: Value, width: TableWidth) -> String {
        let Value::Object(document) = document else { panic!("{document}") };
        DocumentTable { kind, rows: vec![document] }.text(width, &NamespaceScope::Default)
    }

    #[test]
    fn get_tables_match_calicoctl() {
        let pool = json!({"metadata": {"name": "main"}, "spec": {"cidr": "10.65.0.0/16", "nodeSelector": "all()",
            "ipipMode": "Never", "vxlanMode": "Always", "natOutgoing": true, "assignmentMode": "Automatic"}});
        assert_eq!(
            printed(DocumentKind::Pool, pool.clone(), TableWidth::Usual),
            "NAME   CIDR           SELECTOR   \nmain   10.65.0.0/16   all()      \n\n"
        );
        assert_eq!(
            printed(DocumentKind::Pool, pool, TableWidth::Wide),
            "\
NAME   CIDR           NAT    IPIPMODE   VXLANMODE   DISABLED   DISABLEBGPEXPORT   SELECTOR   ASSIGNMENTMODE   \n\
main   10.65.0.0/16   true   Never      Always      false      false              all()      Automatic        \n\n"
        );
        let node = json!({"metadata": {"name": "n1"}, "spec": {"bgp": {"ipv4Address": "10.0.0.1/24"}}});
        assert_eq!(
            printed(DocumentKind::Node, node, TableWidth::Wide),
            "NAME   ASN       IPV4          IPV6   \nn1     (64512)   10.0.0.1/24          \n\n"
        );
        let bare = json!({"metadata": {"name": "n\u{1b}"}, "spec": {}});
        assert_eq!(
            printed(DocumentKind::Node, bare, TableWidth::Wide),
            "NAME      ASN   IPV4   IPV6   \nn\\u{1b}                       \n\n"
        );
        let networks: Vec<String> = (0..9).map(|n| format!("10.0.{n}.0/24")).collect();
        let reservation = json!({"metadata": {"name": "r"}, "spec": {"reservedCIDRs": networks}});
        let text = printed(DocumentKind::Reservation, reservation, TableWidth::Wide);
        let cell = text.lines().nth(1).unwrap().split_whitespace().nth(1).unwrap();
        assert!(cell.len() == 80 && cell.ends_with("..."), "{text}");
        let settings =
            json!({"metadata": {"name": "default"}, "spec": {"strictAffinity": true, "maxBlocksPerHost": 4}});
        assert_eq!(
            printed(DocumentKind::Settings, settings, TableWidth::Wide),
            "\
NAME      STRICTAFFINITY   AUTOALLOCATEBLOCKS   MAXBLOCKSPERHOST   \n\
default   true             false                4                  \n\n"
        );
    }
}
