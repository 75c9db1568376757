//! `margay store upgrade`.

use std::path::Path;

use async_trait::async_trait;
use clap::Args;
use datastore::Drivers;
use datastore::care::{self, FORMAT_WITH_LEASES};
use serde::Serialize;

use crate::answer::Answer;
use crate::command::OnStore;
use crate::error::{Failure, Result};
use crate::install::{PLUGIN_FOLDERS, Program};
use crate::store::StoreAt;

#[derive(Debug, Args)]
pub(crate) struct Upgrade {
    /// Check everything and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Serialize)]
struct Json {
    from: u32,
    to: u32,
}

#[async_trait(?Send)]
impl OnStore for Upgrade {
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        Some(("upgrade", "etcd upgrades its files itself when a newer etcd is started on them".to_owned()))
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        refuse_older_plugins()?;
        let done = match self.dry_run {
            true => care::would_upgrade(at.location, at.wait).await,
            false => care::upgrade(at.location, at.wait).await,
        };
        let done = done.map_err(|error| at.explain(error))?;
        let text = if done.from == done.to {
            format!("{at} is already at format {}, the newest", done.to)
        } else {
            format!("Successfully raised {at} from format {} to {}", done.from, done.to)
        };
        let answer = Answer::new(text, &Json { from: done.from, to: done.to })?;
        Ok(if self.dry_run { answer.of_a_dry_run() } else { answer })
    }
}

/// Fails if a folder of plugins has a Margay plugin that cannot read the newest format.
pub(super) fn refuse_older_plugins() -> Result<()> {
    for folder in PLUGIN_FOLDERS {
        for name in ["margay-ipam", "margay-cni", "calico-ipam", "calico"] {
            let file = Path::new(folder).join(name);
            if file.is_file() && Program::reads_format(&file, FORMAT_WITH_LEASES) == Some(false) {
                return Err(Failure::new(format!(
                    "{} is of a version that cannot read the newest format",
                    file.display()
                ))
                .hint("nothing was changed; install this version's plugin first: make install, or the package"));
            }
        }
    }
    Ok(())
}
