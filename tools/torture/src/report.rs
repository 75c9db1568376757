//! The report of a run.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::plan::Plan;

/// The report of a run without violations.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The plan.
    pub plan: Plan,
    /// How often each thing happened.
    pub counts: BTreeMap<String, u64>,
    /// How many revisions were checked.
    pub revisions: i64,
    /// How long it took.
    pub duration: Duration,
}

impl Report {
    /// How often something happened.
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { mode, seed, nodes, workers, .. } = &self.plan;
        writeln!(f, "{} {mode:?}, seed {seed}, {nodes} nodes with {workers} workers each", self.plan.store())?;
        writeln!(
            f,
            "{} operations, {} revisions checked, 0 violations, {:.1} s",
            self.count("operation"),
            self.revisions,
            self.duration.as_secs_f64()
        )?;
        for (what, count) in self.counts.iter().filter(|(what, _)| *what != "operation") {
            writeln!(f, "  {count:>9}  {what}")?;
        }
        Ok(())
    }
}
