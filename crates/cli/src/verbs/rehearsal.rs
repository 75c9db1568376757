//! Dry runs. A dry run of a command makes all of its checks, on a wrapper of the store that writes only to memory.

use std::sync::Arc;

use datastore::{Create, Location, care};
use ipam_operator::Operator;
use kv::ErrorKind;
use kv::wrap::Rehearsal;

use super::worked_on;
use crate::answer::Answer;
use crate::error::Result;
use crate::store::{Use, explain, wait};

/// Whether a command writes or is a dry run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// The command writes.
    Real,
    /// The command only reports what it would do.
    Dry,
}

impl Run {
    /// The run for the value of `--dry-run`.
    pub(crate) fn new(dry_run: bool) -> Self {
        if dry_run { Self::Dry } else { Self::Real }
    }
}

/// Runs a verb, discards its writes, and makes its answer that of a dry run. A verb that would make the store starts
/// with an empty one.
pub(super) async fn rehearse(
    location: &Location,
    what_for: Use,
    verb: impl AsyncFnOnce(&Operator) -> Result<Answer>,
) -> Result<Answer> {
    let open = match datastore::open(
        location,
        &Create::Never.with_wait(wait()).with_sharing(datastore::Sharing::Served),
    )
    .await
    {
        Err(error) if *error.kind() == ErrorKind::Missing && what_for == Use::Make => {
            care::could_be_made(location).await.map_err(|error| explain(location, error))?;
            datastore::open(&location.drivers().memory(), &Create::IfMissing.with_wait(wait())).await
        }
        opened => opened,
    };
    let open = open.map_err(|error| explain(location, error))?;
    let rehearsal = Arc::new(Rehearsal::new(open.store()));
    Ok(worked_on(open, rehearsal, location, verb).await?.of_a_dry_run())
}
