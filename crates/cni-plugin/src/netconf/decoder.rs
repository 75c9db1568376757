//! Reading a configuration's values as Go does.

use agent::{CniError, Result};

use crate::gojson::Json;

/// Puts values where they belong and remembers the first of a wrong type. `path` is the way to the value from the top
/// of the configuration, as Go's errors print it.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    error: Option<String>,
}

impl Decoder {
    /// Calls `each` with the name, in lower case, and the value of every member.
    pub(crate) fn members(
        &mut self,
        value: &Json,
        path: &str,
        kind: &str,
        mut each: impl FnMut(&mut Self, &str, &Json),
    ) {
        match value {
            Json::Object(members) => {
                for (name, value) in members {
                    each(self, &name.to_ascii_lowercase(), value);
                }
            }
            Json::Null => {}
            other => self.wrong(other, path, kind),
        }
    }

    pub(crate) fn string(&mut self, target: &mut String, value: &Json, path: &str) {
        match value {
            Json::String(text) => target.clone_from(text),
            Json::Null => {}
            other => self.wrong(other, path, "string"),
        }
    }

    pub(crate) fn optional(&mut self, target: &mut Option<String>, value: &Json, path: &str) {
        let mut text = String::new();
        self.string(&mut text, value, path);
        *target = (*value != Json::Null).then_some(text);
    }

    pub(crate) fn strings(&mut self, target: &mut Vec<String>, value: &Json, path: &str) {
        target.clear();
        match value {
            Json::Array(elements) => {
                for element in elements {
                    let mut text = String::new();
                    self.string(&mut text, element, path);
                    target.push(text);
                }
            }
            Json::Null => {}
            other => self.wrong(other, path, "[]string"),
        }
    }

    pub(crate) fn bool(&mut self, target: &mut bool, value: &Json, path: &str) {
        match value {
            Json::Bool(flag) => *target = *flag,
            Json::Null => {}
            other => self.wrong(other, path, "bool"),
        }
    }

    pub(crate) fn int(&mut self, value: &Json, path: &str) -> Option<i64> {
        match value {
            Json::Number(number) if number.is_i64() => return number.as_i64(),
            Json::Null => {}
            other => self.wrong(other, path, "int"),
        }
        None
    }

    pub(crate) fn keep_int(&mut self, target: &mut i64, value: &Json, path: &str) {
        *target = self.int(value, path).unwrap_or(*target);
    }

    pub(crate) fn wrong(&mut self, value: &Json, path: &str, kind: &str) {
        self.error.get_or_insert_with(|| {
            let found = match value {
                // Go repeats a number that is one, only not of the right kind.
                Json::Number(number) if kind == "int" => format!("number {number}"),
                other => other.kind().to_owned(),
            };
            format!("json: cannot unmarshal {found} into Go struct field NetConf.{path} of type {kind}")
        });
    }

    /// # Errors
    /// The first value of a wrong type, code 999.
    pub(crate) fn finish(self) -> Result<()> {
        self.error.map_or(Ok(()), |error| Err(CniError::internal(format!("failed to load netconf: {error}"))))
    }
}
