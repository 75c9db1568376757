//! `margay ipam check`: finds faults in IPAM's documents, and mends them.
//!
//! Each repair is one commit.

mod inspection;
mod networks;
mod print;
mod repair;
mod report;
mod routes;

use async_trait::async_trait;
use ipam_operator::inspect::{Inspection, Keep};

use crate::answer::Answer;
use crate::args::Check;
use crate::command::OnStore;
use crate::error::{Failure, Result};
use crate::store::StoreAt;

pub(super) use inspection::{Inspected, inspect};
pub(super) use report::{LeakedHandle, Report, Row, guid, revision};

/// Checks, mends if that is requested, and reports the remaining findings.
#[async_trait(?Send)]
impl OnStore for Check {
    fn doing(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let wants_addresses = self.show_all_ips || self.show_problem_ips || self.report.is_some();
        let keep = if wants_addresses { Keep::Addresses } else { Keep::Findings };
        let mut inspected = inspect(at, keep).await?;
        let mut repairs = Vec::new();
        if let Some(codes) = &self.repair {
            if self.apply {
                (repairs, inspected) = repair::apply(at, inspected, codes, keep).await?;
            } else {
                repairs = repair::plan(&inspected.inspection, codes);
            }
        }
        let inspection = &mut inspected.inspection;
        let (others, mut notes) = networks::overlapping(at, inspection).await;
        inspection.findings.extend(others);
        match host::all_routes() {
            Ok(all) => {
                let Inspection { pools, prefix_lengths, .. } = &*inspection;
                let found = routes::overlapping(pools, prefix_lengths, &all, routes::is_bridge);
                inspection.findings.extend(found);
            }
            Err(error) => notes.push(format!("the routes of this machine could not be read: {error}")),
        }
        inspection.findings.sort_unstable();
        if let Some(file) = &self.report {
            report::write(file, &Report::new(&inspected))?;
        }
        let answer = print::answer(self, at.location, &inspected.inspection, &repairs)?.notes(notes);
        Ok(match inspected.inspection.problems() {
            0 => answer,
            problems => answer.incomplete(found(problems, &inspected.inspection, self)),
        })
    }
}

/// The meaning of an exit code of 1, and the next step.
fn found(problems: usize, inspection: &Inspection, args: &Check) -> Failure {
    let failure = Failure::new(match problems {
        1 => "1 problem was found".to_owned(),
        _ => format!("{problems} problems were found"),
    });
    let mendable = inspection.findings.iter().filter(|finding| finding.is_problem() && finding.mendable).count();
    match (mendable, args.repair.is_some(), args.apply) {
        (0, ..) => failure.hint("none of them can be mended without a person; the column MEND says what to do"),
        (_, false, _) => {
            failure.hint(format!("what can be mended ({mendable}) is shown by: margay ipam check --repair"))
        }
        (_, true, false) => failure.hint("to mend what can be mended: margay ipam check --repair --apply"),
        (_, true, true) => failure.hint("others are at work on the store, or a repair failed; check again"),
    }
}
