//! Writes files with documents, and reads the documents of a store.

use std::collections::BTreeMap;
use std::fs;

use kv::{Range, StoreExt};
use serde_json::Value;

use crate::common::{Done, Lab};

/// Returns the documents of the store as text, sorted by key.
pub(crate) fn stored(lab: &Lab) -> BTreeMap<String, String> {
    lab.with_ipam(async |ipam| {
        let all = ipam.store().list(Range::All).await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        all.kvs.iter().map(|kv| (text(kv.key.as_bytes()), text(kv.value.as_bytes()))).collect()
    })
}

pub(crate) fn resource(lab: &Lab, plural: &str, name: &str) -> Value {
    let key = format!("/calico/resources/v3/projectcalico.org/{plural}/{name}");
    serde_json::from_str(stored(lab).get(&key).unwrap()).unwrap()
}

pub(crate) fn put(lab: &Lab, key: &str, value: &str) {
    lab.with_ipam(async |ipam| ipam.store().put(key, value).await.unwrap());
}

/// Writes a text to a file and runs a command with `-f` and this file.
pub(crate) fn with_file(lab: &Lab, args: &str, text: &str) -> Done {
    let file = lab.folder().join("documents.yaml");
    fs::write(&file, text).unwrap();
    lab.margay(&format!("{args} -f {}", file.display()))
}

/// Returns a document in YAML; the lines of `spec` must be indented by two spaces.
pub(crate) fn document(kind: &str, name: &str, spec: &str) -> String {
    format!("apiVersion: projectcalico.org/v3\nkind: {kind}\nmetadata:\n  name: {name}\nspec:\n{spec}")
}

/// Returns a pool document with blocks of the default size /26.
pub(crate) fn pool(name: &str, cidr: &str) -> String {
    document("IPPool", name, &format!("  cidr: {cidr}\n"))
}
