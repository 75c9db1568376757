//! Shows, writes and deletes documents as calicoctl does.

mod change;
mod files;
mod get;
mod namespace;
mod table;
mod tally;

use std::time::Duration;

use datastore::Location;
use ipam_operator::Operator;
use ipam_operator::documents::{DocumentKind, Manifest, WriteMode};
use kv::Deadline;

pub(crate) use self::files::values;

use self::change::Change;
use self::files::Depth;
use self::get::Form;
use self::namespace::Asked;
use super::rehearsal::Run;
use super::{outgoing, with_ipam};
use crate::answer::Answer;
use crate::args::{Documents, Selection, Source};
use crate::error::{Failure, Result};
use crate::output::patiently;
use crate::store::Use;

/// The longest time for a command once the store is open: a pool's deletion is a commit for each block.
const PATIENCE: Duration = Duration::from_secs(600);

/// Reads the files, opens the store, carries out the command, and closes the store.
pub(crate) async fn run(command: &Documents, location: &Location) -> Result<Answer> {
    let deadline = || Deadline::after(PATIENCE);
    match command {
        Documents::Get(get) => {
            let which = &get.which;
            let asked = Asked::by_get(get)?;
            match which.kind {
                Some(kind) if which.name.is_empty() => {
                    on_store(location, Use::Existing, Run::Real, async |ipam| {
                        get::all(ipam, kind, &asked, deadline()).await
                    })
                    .await
                }
                _ => {
                    let manifests = match which.kind {
                        None if get.skip_empty => {
                            placed(files::read_any(&which.filename, depth(which.recursive))?, &asked)?
                        }
                        _ => selected(which, &asked)?,
                    };
                    let names: Vec<(DocumentKind, String)> =
                        manifests.iter().map(|one| (one.kind(), one.name().to_owned())).collect();
                    // calicoctl exports only documents that are named, not those of a file.
                    let form = if get.export && which.kind.is_some() { Form::Export } else { Form::Stored };
                    on_store(location, Use::Existing, Run::Real, async |ipam| {
                        get::named(ipam, &names, form, &asked, deadline()).await
                    })
                    .await
                }
            }
        }
        Documents::Create(create) => {
            let change = Change::new(WriteMode::Create, create.change.dry_run).skipping(create.skip_exists);
            write(&create.change.source, change, location, deadline()).await
        }
        Documents::Apply(apply) => {
            write(&apply.source, Change::new(WriteMode::Apply, apply.dry_run), location, deadline()).await
        }
        Documents::Replace(replace) => {
            write(&replace.source, Change::new(WriteMode::Replace, replace.dry_run), location, deadline()).await
        }
        Documents::Delete(delete) => {
            if delete.which.kind.is_some() && delete.which.name.is_empty() {
                return Err(Failure::new("resource name must be specified")
                    .hint("name what is to be deleted, such as: margay delete ippool main"));
            }
            let manifests = selected(&delete.which, &Asked::by_delete(delete))?;
            let run = Run::new(delete.dry_run);
            let verb = async |ipam: &Operator| {
                let work = change::delete(ipam, &manifests, delete, deadline());
                followed(ipam, location, run, &manifests, work).await
            };
            on_store(location, Use::Release, run, verb).await
        }
    }
}

async fn write(source: &Source, change: Change, location: &Location, deadline: Deadline) -> Result<Answer> {
    let manifests = files::read(&source.filename, depth(source.recursive))?;
    // As with `pool create`, a store is only made for a pool that can be made.
    let makes = |manifest: &Manifest| manifest.kind() == DocumentKind::Pool && manifest.check().is_ok();
    let what_for = if change.makes() && manifests.iter().any(makes) { Use::Make } else { Use::Existing };
    let verb = async |ipam: &Operator| {
        let work = change.write(ipam, &manifests, location, deadline);
        followed(ipam, location, change.run(), &manifests, work).await
    };
    on_store(location, what_for, change.run(), verb).await
}

/// Does the work. If any pool is named, the machine's rules for pools are refreshed after it.
async fn followed(
    ipam: &Operator,
    location: &Location,
    run: Run,
    manifests: &[Manifest],
    work: impl Future<Output = Result<Answer>>,
) -> Result<Answer> {
    if manifests.iter().any(|manifest| manifest.kind() == DocumentKind::Pool) {
        return outgoing::follow(ipam, location, run, Deadline::after(PATIENCE), work).await;
    }
    work.await
}

/// The named documents, by kind and name or in files.
fn selected(which: &Selection, asked: &Asked<'_>) -> Result<Vec<Manifest>> {
    match which.kind {
        Some(kind) => which.name.iter().map(|name| asked.named(kind, name)).collect(),
        None => placed(files::read(&which.filename, depth(which.recursive))?, asked),
    }
}

/// The documents that files name, in the requested namespace.
fn placed(manifests: Vec<Manifest>, asked: &Asked<'_>) -> Result<Vec<Manifest>> {
    manifests.into_iter().map(|manifest| asked.of_file(manifest)).collect()
}

fn depth(recursive: bool) -> Depth {
    if recursive { Depth::All } else { Depth::Files }
}

/// Runs a verb on the store, with a sign on a terminal that it goes on. Files were read before: a person may type one.
async fn on_store(
    location: &Location,
    what_for: Use,
    run: Run,
    verb: impl AsyncFnOnce(&Operator) -> Result<Answer>,
) -> Result<Answer> {
    patiently(&format!("working on {location}"), with_ipam(location, what_for, run, verb)).await
}
