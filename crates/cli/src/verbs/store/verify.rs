//! `margay store verify`.

use datastore::Location;
use indicatif::{HumanBytes, HumanCount};
use serde::Serialize;

use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::store::{self, Use};

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
    let open = store::open_files(location, Use::Existing).await?;
    let Some(embedded) = open.embedded() else {
        return Err(Failure::new(format!("{location} cannot be verified")));
    };
    let verified = embedded.verify().await;
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
