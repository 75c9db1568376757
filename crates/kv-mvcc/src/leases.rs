//! Implements leases, the compaction mark for clients of etcd's API, and the upgrade of a table to format 2, which
//! introduced both.
//!
//! Each lease has a row, and each live key with a lease has an additional row that records the attachment. A grant, a
//! revocation or a put of a key writes the affected lease rows in its own commit. The remaining time of a lease is not
//! stored on disk. The crate `etcd-api` measures the remaining times in memory and calls [`MvccStore::revoke`] when a
//! lease expires. After a restart, `etcd-api` gives every lease its full time again, as etcd does. Every put follows
//! etcd's rules for leases: a put with a missing lease fails, and a put without a lease detaches the key.

use std::sync::Arc;
use std::time::Duration;

use kv::{Error, ErrorKind, GrantOutcome, Key, Lease, LeaseId, Operation, Outcome, Purpose, Result, Revision, Store};

use crate::codec::{self, FORMAT_WITH_LEASES, StateRow};
use crate::error::{closed, compacted, corrupt, guarded, revision};
use crate::rows::Rows;
use crate::stage::StagedState;
use crate::store::{MvccStore, StoreCore};
use crate::table::{Table, Write};
use crate::writer::WriteJob;

impl MvccStore {
    /// True if the format of the store supports leases and the clients' compaction mark.
    pub fn has_leases(&self) -> bool {
        self.inner().format >= FORMAT_WITH_LEASES
    }

    /// Grants a lease durably. Granting a lease does not make a new revision of the store.
    ///
    /// # Errors
    /// `Unsupported` if the store's format is too old for leases; any error of a commit.
    pub async fn grant(&self, lease: Lease) -> Result<GrantOutcome> {
        self.check_format_for("leases")?;
        let granting = move |inner: &StoreCore, table: &dyn Table| inner.grant(table, lease);
        self.inner().change(Operation::Txn, granting).await
    }

    /// Ends a lease and deletes its keys in one transaction, in ascending order. Returns the store's revision after the
    /// deletion.
    ///
    /// # Errors
    /// `LeaseNotFound` if there is no lease with this id; `TooLarge` if the lease has more keys than one commit can
    /// delete; any error of a commit.
    pub async fn revoke(&self, id: LeaseId) -> Result<Revision> {
        loop {
            let revoking = move |inner: &StoreCore, table: &dyn Table| inner.revoke(table, id);
            match self.inner().change(Operation::Txn, revoking).await {
                Err(full) if *full.kind() == ErrorKind::NoSpace && full.outcome() == Outcome::NotApplied => {
                    self.inner().submit(Operation::Txn, |reply| WriteJob::MakeRoom { full, reply }).await?;
                }
                answer => return answer,
            }
        }
    }

    /// Lists all leases that are granted and have not ended.
    ///
    /// # Errors
    /// `Corrupt` if a row is damaged; any error of the table.
    pub async fn leases(&self) -> Result<Vec<Lease>> {
        let found =
            self.inner().blocking(Operation::Range, |inner, table| Rows::of(table, inner.name)?.leases()).await?;
        Ok(found.into_iter().map(|(id, lease)| Lease { id, ttl: Duration::from_secs(lease.ttl) }).collect())
    }

    /// Returns, in ascending order, the keys that are attached to a lease. Returns no keys if the lease does not exist.
    ///
    /// # Errors
    /// `Corrupt` if a row is damaged; any error of the table.
    pub async fn leased(&self, id: LeaseId) -> Result<Vec<Key>> {
        self.inner().blocking(Operation::Range, move |inner, table| Rows::of(table, inner.name)?.leased(id)).await
    }

    /// Raises the clients' compaction mark: clients of etcd's API cannot read revisions below the mark. The store keeps
    /// its history as the [retention](crate::Retention) says. In a store of format 1, which has no separate compaction
    /// mark for clients, `compact_for_clients` compacts the history instead.
    ///
    /// # Errors
    /// `Compacted` if `to` is at or below the compaction mark of etcd's clients, `FutureRevision` if `to` is above the
    /// newest revision; any error of a commit.
    pub async fn compact_for_clients(&self, to: Revision) -> Result<()> {
        if !self.has_leases() {
            return self.compact(to).await;
        }
        to.check(self.inner().name)?;
        let mark = to.get().unsigned_abs();
        self.inner().change(Operation::Compact, move |inner, table| inner.raise_client_mark(table, mark)).await
    }

    /// Fails with `Unsupported` if the format of the store is too old for `what`.
    pub(crate) fn check_format_for(&self, what: &str) -> Result<()> {
        if self.has_leases() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unsupported, Operation::Txn, self.inner().name)
            .with_detail(format!("a store of format {} keeps no {what}", self.inner().format)))
    }
}

impl StateRow {
    /// The oldest revision that clients of etcd's API may read; 0 if clients may read all revisions.
    pub(crate) fn oldest_for_clients(&self) -> u64 {
        self.compacted.max(self.client_mark)
    }
}

