//! Derives the expected outcome of a plugin call from the recorded outcome, by a list of edits.

use serde_json::{Value, json};

use crate::exceptions::Exception;
use crate::record::{self, STATE, replaced};
use crate::{Kind, Mode};

/// A change from a recorded outcome to the expected outcome. In an edit, the path to a value consists of the names of
/// object members and the indexes of array items.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Edit {
    /// Sets the value at a path of the outcome to the given JSON. The string [`ANY`](crate::matching::ANY) in the given
    /// JSON matches any value, or the rest of a string.
    Is(&'static [&'static str], &'static str),
    /// Removes the value at a path of the outcome.
    Gone(&'static [&'static str]),
    /// Replaces a string everywhere in the outcome.
    Text(&'static str, &'static str),
    /// The expected state after the plugin call is the state before the call.
    AsBefore,
    /// The plugin call must change nothing except the containers' sysctls, which must equal the recorded ones.
    AsBeforeButSettings,
    /// At this path, the expected outcome has the value that was recorded for a different step of the same case.
    Copy(&'static [&'static str], usize),
    /// The expected exit status, output, IPAM calls and state are taken from a recorded step, possibly of another case,
    /// with some strings replaced.
    Like(&'static str, usize, &'static [(&'static str, &'static str)]),
    /// The expected state is the recorded state after some step, possibly of another test case, with some strings
    /// replaced.
    StateLike(&'static str, usize, &'static [(&'static str, &'static str)]),
    /// Appends to the expected IPAM calls a DEL that releases the addresses of the failed ADD.
    TakenBack,
    /// Replaces the User-Agent header `.0` by `.1` in the expected requests to the Kubernetes API.
    CallsItself(&'static str, &'static str),
    /// Replaces the `Accept` header `.0` by `.1` in the expected requests to the Kubernetes API.
    Accepts(&'static str, &'static str),
    /// Expects that a program sends no request to the Kubernetes API.
    AsksNothing(&'static str),
}

impl Edit {
    /// Applies this edit to an outcome. Fails if the recorded outcome lacks the value that the edit changes.
    pub(crate) fn apply(self, outcome: &mut Value, case: &str, before: &Value) -> Result<(), String> {
        let missing = |path: &[&str]| format!("nothing was recorded at {path:?}");
        let other = |case: &str, step| record::step(case, step).ok_or_else(|| format!("there is no {case} {step}"));
        match self {
            Self::Is(path, text) => {
                let value = serde_json::from_str(text).map_err(|error| format!("{text}: {error}"))?;
                put(outcome, path, value).ok_or_else(|| missing(path))?;
            }
            Self::Gone(path) => remove(outcome, path).ok_or_else(|| missing(path))?,
            Self::Text(from, to) => *outcome = replaced(outcome, &[(from, to)]),
            Self::AsBefore => set_state(outcome, &json!({"state": "as before"}), before),
            Self::AsBeforeButSettings => {
                let recorded = outcome["netns"].take();
                set_state(outcome, &json!({"state": "as before"}), before);
                for (netns, container) in outcome["netns"].as_object_mut().into_iter().flatten() {
                    for (path, value) in container["sysctls"].as_object_mut().into_iter().flatten() {
                        *value = recorded[netns]["sysctls"][path].clone();
                    }
                }
            }
            Self::Copy(path, step) => {
                let other = record::outcome(other(case, step)?, before);
                let value = path.iter().try_fold(&other, |value, name| child(value, name));
                put(outcome, path, value.ok_or_else(|| missing(path))?.clone()).ok_or_else(|| missing(path))?;
            }
            Self::Like(case, step, texts) => {
                let other = replaced(other(case, step)?, texts);
                for part in ["exit", "stdout", "stdout_text", "ipam_calls"] {
                    outcome.as_object_mut().ok_or("no outcome")?.remove(part);
                    if let Some(value) = other.get(part) {
                        outcome[part] = value.clone();
                    }
                }
                set_state(outcome, &other, before);
            }
            Self::StateLike(case, step, texts) => set_state(outcome, &replaced(other(case, step)?, texts), before),
            Self::TakenBack => {
                let calls = outcome["ipam_calls"].as_array_mut().ok_or("no calls")?;
                let mut call = calls.first().ok_or("no call to take back")?.clone();
                call["env"]["CNI_COMMAND"] = "DEL".into();
                let args = call["env"]["CNI_ARGS"].as_str().unwrap_or_default();
                call["env"]["CNI_ARGS"] = args.split(";IP=").next().into();
                calls.push(call);
            }
            Self::CallsItself(from, to) => {
                for request in requests(outcome).into_iter().flatten().filter(|request| request["by"] == from) {
                    request["by"] = to.into();
                }
            }
            Self::Accepts(from, to) => {
                for request in requests(outcome).into_iter().flatten().filter(|request| request["accept"] == from) {
                    request["accept"] = to.into();
                }
            }
            Self::AsksNothing(program) => {
                requests(outcome).into_iter().for_each(|all| all.retain(|request| request["by"] != program));
            }
        }
        Ok(())
    }
}

