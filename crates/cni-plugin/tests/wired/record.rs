//! Reads the recording of Calico's main plugin, case by case.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The documents of a store, by key.
pub(crate) type Documents = BTreeMap<String, Value>;

/// The content of `fixtures/calico-plugin/transcript.json`. The fixture's README explains the fields.
#[derive(Debug, Deserialize)]
pub(crate) struct Record {
    /// The store's documents at the start of a case.
    pub(crate) start: Documents,
    /// Further IPAM plugins in `CNI_PATH`: the name and script of each plugin.
    pub(crate) ipam_plugins: BTreeMap<String, String>,
    pub(crate) cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) setup: Setup,
    /// The steps of a case: calls of the plugin and changes from outside, in order.
    pub(crate) steps: Vec<Value>,
}

/// The setup of a case in addition to `start`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Setup {
    /// The content of `<files>/nodename`, if that file exists.
    pub(crate) nodename_file: Option<String>,
    #[serde(default)]
    pub(crate) store: Documents,
    /// The keys of `start` that are left out in this case.
    #[serde(default)]
    pub(crate) without: Vec<String>,
    /// Further files of the case: the path and content of each file.
    #[serde(default)]
    pub(crate) files: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) kubernetes: Value,
    #[serde(default = "one_namespace")]
    pub(crate) netns: Vec<String>,
}

fn one_namespace() -> Vec<String> {
    vec!["a".to_owned()]
}

impl Case {
    /// Returns the store's documents at the start of this case.
    pub(crate) fn documents(&self) -> Documents {
        let mut documents = record().start.clone();
        documents.retain(|key, _| !self.setup.without.contains(key));
        documents.extend(self.setup.store.clone());
        documents
    }
}

/// Returns the whole recording. The file is read only once.
pub(crate) fn record() -> &'static Record {
    static RECORD: OnceLock<Record> = OnceLock::new();
    RECORD.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/calico-plugin/transcript.json");
        let record: Record = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let calls = record.cases.iter().flat_map(|case| &case.steps).filter(|step| is_call(step)).count();
        assert_eq!((record.cases.len(), calls), (95, 429), "cases and calls");
        record
    })
}

/// Finds a recorded case by its name.
pub(crate) fn case(name: &str) -> Option<&'static Case> {
    record().cases.iter().find(|case| case.name == name)
}

/// Finds a recorded step of a case. Steps are counted from 1.
pub(crate) fn step(case_name: &str, number: usize) -> Option<&'static Value> {
    case(case_name)?.steps.get(number.checked_sub(1)?)
}

/// True if a recorded step is a call of the plugin.
pub(crate) fn is_call(step: &Value) -> bool {
    step.get("exit").is_some()
}

/// The fields of a step that contain the state after a plugin call.
pub(crate) const STATE: [&str; 4] = ["etcd", "host", "host_local_files", "netns"];

/// Returns the compared parts of a recorded plugin call, with omitted parts filled in. `before` is the state before the
/// call, for steps that were recorded without a change.
pub(crate) fn outcome(step: &Value, before: &Value) -> Value {
    let mut outcome = Map::new();
    for part in ["exit", "stdout", "stdout_text", "ipam_calls"] {
        if let Some(value) = step.get(part) {
            outcome.insert(part.to_owned(), value.clone());
        }
    }
    outcome.insert("api_requests".to_owned(), step.get("api_requests").cloned().unwrap_or_else(|| json!([])));
    outcome.extend(state(step, before));
    Value::Object(outcome)
}

/// Returns the state after a recorded plugin call.
pub(crate) fn state(step: &Value, before: &Value) -> Map<String, Value> {
    let from = if step.get("state").is_some() { before } else { step };
    let mut state: Map<String, Value> =
        STATE.iter().filter_map(|&part| Some((part.to_owned(), from.get(part)?.clone()))).collect();
    state.entry("host_local_files").or_insert_with(|| json!({}));
    if let Some(host) = state.get_mut("host").and_then(Value::as_object_mut) {
        host.entry("interfaces").or_insert_with(|| json!({}));
    }
    state
}

/// Replaces texts in all strings and names of a JSON value.
pub(crate) fn replaced(value: &Value, texts: &[(&str, &str)]) -> Value {
    let text = |text: &str| texts.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
    match value {
        Value::String(string) => text(string).into(),
        Value::Array(items) => items.iter().map(|item| replaced(item, texts)).collect(),
        Value::Object(fields) => fields.iter().map(|(name, value)| (text(name), replaced(value, texts))).collect(),
        other => other.clone(),
    }
}
