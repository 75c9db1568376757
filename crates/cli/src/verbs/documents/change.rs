//! `create`, `apply`, `replace` and `delete`.

use std::time::Duration;

use async_trait::async_trait;
use ipam_core::Error;
use ipam_operator::Operator;
use ipam_operator::documents::{DocumentError, DocumentKind, Manifest, WriteMode, Written};
use kv::Deadline;

use super::args::{Change, Delete};
use super::tally::{Tally, Verb};
use super::{PATIENCE, depth, files};
use crate::answer::Answer;
use crate::command::OnOpenStore;
use crate::error::Result;
use crate::store::{Need, StoreAt};
use crate::verbs::pool;

/// Documents to write.
pub(super) struct Writing {
    mode: WriteMode,
    manifests: Vec<Manifest>,
    /// True if existing documents are skipped.
    skips_existing: bool,
    dry_run: bool,
    /// True if the store is one machine's.
    is_of_one_machine: bool,
}

impl Writing {
    /// Reads the documents from their files.
    pub(super) fn of(mode: WriteMode, change: &Change, at: StoreAt<'_>) -> Result<Self> {
        Ok(Self {
            mode,
            manifests: files::read(&change.source.filename, depth(change.source.recursive))?,
            skips_existing: false,
            dry_run: change.dry_run,
            is_of_one_machine: !at.location.is_shared(),
        })
    }

    /// Sets whether existing documents are skipped.
    pub(super) fn skipping(self, skips_existing: bool) -> Self {
        Self { skips_existing, ..self }
    }

    fn verb(&self) -> Verb {
        match self.mode {
            WriteMode::Create => Verb { base: "create", past: "created" },
            WriteMode::Apply => Verb { base: "apply", past: "applied" },
            WriteMode::Replace => Verb { base: "replace", past: "replaced" },
        }
    }
}

#[async_trait(?Send)]
impl OnOpenStore for Writing {
    /// As with `pool create`, a store is only made for a pool that can be made.
    fn need(&self) -> Need {
        let makes = |manifest: &Manifest| manifest.kind() == DocumentKind::Pool && manifest.check().is_ok();
        match self.mode != WriteMode::Replace && self.manifests.iter().any(makes) {
            true => Need::Make,
            false => Need::Write,
        }
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn changes_pools(&self) -> bool {
        has_pool(&self.manifests)
    }

    /// Writes documents in their order. After a document that fails the next ones are still written, as in calicoctl.
    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let mut tally = Tally::new(self.verb(), &self.manifests, self.dry_run);
        let mut first_node = false;
        for manifest in &self.manifests {
            match operator.write_document(manifest, self.mode, deadline).await {
                Ok(written) => {
                    first_node |= written == Written::Created && manifest.kind() == DocumentKind::Node;
                    tally.done(manifest);
                }
                Err(Error::Document(DocumentError::Exists(..))) if self.skips_existing => tally.done(manifest),
                Err(error) => tally.failed(manifest, &error, advice(&error)),
            }
        }
        let note = "from now on this store gives addresses to registered nodes only; see them with: margay get nodes";
        Ok(tally.answer()?.notes((first_node && self.is_of_one_machine).then(|| note.to_owned())))
    }
}

/// Documents to delete.
pub(super) struct Deleting<'a> {
    pub(super) args: &'a Delete,
    pub(super) manifests: Vec<Manifest>,
}

#[async_trait(?Send)]
impl OnOpenStore for Deleting<'_> {
    fn need(&self) -> Need {
        Need::Release
    }

    fn dry_run(&self) -> bool {
        self.args.dry_run
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn changes_pools(&self) -> bool {
        has_pool(&self.manifests)
    }

    /// Deletes documents in their order.
    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let Self { args, manifests } = self;
        let verb = Verb { base: "delete", past: "deleted" };
        let mut tally = Tally::new(verb, manifests, args.dry_run);
        for manifest in manifests {
            let in_use = pool::in_use(&args.bridged, manifest.name());
            match operator.delete_document(manifest, in_use, deadline).await {
                Ok(()) => tally.done(manifest),
                Err(Error::Document(DocumentError::NotFound(..))) if args.skip_not_exists => tally.done(manifest),
                Err(error) => tally.failed(manifest, &error, advice(&error)),
            }
        }
        tally.answer()
    }
}

fn has_pool(manifests: &[Manifest]) -> bool {
    manifests.iter().any(|manifest| manifest.kind() == DocumentKind::Pool)
}

/// The advice for a document that was refused.
fn advice(error: &Error) -> Option<String> {
    match error {
        Error::Document(DocumentError::Exists(..)) => Some("to change what is there: margay apply -f FILE".to_owned()),
        Error::Document(DocumentError::NotFound(kind, _)) => {
            Some(format!("see which there are with: margay get {}", super::get::short(*kind)))
        }
        Error::Document(DocumentError::Conflict(..)) => Some(
            "somebody has changed it since it was read: read it again with margay get, or leave \
             metadata.resourceVersion away"
                .to_owned(),
        ),
        Error::Document(DocumentError::NotSupported(..)) => Some(
            "endpoints and profiles come with the containers of Calico's networks: margay get shows them".to_owned(),
        ),
        Error::PoolInUse { pool, gateway, .. } => Some(pool::advice_in_use(pool, gateway.is_some())),
        _ => None,
    }
}
