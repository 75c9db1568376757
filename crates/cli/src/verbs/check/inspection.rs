//! The inspection of a store: it is read at one revision, in several openings, and inspected part by part.

use ipam_operator::inspect::{Inspection, Inspector, Keep};
use time::OffsetDateTime;

use crate::error::Result;
use crate::store::StoreAt;
use crate::transfer::{Snapshot, Stop, aside, at_one_revision};

/// The inspection of a store.
pub(in crate::verbs) struct Inspected {
    /// The findings.
    pub(in crate::verbs) inspection: Inspection,
    /// The id of the store.
    pub(in crate::verbs) store: String,
}

/// Reads and inspects a store.
pub(in crate::verbs) async fn inspect(at: StoreAt<'_>, keep: Keep) -> Result<Inspected> {
    at_one_revision(at, async || attempt(at, keep).await).await
}

async fn attempt(at: StoreAt<'_>, keep: Keep) -> Result<Inspected, Stop> {
    let mut snapshot = Snapshot::of(at, Inspector::ranges());
    let mut inspector = Inspector::new(OffsetDateTime::now_utc(), keep);
    let mut read = snapshot.batch().await?;
    while let Some(kvs) = read {
        // One part is checked while the next one is read.
        let inspect = aside(move || {
            kvs.iter().for_each(|kv| inspector.add(kv));
            Ok(inspector)
        });
        let (inspected, next) = futures::join!(inspect, snapshot.batch());
        (inspector, read) = (inspected?, next?);
    }
    let store = snapshot.identity().map(|store| store.id.clone()).unwrap_or_default();
    Ok(Inspected { inspection: inspector.finish(snapshot.revision()), store })
}
