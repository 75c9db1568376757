//! Documents, shown, written and deleted as calicoctl does.

mod change;
mod files;
mod get;
mod tally;

use std::time::Duration;

use datastore::Location;
use ipam_core::Ipam;
use ipam_core::documents::{DocumentKind, Manifest, Way};
use kv::Deadline;

use self::change::Change;
use self::files::Depth;
use self::get::Form;
use super::rehearsal::Run;
use super::with_ipam;
use crate::answer::Answer;
use crate::args::{Documents, Selection, Source};
use crate::error::{Failure, Result};
use crate::output::patiently;
use crate::store::Use;

/// How long all of a command may take once the store is open: a pool's deletion is a commit for each block.
const PATIENCE: Duration = Duration::from_secs(600);

/// Reads the files, opens the store, does what is asked, and closes the store.
pub(crate) async fn run(command: &Documents, location: &Location) -> Result<Answer> {
    let deadline = || Deadline::after(PATIENCE);
    match command {
        Documents::Get(get) => {
            let which = &get.which;
            match which.kind {
                Some(kind) if which.name.is_empty() => {
                    on_store(location, Use::Existing, Run::Real, async |ipam| get::all(ipam, kind, deadline()).await)
                        .await
                }
                _ => {
                    let manifests = match which.kind {
                        None if get.skip_empty => files::read_any(&which.filename, depth(which.recursive))?,
                        _ => selected(which)?,
                    };
                    let names: Vec<(DocumentKind, String)> =
                        manifests.iter().map(|one| (one.kind(), one.name().to_owned())).collect();
                    // As calicoctl does it, for names alone.
                    let form = if get.export && which.kind.is_some() { Form::Export } else { Form::Stored };
                    on_store(location, Use::Existing, Run::Real, async |ipam| {
                        get::named(ipam, &names, form, deadline()).await
                    })
                    .await
                }
            }
        }
        Documents::Create(create) => {
            let change = Change::new(Way::Create, create.change.dry_run).skipping(create.skip_exists);
            write(&create.change.source, change, location, deadline()).await
        }
        Documents::Apply(apply) => {
            write(&apply.source, Change::new(Way::Apply, apply.dry_run), location, deadline()).await
        }
        Documents::Replace(replace) => {
            write(&replace.source, Change::new(Way::Replace, replace.dry_run), location, deadline()).await
        }
        Documents::Delete(delete) => {
            if delete.which.kind.is_some() && delete.which.name.is_empty() {
                return Err(Failure::new("resource name must be specified")
                    .hint("name what is to be deleted, such as: margay delete ippool main"));
            }
            let manifests = selected(&delete.which)?;
            let run = Run::new(delete.dry_run);
            let verb = async |ipam: &Ipam| change::delete(ipam, &manifests, delete, deadline()).await;
            on_store(location, Use::Release, run, verb).await
        }
    }
}

async fn write(source: &Source, change: Change, location: &Location, deadline: Deadline) -> Result<Answer> {
    let manifests = files::read(&source.filename, depth(source.recursive))?;
    // As with `pool create`: a store is made for a pool that can be made, and for nothing else.
    let makes = |manifest: &Manifest| manifest.kind() == DocumentKind::Pool && manifest.check().is_ok();
    let what_for = if change.makes() && manifests.iter().any(makes) { Use::Make } else { Use::Existing };
    let verb = async |ipam: &Ipam| change.write(ipam, &manifests, location, deadline).await;
    on_store(location, what_for, change.run(), verb).await
}

/// What is named, by kind and name or in files.
fn selected(which: &Selection) -> Result<Vec<Manifest>> {
    match which.kind {
        Some(kind) => Ok(which.name.iter().map(|name| Manifest::named(kind, name)).collect()),
        None => files::read(&which.filename, depth(which.recursive)),
    }
}

fn depth(recursive: bool) -> Depth {
    if recursive { Depth::All } else { Depth::Files }
}

/// Runs a verb on the store, and says on a terminal that it goes on. Files are read before: somebody may be typing one.
async fn on_store(
    location: &Location,
    what_for: Use,
    run: Run,
    verb: impl AsyncFnOnce(&Ipam) -> Result<Answer>,
) -> Result<Answer> {
    patiently(&format!("working on {location}"), with_ipam(location, what_for, run, verb)).await
}
