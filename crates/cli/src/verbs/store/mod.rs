//! The verbs that look after a store as a whole.

pub(crate) mod args;
mod backup;
mod compact;
mod create;
mod restore;
mod status;
mod upgrade;
mod verify;

use datastore::Location;

use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::output::patiently;

use args::StoreVerb;

/// Runs a verb.
pub(crate) async fn run(verb: &StoreVerb, location: &Location) -> Result<Answer> {
    match verb {
        StoreVerb::Status => status::run(location).await,
        StoreVerb::Verify => patiently(&format!("verifying {location}"), verify::run(location)).await,
        StoreVerb::Backup(args) => backup::run(location, args).await,
        StoreVerb::Restore(args) => patiently(&format!("restoring {location}"), restore::run(location, args)).await,
        StoreVerb::Compact(args) => patiently(&format!("compacting {location}"), compact::run(location, args)).await,
        StoreVerb::Upgrade(args) => upgrade::run(location, args).await,
        StoreVerb::Create(args) => create::run(location, args).await,
    }
}

/// Refuses a cluster, which has its own tool for that: `instead` names it.
fn refuse_cluster(location: &Location, what: &str, instead: &str) -> Result<()> {
    if location.is_shared() {
        return Err(Failure::new(format!("{what} is not for {}", location.facts().name)).hint(instead));
    }
    Ok(())
}
