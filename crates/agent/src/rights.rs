//! Checks for STATUS whether this node may write the keys that an ADD writes to etcd.
//!
//! The rights check is a transaction that changes nothing ([`Txn::trial`]). Like a write, the rights check needs the
//! agreement of the etcd cluster's members. Runtimes call STATUS every few seconds, so the result of a rights check is
//! kept for a minute in a file in memory (`/run`). One file per login, network and node caches the result of the rights
//! check. An ADD that fails with a store error always removes the file with the cached rights check. A successful ADD
//! removes the file with the cached rights check only if the file contains a refusal.

use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

use datastore::Location;
use datastore::served::instance;
use kv::{ErrorKind, Key, MAX_TXN_OPS, Store, Txn};
use serde::{Deserialize, Serialize};

use crate::error::{CniError, VerbFailure};
use crate::hints::HINTS_FOLDER;
use crate::pending_commits::{PENDING_COMMITS_FOLDER, PendingCommitFolder};
use crate::whole_file;

/// How long STATUS reuses the result of an earlier check of the node's rights, in seconds.
const MAX_AGE_SECONDS: u64 = 60;
/// Maximum size of the file that keeps the result of a rights check, in bytes. The largest result that is cached is a
/// refusal, which names a key and some etcd endpoints.
const MAX_RECORD_BYTES: u64 = 64 * 1024;

/// The cached result of the last check whether a node may write a network's keys to etcd.
#[derive(Debug)]
pub struct WriteRights {
    folder: PathBuf,
    whose: RightsSubject,
}

/// The login, network and node for which a node's rights are checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RightsSubject {
    /// A text that identifies the etcd cluster's endpoints together with the login.
    access: String,
    network: String,
    node: String,
}

/// The content of the file that keeps the result of a rights check.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RightsRecord {
    whose: RightsSubject,
    /// The time when the node's rights were checked, in Unix seconds.
    at: u64,
    /// Why etcd would refuse the writes of an ADD; `None` if etcd would accept the writes.
    refusal: Option<String>,
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl WriteRights {
    /// Returns the cached rights check for a node and network; `None` if the store is embedded.
    pub fn of(location: &Location, network: &str, node: &str) -> Option<Self> {
        if !location.is_shared() {
            return None;
        }
        let whose = RightsSubject { access: instance(location)?, network: network.to_owned(), node: node.to_owned() };
        Some(Self { folder: HINTS_FOLDER.into(), whose })
    }

    fn name(&self) -> String {
        let RightsSubject { access, network, node } = &self.whose;
        format!("rights-{}.json", whole_file::name_of(&[access, network, node]))
    }

    /// Returns the result in the cache file if the rights were checked less than a minute ago.
    fn recall(&self, now: u64) -> Option<RightsRecord> {
        let bytes = whole_file::read(&self.folder.join(self.name()), MAX_RECORD_BYTES).ok()?;
        let tried: RightsRecord = serde_json::from_slice(&bytes).ok()?;
        (tried.whose == self.whose && now.checked_sub(tried.at)? < MAX_AGE_SECONDS).then_some(tried)
    }

    fn remember(&self, at: u64, refusal: Option<String>) {
        let tried = RightsRecord { whose: self.whose.clone(), at, refusal };
        let bytes = serde_json::to_vec(&tried).map_err(std::io::Error::other);
        if let Err(error) = bytes.and_then(|bytes| whole_file::replace(&self.folder, &self.name(), &bytes)) {
            tracing::debug!(
                %error,
                "cannot save the result of the permission check; the next STATUS checks the permissions in etcd again"
            );
        }
    }

    /// Removes the cached result of the rights check, so that the next STATUS queries the cluster again.
    pub(crate) fn forget(&self) {
        // If the cached rights check cannot be removed, STATUS uses it for at most one more minute.
        let _ = fs::remove_file(self.folder.join(self.name()));
    }

    /// Deletes a cached refusal after a successful ADD, which shows that the refusal is outdated.
    pub(crate) fn forget_refusal(&self) {
        if self.recall(unix_now()).is_some_and(|tried| tried.refusal.is_some()) {
            self.forget();
        }
    }

    /// Checks that this node may write `keys` to etcd. Does not query the cluster if a cached result is less than a
    /// minute old.
    ///
    /// # Errors
    /// An error with the reason why the node may not write the keys, and any store error.
    pub async fn check(&self, store: &dyn Store, mut keys: Vec<Key>) -> Result<(), VerbFailure> {
        let now = unix_now();
        match self.recall(now) {
            Some(RightsRecord { refusal: None, .. }) => return Ok(()),
            Some(RightsRecord { refusal: Some(refusal), .. }) => return Err(CniError::internal(refusal).into()),
            None => {}
        }
        if let Err(error) = PendingCommitFolder::new(PENDING_COMMITS_FOLDER, "").check() {
            let text = format!("cannot note what is about to be done, in {PENDING_COMMITS_FOLDER}: {error}");
            return Err(CniError::internal(text).into());
        }
        keys.truncate(MAX_TXN_OPS);
        match store.txn(Txn::trial(keys)).await {
            Ok(_) => self.remember(now, None),
            Err(error) => {
                if matches!(error.kind(), ErrorKind::Auth(_)) {
                    self.remember(now, Some(CniError::from_error(&error).message().to_owned()));
                }
                return Err(error.into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use datastore::{Access, ConfigError, Login};

    use super::*;

    fn rights(folder: &tempfile::TempDir, network: &str) -> WriteRights {
        let text = str::to_owned;
        let whose = RightsSubject { access: text("etcd-1"), network: text(network), node: text("n") };
        WriteRights { folder: folder.path().join("hints"), whose }
    }

    #[test]
    fn rights_refusal_is_kept_until_add_succeeds() {
        let folder = tempfile::tempdir().unwrap();
        let one = rights(&folder, "net");
        let now = unix_now();
        one.remember(now, None);
        one.forget_refusal();
        assert_eq!(one.recall(now).map(|tried| tried.refusal), Some(None));
        one.remember(now, Some("no".to_owned()));
        one.forget_refusal();
        assert_eq!(one.recall(now), None);
    }

    #[test]
    fn rights_result_is_kept_one_minute_or_until_add_fails() {
        let folder = tempfile::tempdir().unwrap();
        let one = rights(&folder, "net");
        assert_eq!(one.recall(1000), None);
        for refusal in [None, Some("no".to_owned())] {
            one.remember(1000, refusal.clone());
            assert_eq!(one.recall(1059).map(|tried| tried.refusal), Some(refusal));
            assert_eq!(one.recall(1060), None);
            // If the clock was set back, the age of the cached rights check is unknown, so the cache is not used.
            assert_eq!(one.recall(999), None);
            assert_eq!(rights(&folder, "other").recall(1000), None);
        }
        one.forget();
        assert_eq!(one.recall(1000), None);
        one.forget();
    }

    #[test]
    fn rights_results_are_kept_per_login() {
        let etcd = |user: &str| {
            let login = Some(Login { user: user.into(), password: "p".into() });
            let location = stores::at("etcd://h:1").unwrap();
            let location = location.with_access(|access| Ok::<_, ConfigError>(Access { login, ..access })).unwrap();
            WriteRights::of(&location, "net", "n").unwrap()
        };
        assert_eq!(etcd("a").whose, etcd("a").whose);
        assert_ne!(etcd("a").whose, etcd("b").whose);
        assert!(WriteRights::of(&stores::at("memory:").unwrap(), "net", "n").is_none());
    }
}
