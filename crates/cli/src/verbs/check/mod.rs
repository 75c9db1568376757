//! `margay ipam check`: finds faults in IPAM's documents, and mends them.
//!
//! A store is read at one revision, in several openings, and inspected part by part. Each repair is one commit.

mod networks;
mod print;
mod repair;
mod report;
mod routes;

use std::path::Path;

use datastore::Location;
use ipam_operator::inspect::{Inspection, Inspector, Keep};
use time::OffsetDateTime;

use crate::answer::Answer;
use crate::args::Check;
use crate::backup::{Snapshot, Stop, aside};
use crate::error::{Failure, Result};

pub(super) use report::{LeakedHandle, Report, Row, guid, revision};

/// The number of attempts: the history of a revision can be removed before all of it was read.
const ATTEMPTS: usize = 5;

/// The inspection of a store.
pub(super) struct Inspected {
    /// The findings.
    pub(super) inspection: Inspection,
    /// The id of the store.
    pub(super) store: String,
}

/// Checks, mends if that is requested, and reports the remaining findings.
pub(super) async fn run(args: &Check, conf_dir: &Path, location: &Location) -> Result<Answer> {
    let wants_addresses = args.show_all_ips || args.show_problem_ips || args.report.is_some();
    let keep = if wants_addresses { Keep::Addresses } else { Keep::Findings };
    let mut inspected = inspect(location, keep).await?;
    let mut repairs = Vec::new();
    if let Some(codes) = &args.repair {
        if args.apply {
            (repairs, inspected) = repair::apply(location, inspected, codes, keep).await?;
        } else {
            repairs = repair::plan(&inspected.inspection, codes);
        }
    }
    let inspection = &mut inspected.inspection;
    let (others, mut notes) = networks::overlapping(location, inspection, conf_dir).await;
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
    if let Some(file) = &args.report {
        report::write(file, &Report::new(&inspected))?;
    }
    let mut answer = print::answer(args, location, &inspected.inspection, &repairs)?;
    for note in notes {
        answer = answer.note(note);
    }
    Ok(match inspected.inspection.problems() {
        0 => answer,
        problems => answer.incomplete(found(problems, &inspected.inspection, args)),
    })
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

/// Reads and inspects a store.
pub(super) async fn inspect(location: &Location, keep: Keep) -> Result<Inspected> {
    for _ in 0..ATTEMPTS {
        match attempt(location, keep).await {
            Ok(inspected) => return Ok(inspected),
            Err(Stop::Overtaken) => {}
            Err(Stop::Failed(failure)) => return Err(failure),
        }
    }
    Err(Failure::new(format!(
        "{location} changes faster than it can be read: its history was given up {ATTEMPTS} times"
    ))
    .hint("try again when fewer containers are started and stopped"))
}

async fn attempt(location: &Location, keep: Keep) -> Result<Inspected, Stop> {
    let mut snapshot = Snapshot::of(location, Inspector::ranges());
    let mut inspector = Inspector::new(OffsetDateTime::now_utc(), keep);
    let mut read = snapshot.batch().await?;
    while let Some(kvs) = read {
        // One part is checked while the next one is read.
        let inspect = aside(move || {
            kvs.iter().for_each(|kv| inspector.add(kv));
            Ok(inspector)
        });
        let (inspected, next) = futures::join!(inspect, snapshot.batch());
        (inspector, read) = (inspected?, next?);
    }
    let store = snapshot.identity().map(|store| store.id.clone()).unwrap_or_default();
    Ok(Inspected { inspection: inspector.finish(snapshot.revision()), store })
}
