//! Reads and writes the check report in the format of `calicoctl ipam check -o`. Both calicoctl and margay accept this
//! check report in `ipam release --from-report`.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use datastore::text_fault;
use ipam_core::attachment::{namespace_of, node_of, pod_of};
use ipam_operator::inspect::{AllocatedAddress, ClusterFacts, Inspection};
use serde::{Deserialize, Deserializer, Serialize};

use super::StoreInspection;
use crate::error::{CommandFailure, CommandResult};
use crate::output::write_whole_file;

/// The report that `ipam check` writes into a file. The names of the report's fields are calicoctl's.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "struct Report")]
pub(crate) struct CheckReport {
    version: String,
    /// Calico's id of the cluster, or else the id of the store.
    #[serde(rename = "clusterGUID")]
    pub(crate) cluster_guid: String,
    datastore_locked: bool,
    /// The revision of Calico's ClusterInformation; empty if the store has no ClusterInformation.
    pub(crate) cluster_information_revision: String,
    cluster_type: String,
    #[serde(deserialize_with = "or_nothing")]
    pub(crate) allocations: BTreeMap<IpAddr, Vec<ReportedAddress>>,
    /// The handles that hold no address.
    #[serde(deserialize_with = "or_nothing")]
    pub(crate) leaked_handles: Vec<LeakedHandle>,
}

/// Deserialises a list or map, which Go may write as `null` if it is empty.
fn or_nothing<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// An address in a check report that is assigned or in cooldown.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "struct Row")]
pub(crate) struct ReportedAddress {
    pub(crate) ip: String,
    /// The handle that holds the address; empty if the address has no handle.
    pub(crate) handle: String,
    pub(crate) sequence_number: Option<u64>,
    pod: String,
    namespace: String,
    node: String,
    #[serde(rename = "type")]
    kind: String,
    creation_timestamp: String,
    /// False if it is certain that no container uses the address.
    pub(crate) in_use: bool,
    borrowed: bool,
    pub(crate) cooling_down: bool,
    #[serde(deserialize_with = "or_nothing")]
    owners: Vec<String>,
}

/// A handle in a check report that holds no address. The JSON names of the fields are capitalised, as Go writes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct LeakedHandle {
    #[serde(rename = "ID")]
    pub(crate) id: String,
    #[serde(rename = "UID")]
    uid: Option<String>,
    /// The revision at which the handle was last written.
    pub(crate) revision: String,
}

impl CheckReport {
    /// Creates the check report of an inspection. Call this only after an inspection that recorded the store's
    /// addresses.
    pub(super) fn new(inspected: &StoreInspection) -> Self {
        let inspection = &inspected.inspection;
        let mut allocations: BTreeMap<IpAddr, Vec<ReportedAddress>> = BTreeMap::new();
        for address in &inspection.allocations {
            allocations.entry(address.ip).or_default().push(ReportedAddress::new(address));
        }
        let cluster = inspection.cluster.clone().unwrap_or_default();
        let handles = inspection.leaked_handles.iter().map(|handle| LeakedHandle {
            id: handle.id.clone(),
            uid: None,
            revision: handle.revision.to_string(),
        });
        Self {
            version: format!("margay {}", env!("CARGO_PKG_VERSION")),
            cluster_guid: guid(inspected).to_owned(),
            datastore_locked: cluster.locked,
            cluster_information_revision: revision(inspection),
            cluster_type: cluster.kind,
            leaked_handles: handles.collect(),
            allocations,
        }
    }

    pub(crate) fn read(path: &Path) -> CommandResult<Self> {
        let hint = "name a file that `margay ipam check --report` or `calicoctl ipam check -o` has written";
        let text = fs::read(path)
            .map_err(|error| CommandFailure::new(format!("cannot read {}: {error}", path.display())).hint(hint))?;
        serde_json::from_slice(&text).map_err(|error| {
            let fault = text_fault(&text).map_or_else(|| error.to_string(), |fault| fault.to_string());
            CommandFailure::new(format!("{} is no report: {fault}", path.display())).hint(hint)
        })
    }
}

/// Returns Calico's id of the cluster, or else the id of the store.
pub(crate) fn guid(inspected: &StoreInspection) -> &str {
    let known = inspected.inspection.cluster.as_ref().map(|cluster| cluster.guid.as_str());
    known.filter(|guid| !guid.is_empty()).unwrap_or(&inspected.store)
}

/// Returns the revision of Calico's ClusterInformation; empty if the store has no ClusterInformation.
pub(crate) fn revision(inspection: &Inspection) -> String {
    inspection.cluster.as_ref().map(|ClusterFacts { revision, .. }| revision.to_string()).unwrap_or_default()
}

impl ReportedAddress {
    fn new(address: &AllocatedAddress) -> Self {
        let text = |name: &str| address.attributes.get(name).cloned().unwrap_or_default();
        let named =
            |of: fn(&BTreeMap<String, String>) -> Option<&str>| of(&address.attributes).unwrap_or_default().to_owned();
        Self {
            ip: address.ip.to_string(),
            handle: address.handle.clone().unwrap_or_default(),
            sequence_number: Some(address.sequence_number),
            pod: named(pod_of),
            namespace: named(namespace_of),
            node: named(node_of),
            kind: text("type"),
            creation_timestamp: text("timestamp"),
            in_use: !address.node_gone && !address.cooling,
            borrowed: address.borrowed,
            cooling_down: address.cooling,
            owners: Vec::new(),
        }
    }
}

/// Writes a check report to a file atomically. An existing report file is replaced when the new file is complete.
pub(super) fn write(path: &Path, report: &CheckReport) -> CommandResult<()> {
    let text = serde_json::to_string_pretty(report).map_err(|error| CommandFailure::new(format!("JSON: {error}")))?;
    write_whole_file(path, &text)
}
