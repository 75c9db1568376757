//! `margay store upgrade`.

use datastore::{Location, care};
use serde::Serialize;

use crate::answer::Answer;
use crate::error::Result;
use crate::store::{WAIT, explain};

#[derive(Serialize)]
struct Json {
    from: u32,
    to: u32,
}

pub(super) async fn run(location: &Location) -> Result<Answer> {
    super::refuse_cluster(location, "upgrade", "etcd upgrades its files itself when a newer etcd is started on them")?;
    let done = care::upgrade(location, WAIT).await.map_err(|error| explain(location, error))?;
    let text = if done.from == done.to {
        format!("{location} is already at format {}, the newest", done.to)
    } else {
        format!("Successfully raised {location} from format {} to {}", done.from, done.to)
    };
    Answer::new(text, &Json { from: done.from, to: done.to })
}
