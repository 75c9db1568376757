//! `margay store create`.

use async_trait::async_trait;
use clap::Args;
use datastore::Drivers;
use datastore::care::{self, FORMAT_WITH_LEASES};
use serde::Serialize;

use super::upgrade::refuse_older_plugins;
use crate::answer::Answer;
use crate::command::OnStore;
use crate::error::{Failure, Result};
use crate::store::StoreAt;

#[derive(Debug, Args)]
pub(crate) struct CreateStore {
    /// The format of its rows; every version of margay reads 1
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub(crate) format: u32,
}

#[derive(Serialize)]
struct Json {
    store: String,
    format: u32,
}

#[async_trait(?Send)]
impl OnStore for CreateStore {
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        Some(("create", "an etcd is there once it is started".to_owned()))
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        if self.format >= FORMAT_WITH_LEASES {
            refuse_older_plugins()?;
        }
        if !care::create(at.location, self.format, at.wait).await.map_err(|error| at.explain(error))? {
            return Err(Failure::new(format!("{at} is there already; nothing was changed"))
                .hint("see what it is with: margay store status; raise its format with: margay store upgrade"));
        }
        let text = format!("Successfully created {at}, format {}", self.format);
        Answer::new(text, &Json { store: at.to_string(), format: self.format })
    }
}
