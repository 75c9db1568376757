//! Measures how large a store grows while addresses are assigned and released continuously.

use std::fs;
use std::path::Path;
use std::time::Instant;

use crate::fill::{self, Churn};
use crate::report::print;
use crate::{Outcome, Programs};

/// Number of pairs of ADD and DEL, unless the environment variable `PAIRS` is set.
const PAIRS: u64 = 1_000_000;
/// Number of pairs of ADD and DEL between two measurements of the store's size.
const LOOK_EVERY: u64 = 2_000;
const MIB: f64 = (1 << 20) as f64;

/// Measures the size of stores on a file system in memory, because a sync costs nothing there, and a million pairs of
/// ADD and DEL on a disk would take hours. The size of a store does not depend on the speed of the disk.
pub(crate) fn run(_: &Programs, folder: &Path) -> Outcome<()> {
    let pairs = std::env::var("PAIRS").ok().and_then(|text| text.parse().ok()).unwrap_or(PAIRS);
    let in_memory = Path::new("/dev/shm");
    let folder = if in_memory.is_dir() { in_memory } else { folder };
    let folder = tempfile::Builder::new().prefix("margay-bench").tempdir_in(folder)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let mut rows = Vec::new();
    for (engine, at_most) in [("redb", "64"), ("sled", "-")] {
        let path = folder.path().join(engine);
        let begun = Instant::now();
        let largest = runtime.block_on(churn(engine, &path, pairs))?;
        rows.push(vec![
            engine.to_owned(),
            pairs.to_string(),
            format!("{:.1}", largest as f64 / MIB),
            at_most.to_owned(),
            format!("{:.1}", size(&path)? as f64 / MIB),
            format!("{:.0}", begun.elapsed().as_secs_f64()),
        ]);
    }
    print(
        "Size of a store on which addresses come and go, 40 in use (MiB)",
        &["", "pairs of ADD and DEL", "largest", "at most", "at the end, closed", "seconds"],
        rows,
    );
    Ok(())
}

/// Adds and deletes `pairs` containers in a new store. Returns the largest size in bytes that the store had.
async fn churn(engine: &str, path: &Path, pairs: u64) -> Outcome<u64> {
    let store = fill::create(engine, path).await?;
    let mut churn = Churn::begin(&store).await?;
    for resident in 0..40 {
        churn.add(resident).await?;
    }
    let mut largest = 0;
    for pair in 0..pairs {
        churn.pair().await?;
        if pair % LOOK_EVERY == 0 {
            largest = largest.max(size(path)?);
        }
    }
    largest = largest.max(size(path)?);
    store.close().await?;
    Ok(largest)
}

fn size(path: &Path) -> Outcome<u64> {
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() {
        return Ok(found.len());
    }
    let mut sum = 0;
    for entry in fs::read_dir(path)? {
        // Sled may have removed the file since the folder was listed.
        sum += size(&entry?.path()).unwrap_or_default();
    }
    Ok(sum)
}
