//! The verbs that look after a store as a whole.

pub(crate) mod args;
mod backup;
mod compact;
mod restore;
mod status;
mod upgrade;
mod verify;

use std::time::SystemTime;

use datastore::Location;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::answer::Answer;
use crate::error::{Failure, Result};

use args::StoreVerb;

/// Runs a verb.
pub(crate) async fn run(verb: &StoreVerb, location: &Location) -> Result<Answer> {
    match verb {
        StoreVerb::Status => status::run(location).await,
        StoreVerb::Verify => verify::run(location).await,
        StoreVerb::Backup(args) => backup::run(location, args).await,
        StoreVerb::Restore(args) => restore::run(location, args).await,
        StoreVerb::Compact(args) => compact::run(location, args).await,
        StoreVerb::Upgrade => upgrade::run(location).await,
    }
}

/// Refuses a cluster, which has its own means: `instead` says which.
fn refuse_cluster(location: &Location, what: &str, instead: &str) -> Result<()> {
    match location {
        Location::Etcd(_) => Err(Failure::new(format!("{what} is not for etcd")).hint(instead)),
        _ => Ok(()),
    }
}

/// A time as it is shown, in UTC and whole seconds.
pub(super) fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    time.replace_nanosecond(0).unwrap_or(time).format(&Rfc3339).unwrap_or_else(|_| "an unknown time".to_owned())
}
