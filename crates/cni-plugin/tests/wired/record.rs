//! Reads the recording of Calico's main plugin, case by case.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::{Map, Value, json};

pub(crate) type Documents = BTreeMap<String, Value>;

/// The content of `fixtures/calico-plugin/transcript.json`, whose fields are explained in the folder's README.
#[derive(Debug, Deserialize)]
pub(crate) struct Record {
    /// The store's documents at the start of each case.
    pub(crate) start: Documents,
    /// The IPAM plugins in the recording's `CNI_PATH` that are scripts: the name and the script of each plugin.
    pub(crate) ipam_plugins: BTreeMap<String, String>,
    pub(crate) cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) setup: Setup,
    /// The steps of the case in order: plugin calls, and changes that are not made by the plugin.
    pub(crate) steps: Vec<Value>,
}

/// The setup of a recorded case, in addition to the `start` documents.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Setup {
    /// The content of the file `<files>/nodename`, if the file exists.
    pub(crate) nodename_file: Option<String>,
    #[serde(default)]
    pub(crate) store: Documents,
    /// Keys of `start` documents that were not in the store when this case was recorded.
    #[serde(default)]
    pub(crate) without: Vec<String>,
    /// More files of the recorded case: the path and the content of each file.
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
    /// Returns the store's documents at the start of the recorded case.
    pub(crate) fn documents(&self) -> Documents {
        let mut documents = record().start.clone();
        documents.retain(|key, _| !self.setup.without.contains(key));
        documents.extend(self.setup.store.clone());
        documents
    }
}

/// Returns the recording of Calico's main plugin, whose file is read only by the first call.
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

/// Finds a recorded step of a case by its number.
pub(crate) fn step(case_name: &str, number: usize) -> Option<&'static Value> {
    case(case_name)?.steps.get(number.checked_sub(1)?)
}

/// Returns true if a recorded step is a plugin call.
pub(crate) fn is_call(step: &Value) -> bool {
    step.get("exit").is_some()
}

/// The fields of a recorded step that contain the state after the plugin call.
pub(crate) const STATE: [&str; 4] = ["etcd", "host", "host_local_files", "netns"];

/// Returns the parts of a recorded plugin call that are compared, with default values for omitted parts. `before` is
/// the state before the call; it is also used as the state after the call if the recording says that nothing changed.
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

/// Replaces strings in all string values and member names of a JSON value.
pub(crate) fn replaced(value: &Value, texts: &[(&str, &str)]) -> Value {
    let text = |text: &str| texts.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
    match value {
        Value::String(string) => text(string).into(),
        Value::Array(items) => items.iter().map(|item| replaced(item, texts)).collect(),
        Value::Object(fields) => fields.iter().map(|(name, value)| (text(name), replaced(value, texts))).collect(),
        other => other.clone(),
    }
}
