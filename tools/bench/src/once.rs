//! Runs every kind of plugin call once with an instrumented plugin, which records the code that it executes. See
//! `scripts/find-hot`.

use std::path::PathBuf;

use crate::cluster::call_on_etcd;
use crate::contender::Contender;
use crate::serve::Daemon;
use crate::{Outcome, Programs};

/// Number of containers that are added to an embedded store. Twenty containers make enough commits for one checkpoint
/// of redb's journal, which happens after twenty to thirty commits.
const CONTAINERS: u32 = 20;

/// Runs ADD and DEL with the given plugin on a store of the given kind.
pub(crate) fn run(plugin: PathBuf, store: &str) -> Outcome<()> {
    let programs = Programs { plugin, margay: Programs::installed()?.join("margay"), ..Programs::default() };
    let folder = tempfile::Builder::new().prefix("margay-once").tempdir()?;
    match store {
        "etcd" => call_on_etcd(&programs, folder.path()),
        "redb" | "sled" => add_and_del(&Contender::margay(&programs, folder.path(), "the plugin", store), CONTAINERS),
        "served" => {
            let contender = Contender::margay(&programs, folder.path(), "the plugin", "redb");
            contender.add("resident")?;
            let url = format!("redb://{}", folder.path().join("ipam.redb").display());
            let _daemon = Daemon::start(&programs, &url)?;
            add_and_del(&contender, CONTAINERS)
        }
        other => Err(format!("there is no store {other}; there are etcd, redb, served and sled").into()),
    }
}

/// Adds containers, and then deletes them.
pub(crate) fn add_and_del(contender: &Contender, containers: u32) -> Outcome<()> {
    for container in 0..containers {
        contender.add(&format!("c{container}"))?;
    }
    for container in 0..containers {
        contender.del(&format!("c{container}"))?;
    }
    Ok(())
}
