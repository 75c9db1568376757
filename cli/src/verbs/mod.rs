//! The verbs. Each reads and writes through one open store and gives its answer when the store is closed.

use datastore::{Create, Location};

use crate::answer::Answer;
use crate::args::{Command, Pool};
use crate::error::{Failure, Result};
use crate::store;

/// Opens the store, runs the verb, closes the store. Only `pool create` makes a store that is not there.
pub(crate) async fn run(command: &Command, location: &Location) -> Result<Answer> {
    let create = match command {
        Command::Pool(Pool::Create(_)) => Create::IfMissing,
        _ => Create::Never,
    };
    let open = store::open(location, create).await?;
    let answer: Result<Answer> = Err(Failure::new("not yet"));
    let closed = open.close().await;
    let answer = answer?;
    closed?;
    Ok(answer)
}
