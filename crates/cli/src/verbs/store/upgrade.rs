//! `margay store upgrade`.

use std::path::Path;

use datastore::care::FORMAT_WITH_LEASES;
use datastore::{Location, care};
use serde::Serialize;

use super::args::Upgrade;
use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::install::{PLUGIN_FOLDERS, Program};
use crate::store::{explain, wait};

#[derive(Serialize)]
struct Json {
    from: u32,
    to: u32,
}

pub(super) async fn run(location: &Location, args: &Upgrade) -> Result<Answer> {
    super::refuse_cluster(location, "upgrade", "etcd upgrades its files itself when a newer etcd is started on them")?;
    refuse_older_plugins()?;
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
