//! The repair of findings.

use std::collections::BTreeSet;
use std::time::Duration;

use ipam_core::Error;
use ipam_operator::inspect::{Code, Finding, Inspection, Keep, Mended};
use kv::Deadline;
use serde::Serialize;

use super::{Inspected, inspect};
use crate::error::Result;
use crate::store::{Need, StoreAt};

/// The longest time for one repair.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of commits before the store is closed for a moment, so that containers can start.
const COMMITS_AT_ONCE: usize = 16;
/// The most rounds of repairs: a repair can uncover another finding.
const ROUNDS: usize = 4;
/// The age of a finding in a cluster before it is mended. Calico changes one key after the other, and has long finished
/// such a change by then; keys that were written meanwhile are left alone.
const SETTLED: Duration = Duration::from_secs(3);

/// The repair of a finding, planned or done.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Repair {
    /// The code of the finding.
    pub(super) code: Code,
    /// The subject.
    pub(super) subject: String,
    /// The finding in words.
    pub(super) what: String,
    /// The repair.
    pub(super) mend: &'static str,
    /// The outcome.
    pub(super) outcome: Outcome,
    /// The error if it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// The outcome of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    /// It was not tried.
    Planned,
    /// The finding is mended.
    Mended,
    /// The finding was gone, often by another repair, or has changed since.
    Changed,
    /// The repair failed.
    Failed,
}

impl Outcome {
    /// The outcome in a table.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Planned => "would be mended",
            Self::Mended => "mended",
            Self::Changed => "gone or changed",
            Self::Failed => "failed",
        }
    }
}

impl Repair {
    fn new(finding: &Finding, outcome: Outcome, error: Option<&Error>) -> Self {
        Self {
            code: finding.code,
            subject: finding.subject.to_string(),
            what: finding.what.clone(),
            mend: finding.mend(),
            outcome,
            error: error.map(ToString::to_string),
        }
    }
}

/// The findings that can be mended and are requested: those with these codes, or all if there are no codes.
fn chosen<'i>(inspection: &'i Inspection, codes: &[Code]) -> impl Iterator<Item = &'i Finding> {
    let wanted = move |code: Code| codes.is_empty() || codes.contains(&code);
    inspection.findings.iter().filter(|finding| finding.mendable).filter(move |finding| wanted(finding.code))
}

/// The plan.
pub(super) fn plan(inspection: &Inspection, codes: &[Code]) -> Vec<Repair> {
    chosen(inspection, codes).map(|finding| Repair::new(finding, Outcome::Planned, None)).collect()
}

/// Mends and checks again, as long as there is something to mend. Returns the repairs and the last inspection.
pub(super) async fn apply(
    at: StoreAt<'_>,
    mut inspected: Inspected,
    codes: &[Code],
    keep: Keep,
) -> Result<(Vec<Repair>, Inspected)> {
    let mut repairs: Vec<Repair> = Vec::new();
    for _ in 0..ROUNDS {
        let due: Vec<Finding> = chosen(&inspected.inspection, codes).cloned().collect();
        if due.is_empty() {
            break;
        }
        if at.location.is_shared() {
            tokio::time::sleep(SETTLED).await;
        }
        let mut some = Vec::new();
        for batch in due.chunks(COMMITS_AT_ONCE) {
            some.extend(mend(at, &inspected.inspection, batch).await?);
        }
        settle(&mut some);
        let came_further = some.iter().any(|repair| repair.outcome == Outcome::Mended);
        repairs.extend(some);
        inspected = inspect(at, keep).await?;
        if !came_further {
            break;
        }
    }
    Ok((repairs, inspected))
}

/// Marks gone findings as mended if a repair of the same subject succeeded: one repair often mends several.
fn settle(repairs: &mut [Repair]) {
    let mended: BTreeSet<String> =
        repairs.iter().filter(|one| one.outcome == Outcome::Mended).map(|one| one.subject.clone()).collect();
    for repair in repairs.iter_mut().filter(|one| one.outcome == Outcome::Changed) {
        if mended.contains(&repair.subject) {
            repair.outcome = Outcome::Mended;
        }
    }
}

/// Mends some findings in one opening of the store.
async fn mend(at: StoreAt<'_>, inspection: &Inspection, findings: &[Finding]) -> Result<Vec<Repair>> {
    at.on_ipam(Need::Release, async |operator| {
        let mut done = Vec::new();
        for finding in findings {
            done.push(match operator.mend(finding, inspection.revision, Deadline::after(PATIENCE)).await {
                Ok(Mended::Done) => Repair::new(finding, Outcome::Mended, None),
                Ok(Mended::Changed) => Repair::new(finding, Outcome::Changed, None),
                Err(Error::Store(error)) => return Err(at.explain(error)),
                Err(error) => Repair::new(finding, Outcome::Failed, Some(&error)),
            });
        }
        Ok(done)
    })
    .await
}
