//! `margay store upgrade`.

use datastore::{Location, care};
use serde::Serialize;

use super::args::Upgrade;
use crate::answer::Answer;
use crate::error::Result;
use crate::store::{explain, wait};

#[derive(Serialize)]
struct Json {
    from: u32,
    to: u32,
}

pub(super) async fn run(location: &Location, args: &Upgrade) -> Result<Answer> {
    super::refuse_cluster(location, "upgrade", "etcd upgrades its files itself when a newer etcd is started on them")?;
    let done = match args.dry_run {
        true => care::would_upgrade(location, wait()).await,
        false => care::upgrade(location, wait()).await,
    };
    let done = done.map_err(|error| explain(location, error))?;
    let text = if done.from == done.to {
        format!("{location} is already at format {}, the newest", done.to)
    } else {
        format!("Successfully raised {location} from format {} to {}", done.from, done.to)
    };
    let answer = Answer::new(text, &Json { from: done.from, to: done.to })?;
    Ok(if args.dry_run { answer.of_a_dry_run() } else { answer })
}
