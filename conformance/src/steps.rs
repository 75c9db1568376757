//! Writes data with a known result: numbered steps, each of which is one transaction.

use std::collections::BTreeMap;

use kv::{Kv, Op, Range, Revision, Txn};

use crate::expect::{Checked, Failure, JudgedByRule, same};
use crate::subject::{BoundedHandle, after};

/// The steps reuse their keys in a cycle of this length: step `n` writes the keys of step `n - KEY_REUSE_STEPS`.
const KEY_REUSE_STEPS: u64 = 20;

/// The numbered transactions ("steps") that a crash test writes to a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    /// The number of keys that each step writes.
    pub(crate) width: u64,
    /// The revision of the store before the first step.
    pub(crate) base: Revision,
}

impl Steps {
    /// Returns the transaction that writes the keys of step `n`.
    pub(crate) fn txn(width: u64, n: u64) -> Txn {
        Txn::new().with_success((0..width).map(|i| Op::put(key(i, n), value(width, n))))
    }

    /// The number of steps that a store at the given revision must contain.
    pub(crate) fn at(&self, revision: Revision) -> Checked<u64> {
        let steps = revision.get() - self.base.get();
        u64::try_from(steps)
            .map_err(|_| Failure::new("the revision", format!("{} or more", self.base), revision.to_string()))
            .of("R8")
    }

    pub(crate) fn revision(&self, steps: u64) -> Revision {
        after(self.base, signed(steps))
    }

    pub(crate) fn expected(&self, steps: u64) -> Vec<Kv> {
        let mut entries = BTreeMap::new();
        for n in steps.saturating_sub(KEY_REUSE_STEPS)..steps {
            for i in 0..self.width {
                let kv = Kv {
                    key: key(i, n).into(),
                    value: value(self.width, n).into(),
                    create_revision: self.revision(n % KEY_REUSE_STEPS + 1),
                    mod_revision: self.revision(n + 1),
                    version: signed(n / KEY_REUSE_STEPS) + 1,
                    lease: None,
                };
                entries.insert(kv.key.clone(), kv);
            }
        }
        entries.into_values().collect()
    }

    /// Checks that the store has exactly the entries that `steps` steps write.
    pub(crate) async fn check(&self, store: &BoundedHandle, steps: u64) -> Checked {
        let found = store.read(Range::prefix("step/")).await?;
        same("the revision", found.revision, self.revision(steps)).of("S5")?;
        same_entries(&format!("the keys after {steps} steps"), &found.kvs, &self.expected(steps)).of("S5")
    }

    /// Checks that the store's state after step `steps` is still readable and is unchanged.
    pub(crate) async fn check_past(&self, store: &BoundedHandle, steps: u64) -> Checked {
        let found = store.read_at(Range::prefix("step/"), self.revision(steps)).await?;
        same_entries(&format!("what was there after {steps} steps"), &found.kvs, &self.expected(steps)).of("C6")
    }

    /// Checks a store after a crash. The store must contain all acknowledged steps, possibly the next step as well, and
    /// no partly written step. Returns the number of steps that the store contains.
    pub(crate) async fn check_crashed(&self, store: &BoundedHandle, acknowledged: u64) -> Checked<u64> {
        let steps = self.at(store.revision().await?)?;
        if steps < acknowledged {
            return Err(Failure::new(
                "steps after a crash",
                format!("{acknowledged}, as acknowledged"),
                steps.to_string(),
            ))
            .of("S3");
        }
        if steps > acknowledged + 1 {
            let most = format!("{acknowledged}, as acknowledged, or one more");
            return Err(Failure::new("steps after a crash", most, steps.to_string())).of("S5");
        }
        self.check(store, steps).await?;
        Ok(steps)
    }
}

fn key(i: u64, n: u64) -> String {
    format!("step/{i:03}/{:02}", n % KEY_REUSE_STEPS)
}

/// The value that step `n` writes. Values are short or long, and some are longer than a page; steps with many keys have
/// only short values.
fn value(width: u64, n: u64) -> Vec<u8> {
    let lengths: [usize; 4] = if width > 8 { [9, 10, 40, 100] } else { [9, 300, 4000, 20_000] };
    let length = lengths[usize::try_from(n % 4).unwrap_or_default()];
    let mut value = n.to_be_bytes().repeat(length.div_ceil(8));
    value.truncate(length);
    value
}

fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Compares two lists of entries, and reports only the first difference, because the lists can be long.
fn same_entries(checked: &str, found: &[Kv], expected: &[Kv]) -> Checked {
    same(&format!("{checked}: how many keys"), found.len(), expected.len())?;
    match found.iter().zip(expected).find(|(found, expected)| found != expected) {
        Some((found, expected)) => same(checked, brief(found), brief(expected)),
        None => Ok(()),
    }
}

fn brief(kv: &Kv) -> String {
    let head = kv.value.as_bytes().get(..8).map_or_else(String::new, |head| head.escape_ascii().to_string());
    format!(
        "{} = {head}... ({} bytes), created {}, modified {}, version {}",
        kv.key,
        kv.value.as_bytes().len(),
        kv.create_revision,
        kv.mod_revision,
        kv.version
    )
}
