//! Going through the blocks of a store, a page at a time.

use std::ops::ControlFlow;

use ipam_core::model::{Block, Document, keys};
use ipam_core::reservations::Reservations;
use kv::{Deadline, Pages, Range, Revision, Store};
use time::OffsetDateTime;

use super::super::Shown;
use super::super::answer::Failure;

/// Shows each well-formed block of a revision (below 1: the newest) until `see` has enough. Returns the revision.
pub(super) async fn each_block(
    store: &dyn Store,
    at: Revision,
    mut see: impl FnMut(Block) -> ControlFlow<()> + Send,
) -> kv::Result<Revision> {
    let mut pages = Pages::new(Range::Prefix(keys::blocks_prefix(None)), at);
    while let Some(page) = pages.next(store).await? {
        for kv in page {
            // A damaged block is a problem that a check tells.
            let Ok(block) = Block::decode(&kv.key, kv.value.as_bytes()) else { continue };
            if see(block).is_break() {
                return Ok(pages.revision());
            }
        }
    }
    Ok(pages.revision())
}

/// The documents beside a block that decide on the state of an address.
pub(super) struct Rules {
    pub(super) reservations: Reservations,
    cooldown: i64,
}

impl Rules {
    pub(super) async fn read(shown: &Shown) -> Result<Self, Failure> {
        let ipam = shown.operator.ipam();
        let deadline = || Deadline::after(shown.limits.answer);
        let inventory = ipam.inventory(deadline()).await?;
        let (reservations, _) = Reservations::from_documents(&inventory.reservations);
        Ok(Self { reservations, cooldown: ipam.config(deadline()).await?.cooldown_seconds() })
    }

    /// Frees the addresses that have rested for long enough.
    pub(super) fn apply(&self, block: &mut Block) {
        _ = block.apply_cooldown(OffsetDateTime::now_utc(), self.cooldown);
    }
}
