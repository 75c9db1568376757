//! `margay store verify`.

use async_trait::async_trait;
use datastore::{Drivers, OpenStore};
use indicatif::{HumanBytes, HumanCount};
use serde::Serialize;

use crate::answer::Answer;
use crate::command::OnStore;
use crate::error::{Failure, Result};
use crate::store::{Need, StoreAt};

#[derive(Serialize)]
struct Json {
    whole: bool,
    keys: u64,
    log_rows: u64,
    value_bytes: u64,
}

/// `margay store verify`.
pub(crate) struct Verify;

#[async_trait(?Send)]
impl OnStore for Verify {
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        let instead =
            "etcd checks its files itself; to compare the members of a cluster: etcdctl endpoint hashkv --cluster";
        Some(("verify", instead.to_owned()))
    }

    fn doing(&self) -> Option<&'static str> {
        Some("verifying")
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let open = at.open_files(Need::Read).await?;
        let verified = at.and_close(open, async |open: &OpenStore| match open.embedded() {
            Some(embedded) => embedded.verify().await.map_err(|error| at.explain(error)),
            None => Err(Failure::new(format!("{at} cannot be verified"))),
        });
        let verified = verified.await?;
        let text = format!(
            "{at} is whole: {} keys, {} changes in its history, {} of values",
            HumanCount(verified.live),
            HumanCount(verified.log_rows),
            HumanBytes(verified.value_bytes)
        );
        let json =
            Json { whole: true, keys: verified.live, log_rows: verified.log_rows, value_bytes: verified.value_bytes };
        Answer::new(text, &json)
    }
}
