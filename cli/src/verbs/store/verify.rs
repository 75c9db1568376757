//! `margay store verify`.

use std::future::Future;
use std::io::{self, IsTerminal};
use std::time::Duration;

use datastore::Location;
use indicatif::{HumanBytes, HumanCount, ProgressBar};
use serde::Serialize;

use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::store::{self, Use};

/// How long something may take before a person is told that it goes on.
const SILENCE: Duration = Duration::from_secs(1);

#[derive(Serialize)]
struct Json {
    whole: bool,
    keys: u64,
    log_rows: u64,
    value_bytes: u64,
}

pub(super) async fn run(location: &Location) -> Result<Answer> {
    super::refuse_cluster(
        location,
        "verify",
        "etcd checks its files itself; to compare the members of a cluster: etcdctl endpoint hashkv --cluster",
    )?;
    let open = store::open(location, Use::Existing).await?;
    let Some(embedded) = open.embedded() else {
        return Err(Failure::new(format!("{location} cannot be verified")));
    };
    let verified = patiently(&format!("verifying {location}"), embedded.verify()).await;
    let closed = open.close().await;
    let verified = verified.map_err(|error| store::explain(location, error))?;
    closed.map_err(|error| store::explain(location, error))?;
    let text = format!(
        "{location} is whole: {} keys, {} changes in its history, {} of values",
        HumanCount(verified.live),
        HumanCount(verified.log_rows),
        HumanBytes(verified.value_bytes)
    );
    let json =
        Json { whole: true, keys: verified.live, log_rows: verified.log_rows, value_bytes: verified.value_bytes };
    Answer::new(text, &json)
}

/// Waits for something, and shows on a terminal that it goes on if it takes long.
async fn patiently<T>(what: &str, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(SILENCE, &mut work).await {
        return done;
    }
    if !io::stderr().is_terminal() {
        return work.await;
    }
    let spinner = ProgressBar::new_spinner().with_message(what.to_owned()).with_elapsed(SILENCE);
    if let Ok(style) = indicatif::ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(200));
    let done = work.await;
    spinner.finish_and_clear();
    done
}