impl StoreCore {
    /// Queues a change of the table that is not a transaction, and waits until the change has run.
    ///
    /// # Errors
    /// Any error of the task `work`; `Closed` if the store was closed.
    pub(crate) async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        operation: Operation,
        work: impl FnOnce(&Self, &dyn Table) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let store = self.name;
        self.submit(operation, |reply| {
            WriteJob::Change(Box::new(move |inner, table| {
                let answer = table.map_or_else(|| Err(closed(store, operation)), |table| work(inner, table));
                // `send` fails only if the caller has stopped waiting for the answer, so a failure is ignored.
                drop(reply.send(answer));
            }))
        })
        .await
    }

    fn grant(&self, table: &dyn Table, lease: Lease) -> Result<GrantOutcome> {
        self.ensure_writable(table, Operation::Txn, Purpose::Any)?;
        let staged = guarded(self.name, Operation::Txn, || {
            let rows = Rows::of(table, self.name)?;
            let (old, key) = (rows.state()?, codec::lease_key(lease.id));
            if rows.lease(lease.id)?.is_some() {
                return Ok(None);
            }
            let row = codec::encode(&key, &codec::LeaseRow { ttl: lease.ttl.as_secs() })
                .map_err(|damage| corrupt(self.name, Operation::Txn, damage.0))?;
            Ok(Some((old, vec![Write::Put(key, row)])))
        });
        let Some((old, writes)) = staged.map_err(|error| error.with_outcome(Outcome::NotApplied))? else {
            return Ok(GrantOutcome::Taken);
        };
        let new = StateRow { other_changes: old.other_changes + 1, ..old };
        self.commit(table, Purpose::Any, writes, &old, new)?;
        Ok(GrantOutcome::New)
    }

    fn revoke(&self, table: &dyn Table, id: LeaseId) -> Result<Revision> {
        self.ensure_writable(table, Operation::Txn, Purpose::Release)?;
        let staged = guarded(self.name, Operation::Txn, || {
            let rows = Rows::of(table, self.name)?;
            let old = rows.state()?;
            let mut stage = StagedState::new(&rows, self.name, old);
            stage.revoke(id, self.clock.micros())?;
            let (mut writes, mut new) = stage.finish()?;
            writes.push(Write::Delete(codec::lease_key(id)));
            self.sweep_expired(&rows, Purpose::Release, &old, &mut new, &mut writes)?;
            Ok((old, new, writes))
        });
        let (old, new, writes) = staged.map_err(|error| error.with_outcome(Outcome::NotApplied))?;
        self.commit(table, Purpose::Release, writes, &old, new)?;
        Ok(revision(new.revision))
    }

    fn raise_client_mark(&self, table: &dyn Table, mark: u64) -> Result<()> {
        self.ensure_writable(table, Operation::Compact, Purpose::Any)?;
        let old = guarded(self.name, Operation::Compact, || Rows::of(table, self.name)?.state())
            .map_err(|error| error.with_outcome(Outcome::NotApplied))?;
        if mark <= old.oldest_for_clients() {
            return Err(compacted(self.name, Operation::Compact, old.oldest_for_clients()));
        }
        if mark > old.revision {
            return Err(Error::new(ErrorKind::FutureRevision, Operation::Compact, self.name));
        }
        self.commit(table, Purpose::Any, Vec::new(), &old, StateRow { client_mark: mark, ..old })
    }
}

impl MvccStore {
    /// Writes a new store format number to the table. Before raising the format, the caller must rewrite all rows that
    /// the new format encodes differently. Raising a store's format blocks the calling thread.
    ///
    /// # Errors
    /// `Closed` if the store was closed; any error of the table.
    pub fn raise_format(&self, format: u32) -> Result<()> {
        let inner = self.inner();
        let table = inner.table.blocking_read();
        match table.as_deref() {
            Some(table) => mark_format(table, format),
            None => inner.check_open(Operation::Txn),
        }
    }
}

fn mark_format(table: &dyn Table, format: u32) -> Result<()> {
    table.commit(&[Write::Put(codec::FORMAT_KEY.to_vec(), codec::encode_format(format))])
}

#[cfg(test)]
mod tests {
    use kv::ErrorKind;

    use super::*;
    use crate::codec::{FORMAT, FORMAT_WITH_LEASES};
    use crate::memory::MemoryTable;
    use crate::options::Options;

    #[test]
    fn upgraded_store_is_refused_by_older_program() {
        let table = MemoryTable::new();
        let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
        assert_eq!(store.status().format, FORMAT);
        store.raise_format(FORMAT).unwrap();
        drop(store);
        let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
        store.raise_format(FORMAT_WITH_LEASES).unwrap();
        drop(store);
        let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
        assert_eq!(store.status().format, FORMAT_WITH_LEASES);
        store.raise_format(FORMAT_WITH_LEASES + 1).unwrap();
        drop(store);
        let error = MvccStore::open(Box::new(table), Options::default()).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::UnknownFormat { found: FORMAT_WITH_LEASES + 1 });
    }
}
