//! `margay metrics`.

use datastore::Location;
use ipam_core::samples::{Samples, oldest_revision};
use kv::Deadline;

use super::{PATIENCE, READING, forecast, yielding};
use crate::answer::Answer;
use crate::args;
use crate::error::Result;
use crate::gc::reach::Memory;
use crate::output::whole_file;

/// Counts, and prints the metrics or writes them to a file.
pub(super) async fn run(args: &args::Metrics, location: &Location) -> Result<Answer> {
    let node = host::node_name(args.node.as_deref().unwrap_or_default());
    let boot_id = host::boot_id();
    let boot = boot_id.as_deref().and_then(host::short_boot);
    let memory = match args.cluster {
        true => None,
        false => Memory::of(&args.looks, location, &node, boot_id.as_deref().unwrap_or_default()),
    };
    let mut counted = None;
    let mut samples = yielding(location, async |ipam| {
        let mut samples = Samples::default();
        let revision = match &memory {
            Some(memory) => {
                let share = ipam.share_of(&node, &memory.reach(), Deadline::after(PATIENCE)).await?;
                samples.of_node(&share, boot.as_deref());
                share.revision
            }
            None => {
                let census = ipam.census(Deadline::after(READING)).await?;
                samples.of_all(&census, &node, boot.as_deref());
                let revision = census.revision;
                counted = Some(census);
                revision
            }
        };
        let oldest = oldest_revision(&**ipam.store(), revision).await?;
        samples.of_store(revision, oldest);
        Ok(samples)
    })
    .await?;
    if let Some(census) = counted {
        forecast::of_census(location, &census).await?.pools.iter().for_each(|pool| pool.sample(&mut samples));
    }
    let text = samples.text();
    match &args.file {
        None => Answer::new(text, &samples),
        Some(path) => {
            whole_file(path, &text)?;
            Answer::new(format!("Successfully wrote {}", path.display()), &samples)
        }
    }
}
