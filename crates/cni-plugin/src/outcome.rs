//! The outcome of a call: what the process prints, and its exit status. Every error, a panic included, becomes CNI's error JSON.

use std::panic::{AssertUnwindSafe, catch_unwind};

use agent::{CniError, Result};
use serde::Serialize;

use crate::gojson;
use crate::panics;

/// The output of the process, and its exit status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The exit status: 0 or 1.
    pub exit: u8,
    /// For standard output: one JSON document, or nothing.
    pub stdout: String,
    /// For standard error.
    pub stderr: String,
}

impl Outcome {
    /// Success, with a text for standard output.
    pub(crate) fn said(stdout: String) -> Self {
        Self { exit: 0, stdout, stderr: String::new() }
    }

    /// The outcome of a call.
    pub(crate) fn of(call: impl FnOnce() -> Result<String>) -> Self {
        match caught(call) {
            Ok(stdout) => Self::said(stdout),
            Err(error) => {
                tracing::error!(code = error.code().number(), "{error}");
                Self { exit: 1, stdout: to_json(&error), stderr: String::new() }
            }
        }
    }
}

/// Makes a panic an error like any other.
pub(crate) fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // Nothing that was borrowed here is used again after a panic.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| Err(panics::error(&*payload)))
}

/// An error for standard output: indented by four, without `cniVersion` and without a newline at the end, as Go's CNI library
/// prints it.
pub(crate) fn to_json(error: &CniError) -> String {
    #[derive(Serialize)]
    struct Printed<'a> {
        code: u32,
        msg: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        details: &'a str,
    }
    gojson::indented(&Printed { code: error.code().number(), msg: error.message(), details: error.details() })
}

#[cfg(test)]
mod tests {
    use agent::Code;

    use super::*;

    #[test]
    fn printed_as_go_prints_it() {
        let error = CniError::new(Code::InvalidConfig, "a <nil> & \"b\"\u{2028}").with_details("x\ny");
        assert_eq!(
            to_json(&error),
            "{\n    \"code\": 7,\n    \"msg\": \"a \\u003cnil\\u003e \\u0026 \\\"b\\\"\\u2028\",\n    \"details\": \"x\\ny\"\n}"
        );
        assert_eq!(to_json(&CniError::internal("m")), "{\n    \"code\": 999,\n    \"msg\": \"m\"\n}");
    }
}
