//! Prints a store's metrics in the format of Prometheus, for the command `margay metrics`.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use clap::Args;
use ipam_core::samples::{Samples, oldest_revision};
use kv::Deadline;

use super::etcd::sample_members;
use super::show;
use crate::command::{CommandAnswer, READ_ALL_TIMEOUT, StoreCommand};
use crate::error::CommandResult;
use crate::gc::scans::ScanMemory;
use crate::output::write_whole_file;
use crate::store::{StoreAccess, StoreUse};

pub(crate) const HELP: &str = "\
Prints pools, blocks, addresses, what has leaked, and revisions in the text form of Prometheus: of a cluster's store what
this node has, which costs the same in a cluster of any size. With --file it is written to a file at once, as
node_exporter's textfile collector wants it; run it from a timer.

Examples:
  margay metrics
  margay metrics --cluster
  margay metrics --file /var/lib/prometheus/node-exporter/margay.prom";

/// The arguments of `margay metrics`.
#[derive(Debug, Args)]
pub(crate) struct Metrics {
    /// Write the metrics to this file instead of stdout; an existing file is replaced
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,

    /// Node name of this machine in the store
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Count the whole cluster, not only the blocks and addresses of this node
    #[arg(long)]
    pub(crate) cluster: bool,

    /// Folder that caches the list of blocks in which this node has addresses
    #[arg(long, hide = true, value_name = "DIR", default_value = "/run/margay")]
    pub(crate) looks: PathBuf,
}

/// Time limit of reading the blocks in which this node has addresses.
const METRICS_TIMEOUT: Duration = Duration::from_secs(60);

#[async_trait(?Send)]
impl StoreCommand for Metrics {
    fn progress_text(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let node = host::node_name(self.node.as_deref().unwrap_or_default());
        let boot_id = host::boot_id();
        let boot = boot_id.as_deref().and_then(host::short_boot);
        let memory = match self.cluster {
            true => None,
            false => ScanMemory::of(&self.looks, at.location, &node, boot_id.as_deref().unwrap_or_default()),
        };
        let mut counted = None;
        let mut samples = at
            .with_operator(StoreUse::ReadAll, async |operator| {
                let mut samples = Samples::default();
                let revision = match &memory {
                    Some(memory) => {
                        let share =
                            operator.ipam().share_of(&node, &memory.reach(), Deadline::after(METRICS_TIMEOUT)).await?;
                        samples.of_node(&share, boot.as_deref());
                        share.revision
                    }
                    None => {
                        let census = operator.ipam().census(Deadline::after(READ_ALL_TIMEOUT)).await?;
                        samples.of_all(&census, &node, boot.as_deref());
                        let revision = census.revision;
                        counted = Some(census);
                        revision
                    }
                };
                let oldest = oldest_revision(&**operator.ipam().store(), revision).await?;
                samples.of_store(revision, oldest);
                Ok(samples)
            })
            .await?;
        if let Some(census) = counted {
            show::forecast_census(at, &census).await?.pools.iter().for_each(|pool| pool.sample(&mut samples));
        }
        if self.cluster && at.location.is_shared() {
            sample_members(at, &mut samples).await?;
        }
        let text = samples.text();
        match &self.file {
            None => CommandAnswer::new(text, &samples),
            Some(path) => {
                write_whole_file(path, &text)?;
                CommandAnswer::new(format!("Successfully wrote {}", path.display()), &samples)
            }
        }
    }
}
