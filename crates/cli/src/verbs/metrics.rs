//! `margay metrics`.

use std::time::Duration;

use async_trait::async_trait;
use ipam_core::samples::{Samples, oldest_revision};
use kv::Deadline;

use super::forecast;
use crate::answer::Answer;
use crate::args::Metrics;
use crate::command::{OnStore, READING};
use crate::error::Result;
use crate::gc::reach::Memory;
use crate::output::whole_file;
use crate::store::{Need, StoreAt};

/// The longest time to read what this node has.
const PATIENCE: Duration = Duration::from_secs(60);

#[async_trait(?Send)]
impl OnStore for Metrics {
    fn doing(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let node = host::node_name(self.node.as_deref().unwrap_or_default());
        let boot_id = host::boot_id();
        let boot = boot_id.as_deref().and_then(host::short_boot);
        let memory = match self.cluster {
            true => None,
            false => Memory::of(&self.looks, at.location, &node, boot_id.as_deref().unwrap_or_default()),
        };
        let mut counted = None;
        let mut samples = at
            .on_ipam(Need::ReadAll, async |operator| {
                let mut samples = Samples::default();
                let revision = match &memory {
                    Some(memory) => {
                        let share = operator.ipam().share_of(&node, &memory.reach(), Deadline::after(PATIENCE)).await?;
                        samples.of_node(&share, boot.as_deref());
                        share.revision
                    }
                    None => {
                        let census = operator.ipam().census(Deadline::after(READING)).await?;
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
            forecast::of_census(at, &census).await?.pools.iter().for_each(|pool| pool.sample(&mut samples));
        }
        let text = samples.text();
        match &self.file {
            None => Answer::new(text, &samples),
            Some(path) => {
                whole_file(path, &text)?;
                Answer::new(format!("Successfully wrote {}", path.display()), &samples)
            }
        }
    }
}
