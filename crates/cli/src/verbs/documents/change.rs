//! `create`, `apply`, `replace` and `delete`.

use datastore::Location;
use ipam_core::Error;
use ipam_operator::Operator;
use ipam_operator::documents::{DocumentError, DocumentKind, Manifest, WriteMode, Written};
use kv::Deadline;

use super::tally::{Tally, Verb};
use crate::answer::Answer;
use crate::args::Delete;
use crate::error::Result;
use crate::verbs::pool;
use crate::verbs::rehearsal::Run;

/// The way in which documents are written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    way: WriteMode,
    skips_existing: bool,
    dry_run: bool,
}

impl Change {
    pub(super) fn new(way: WriteMode, dry_run: bool) -> Self {
        Self { way, skips_existing: false, dry_run }
    }

    /// Sets whether existing documents are skipped.
    pub(super) fn skipping(self, skips_existing: bool) -> Self {
        Self { skips_existing, ..self }
    }

    /// True if it may make a store for the documents.
    pub(super) fn makes(self) -> bool {
        self.way != WriteMode::Replace
    }

    /// Whether it writes or is a dry run.
    pub(super) fn run(self) -> Run {
        Run::new(self.dry_run)
    }

    fn verb(self) -> Verb {
        match self.way {
            WriteMode::Create => Verb { base: "create", past: "created" },
            WriteMode::Apply => Verb { base: "apply", past: "applied" },
            WriteMode::Replace => Verb { base: "replace", past: "replaced" },
        }
    }

    /// Writes documents in their order. After a document that fails the next ones are still written, as in calicoctl.
    pub(super) async fn write(
        self,
        ipam: &Operator,
        manifests: &[Manifest],
        location: &Location,
        deadline: Deadline,
    ) -> Result<Answer> {
        let mut tally = Tally::new(self.verb(), manifests, self.dry_run);
        let mut first_node = false;
        for manifest in manifests {
            match ipam.write_document(manifest, self.way, deadline).await {
                Ok(written) => {
                    first_node |= written == Written::Created && manifest.kind() == DocumentKind::Node;
                    tally.done(manifest);
                }
                Err(Error::Document(DocumentError::Exists(..))) if self.skips_existing => tally.done(manifest),
                Err(error) => tally.failed(manifest, &error, advice(&error)),
            }
        }
        let answer = tally.answer()?;
        let alone = !location.is_shared();
        Ok(if first_node && alone {
            answer.note(
                "from now on this store gives addresses to registered nodes only; see them with: margay get nodes",
            )
        } else {
            answer
        })
    }
}

/// Deletes documents in their order.
pub(super) async fn delete(
    ipam: &Operator,
    manifests: &[Manifest],
    args: &Delete,
    deadline: Deadline,
) -> Result<Answer> {
    let verb = Verb { base: "delete", past: "deleted" };
    let mut tally = Tally::new(verb, manifests, args.dry_run);
    for manifest in manifests {
        let in_use = pool::in_use(&args.bridged, manifest.name());
        match ipam.delete_document(manifest, in_use, deadline).await {
            Ok(()) => tally.done(manifest),
            Err(Error::Document(DocumentError::NotFound(..))) if args.skip_not_exists => tally.done(manifest),
            Err(error) => tally.failed(manifest, &error, advice(&error)),
        }
    }
    tally.answer()
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