fn requests(outcome: &mut Value) -> Option<&mut Vec<Value>> {
    outcome.get_mut("api_requests").and_then(Value::as_array_mut)
}

fn set_state(outcome: &mut Value, from: &Value, before: &Value) {
    let state = record::state(from, before);
    if let Some(outcome) = outcome.as_object_mut() {
        outcome.retain(|name, _| !STATE.contains(&name.as_str()));
        outcome.extend(state);
    }
}

fn child<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        other => other.get(name),
    }
}

fn child_mut<'a>(value: &'a mut Value, name: &str) -> Option<&'a mut Value> {
    match value {
        Value::Array(items) => items.get_mut(name.parse::<usize>().ok()?),
        other => other.get_mut(name),
    }
}

/// Sets a value at a path, in an object or array that already exists.
fn put(value: &mut Value, path: &[&str], new: Value) -> Option<()> {
    let (name, parents) = path.split_last()?;
    let parent = parents.iter().try_fold(value, |value, name| child_mut(value, name))?;
    match parent {
        Value::Object(fields) => drop(fields.insert((*name).to_owned(), new)),
        Value::Array(items) if name.parse() == Ok(items.len()) => items.push(new),
        other => *child_mut(other, name)? = new,
    }
    Some(())
}

fn remove(value: &mut Value, path: &[&str]) -> Option<()> {
    let (name, parents) = path.split_last()?;
    let parent = parents.iter().try_fold(value, |value, name| child_mut(value, name))?;
    match parent {
        Value::Array(items) => {
            let index = name.parse::<usize>().ok().filter(|index| *index < items.len())?;
            items.remove(index);
            Some(())
        }
        other => other.as_object_mut()?.remove(*name).map(drop),
    }
}

/// Returns the recorded outcome of a plugin call, changed by every exception that applies to the call. If IPAM runs in
/// the main plugin's process, the expected outcome contains no calls of `calico-ipam`.
pub(crate) fn expected(
    step: &Value,
    case: &str,
    before: &Value,
    exceptions: &[&Exception],
    mode: Mode,
    (kind, store): (Kind, &str),
) -> Result<Value, String> {
    let mut outcome = record::outcome(step, before);
    for exception in exceptions {
        for edit in exception.edits {
            edit.apply(&mut outcome, case, before).map_err(|wrong| format!("{exception}: {wrong}"))?;
        }
    }
    let mut outcome = on_store(&outcome, kind, store);
    for call in outcome["ipam_calls"].as_array_mut().into_iter().flatten() {
        // Write the network configuration as compact JSON with sorted member names, as Go does.
        if call["stdin"].is_object() {
            call["stdin"] = call["stdin"].to_string().into();
        }
    }
    if mode == Mode::InProcess
        && let Some(calls) = outcome["ipam_calls"].as_array_mut()
    {
        calls.retain(|call| call["plugin"] != "calico-ipam");
    }
    Ok(outcome)
}

/// Replaces the store settings in every network configuration inside a recorded value.
pub(crate) fn on_store(value: &Value, kind: Kind, path: &str) -> Value {
    match value {
        Value::Object(fields) => {
            let mut fields: serde_json::Map<String, Value> =
                fields.iter().map(|(name, value)| (name.clone(), on_store(value, kind, path))).collect();
            if kind != Kind::Etcd && fields.get("datastore_type").is_some_and(|kind| kind == "etcdv3") {
                fields.insert("datastore_type".to_owned(), kind.name().into());
                fields.insert("datastore_path".to_owned(), path.into());
                fields.remove("etcd_endpoints");
            }
            fields.into()
        }
        Value::Array(items) => items.iter().map(|item| on_store(item, kind, path)).collect(),
        other => other.clone(),
    }
}
