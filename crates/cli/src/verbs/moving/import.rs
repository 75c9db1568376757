//! `margay import`.

use datastore::Location;
use ipam_operator::moving::{Mark, MoveKind, State, Tally};
use serde::Serialize;

use super::migrate::remove;
use crate::answer::Answer;
use crate::args::Import;
use crate::backup::Stop;
use crate::error::{Failure, Result};
use crate::output::Progress;
use crate::transfer::{Plan, Source, Target, Walked, Work, walk};

#[derive(Serialize)]
struct Json {
    file: String,
    store: String,
    dry_run: bool,
    /// Keys that this run has written. They are not all keys if it went on with an earlier run.
    written: u64,
    /// Nodes and the like that the store had already.
    kept: u64,
    /// Keys of the file that are not IPAM's.
    left_out: u64,
    #[serde(flatten)]
    tally: Tally,
}

pub(super) async fn run(location: &Location, args: &Import) -> Result<Answer> {
    let Some(file) = &args.file else { return Err(Failure::new("say which file is to be imported")) };
    if args.abort {
        return abort(location, args.dry_run).await;
    }
    // The whole file is checked before anything is written.
    let plan = Plan::of(file, args.as_node.clone(), args.from_node.clone()).await?;
    if args.dry_run {
        return dry_run(location, &plan).await;
    }
    let mut target = Target::make(location).await?;
    let filled = fill(location, &plan, &mut target).await;
    let closed = target.close().await;
    let walked = filled?;
    closed?;
    answer(location, &plan, &walked)
}

/// Reports what would be imported; an error if it cannot be.
async fn dry_run(location: &Location, plan: &Plan) -> Result<Answer> {
    let mut target = Target::inspect(location).await?;
    let possible = match target.mark() {
        Some(mark) => require_same(location, mark, plan),
        None => imported_already(plan, &mut target).await.map(drop),
    };
    target.close().await?;
    possible?;
    let text = format!("Would import {} into {location}: {}", plan.path(), plan.tally);
    Answer::new(text, &json(location, plan, &Walked::default(), true))
}

async fn fill(location: &Location, plan: &Plan, target: &mut Target<'_>) -> Result<Walked> {
    match target.mark() {
        Some(mark) => require_same(location, mark, plan)?,
        None => {
            if let Some(found) = imported_already(plan, target).await? {
                return Ok(found);
            }
            let mark = Mark {
                way: MoveKind::Import,
                from: plan.path(),
                to: location.to_string(),
                source: plan.source(),
                state: State::Copying,
                revision: plan.header.revision,
            };
            target.begin(mark).await?;
        }
    }
    let written = through(plan, target, Work::Fill, "writing").await?;
    if !written.is_there(target).await? {
        // A key that differs may be one of the store's own, which stay.
        let compared = through(plan, target, Work::Verify, "comparing").await?;
        if compared.differences() > 0 {
            return Err(Failure::new(format!("{location} was changed by somebody else meanwhile:{}", compared.list()))
                .hint("--abort removes what it has; then it can be filled anew"));
        }
    }
    target.unmark().await?;
    Ok(written)
}

/// The keys of the file in a store without a mark, if it has all of them: an earlier run was killed just after it
/// removed the mark. `None` if the store is empty; a store with anything else is refused.
async fn imported_already(plan: &Plan, target: &mut Target<'_>) -> Result<Option<Walked>> {
    let Err(refusal) = target.require_empty().await else { return Ok(None) };
    let found = through(plan, target, Work::DryRun, "comparing").await?;
    if found.differences() == 0 { Ok(Some(found)) } else { Err(refusal) }
}

async fn through(plan: &Plan, target: &mut Target<'_>, work: Work, what: &'static str) -> Result<Walked> {
    let mut source = Source::File(Box::new(plan.rows().await?));
    let progress = Progress::new(what, Some(plan.tally.keys));
    match walk(&mut source, target, work, &progress).await {
        Ok(walked) => Ok(walked),
        Err(Stop::Failed(failure)) => Err(failure),
        Err(Stop::Overtaken) => Err(Failure::new(format!("{} cannot be read any more", plan.path()))),
    }
}

/// Refuses a store that another import or a migration has begun to fill.
fn require_same(location: &Location, mark: &Mark, plan: &Plan) -> Result<()> {
    if mark.way == MoveKind::Import && mark.source == plan.source() && mark.state == State::Copying {
        return Ok(());
    }
    Err(Failure::new(format!("{location} is being filled from {} already", mark.from))
        .hint(format!("go on with: {}", mark.command())))
}

/// Removes what an import has written.
async fn abort(location: &Location, dry_run: bool) -> Result<Answer> {
    let mut target = Target::inspect(location).await?;
    let removed = remove(&mut target, MoveKind::Import, location, dry_run).await;
    let closed = target.close().await;
    let answer = removed?;
    closed?;
    Ok(answer)
}

fn json(location: &Location, plan: &Plan, walked: &Walked, dry_run: bool) -> Json {
    Json {
        file: plan.path(),
        store: location.to_string(),
        dry_run,
        written: walked.missing,
        kept: walked.kept,
        left_out: plan.left_out,
        tally: plan.tally.clone(),
    }
}

fn answer(location: &Location, plan: &Plan, walked: &Walked) -> Result<Answer> {
    let header = &plan.header;
    let text = format!(
        "Successfully imported {} into {location}: {}. All of it was read back and is equal",
        plan.path(),
        plan.tally
    );
    let mut answer = Answer::new(text, &json(location, plan, walked, false))?.note(format!(
        "this is revision {} of a {} store, read at {}: addresses that were assigned after that are free in this store \
         and will be assigned again",
        header.revision, header.engine, header.time
    ));
    if walked.kept > 0 {
        answer =
            answer.note(format!("{} nodes or the like that the store had already stayed as they are", walked.kept));
    }
    if plan.left_out > 0 {
        answer = answer.note(format!("{} keys of the file are not IPAM's and were left out", plan.left_out));
    }
    Ok(answer)
}
