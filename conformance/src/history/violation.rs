//! Defines the violation of a rule that a judge finds in a recorded history.

use std::error::Error;
use std::fmt::{self, Debug};

use crate::expect::{Failure, shown};

/// The first point of a recorded history at which the store broke a rule.
#[derive(Clone, Debug)]
pub struct Violation {
    rule: &'static str,
    what: String,
    shown: Vec<String>,
}

impl Violation {
    pub(crate) fn new(rule: &'static str, what: impl Into<String>) -> Self {
        Self { rule, what: what.into(), shown: Vec::new() }
    }

    /// Adds evidence to the report of the violation, for example a call.
    pub(crate) fn showing(mut self, name: &str, thing: &impl Debug) -> Self {
        self.shown.push(format!("{name}: {}", shown(thing)));
        self
    }

    /// The number of the broken rule in `crates/kv/SEMANTICS.md`.
    pub fn rule(&self) -> &'static str {
        self.rule
    }
}

impl fmt::Display for Violation {
    /// Writes the violation, and then one line for each call or event that shows it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        self.shown.iter().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

impl Error for Violation {}

impl From<Violation> for Failure {
    #[track_caller]
    fn from(violation: Violation) -> Self {
        Self::new("what all clients asked and were told", "a history of a correct store", violation.to_string())
            .or_rule(Some(violation.rule))
    }
}
