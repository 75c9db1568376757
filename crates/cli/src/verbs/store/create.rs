//! `margay store create`.

use datastore::care::FORMAT_WITH_LEASES;
use datastore::{Location, care};
use serde::Serialize;

use super::args::CreateStore;
use super::upgrade::refuse_older_plugins;
use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::store::{explain, wait};

#[derive(Serialize)]
struct Json {
    store: String,
    format: u32,
}

pub(super) async fn run(location: &Location, args: &CreateStore) -> Result<Answer> {
    super::refuse_cluster(location, "create", "an etcd is there once it is started")?;
    if args.format >= FORMAT_WITH_LEASES {
        refuse_older_plugins()?;
    }
    if !care::create(location, args.format, wait()).await.map_err(|error| explain(location, error))? {
        return Err(Failure::new(format!("{location} is there already; nothing was changed"))
            .hint("see what it is with: margay store status; raise its format with: margay store upgrade"));
    }
    let text = format!("Successfully created {location}, format {}", args.format);
    Answer::new(text, &Json { store: location.to_string(), format: args.format })
}
