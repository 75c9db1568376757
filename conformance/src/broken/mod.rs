//! Defines broken stores, each of which breaks one rule. The broken stores prove that the conformance suite detects
//! faults.
//!
//! Each broken store changes the behaviour of a working store, and names the test case that must detect the change. The
//! tests of this crate run the named test case on each broken store, and all cases on the working store. The working
//! store must pass all conformance cases. For each broken store, the test case that it names must fail and report the
//! rule that the store breaks.

mod answered;
mod reads;
mod watches;
mod writes;

use std::fmt::Debug;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kv::{RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};

use crate::harness::Tenancy;
use crate::harness::{Ability, BoxError, Fixture, Harness, RefusedUser, Scene, Server};

/// A fault that can be injected into a store.
#[derive(Clone, Copy, Debug)]
pub struct Broken {
    name: &'static str,
    case: &'static str,
    rule: &'static str,
    wrap: fn(Arc<dyn Store>) -> Arc<dyn Store>,
}

impl Broken {
    /// The name of the injected fault.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The test case that must detect the fault; other test cases may detect it, too.
    pub fn case(&self) -> &'static str {
        self.case
    }

    /// The rule that the fault breaks.
    pub fn rule(&self) -> &'static str {
        self.rule
    }

    /// Wraps a test harness, which then makes stores with this fault.
    pub fn around(self, harness: impl Harness) -> impl Harness {
        BrokenHarness { harness, broken: self }
    }
}

/// Returns all faults that can be injected into a store.
pub fn broken() -> Vec<Broken> {
    fn way<T: Twist + Default>(name: &'static str, case: &'static str, rule: &'static str) -> Broken {
        Broken { name, case, rule, wrap: |inner| Arc::new(TwistedStore { inner, twist: T::default() }) }
    }
    vec![
        way::<reads::StaleReads>(
            "now and then reads the state before the latest write",
            "L06_reader_after_writer",
            "S1",
        ),
        way::<reads::TornReads>("reads a range in two halves, at two moments", "G11_no_torn_reads", "G9"),
        way::<reads::ForgetsCompaction>("answers reads below the mark", "H07_compaction", "C3"),
        way::<reads::IgnoresRevision>("reads the latest state, whichever is asked for", "H01_every_revision", "G7"),
        way::<reads::OldHeader>(
            "says the revision that was read instead of the store's",
            "R09_header_of_past_read",
            "R6",
        ),
        way::<reads::LeaksValues>("brings values in a keys-only answer", "G09_contents", "G5"),
        way::<reads::NegativeLimit>("takes a negative limit for a limit", "G01_limits", "G4"),
        way::<reads::CountsThePage>("counts only what the limit left", "G01_limits", "G4"),
        way::<reads::NaivePrefixEnd>("ends a prefix by adding one to its last byte", "G04_prefixes_of_ff", "G2"),
        way::<writes::IgnoresCompares>("ignores compares", "T09_all_compares_count", "T1"),
        way::<writes::ValueOfAbsentKey>(
            "finds the value of an absent key different from others",
            "T06_value_of_missing_key",
            "T5",
        ),
        way::<writes::OpByOp>("runs a transaction one operation at a time", "T21_failed_txn_writes_nothing", "T2"),
        way::<writes::LastPutWins>("takes two puts of one key in one branch", "T14_two_puts", "T8"),
        way::<writes::CountsNothing>("raises the revision for a delete of nothing", "B07_delete_missing", "R3"),
        way::<writes::SkipsIdentical>("skips a put of the value that is there", "R03_identical_put", "R4"),
        way::<writes::CutsLargeTxns>("runs the first 128 operations of more", "X02_too_many_ops", "X2"),
        way::<answered::StaleWhileOthersWrite>(
            "reads the state before the latest write while another client writes",
            "L05_random_clients",
            "S1",
        ),
        way::<answered::ForgetsAcknowledged>(
            "acknowledges a write now and then that it does not make",
            "L06_reader_after_writer",
            "S1",
        ),
        way::<answered::WritesTwice>("makes a write twice now and then", "L08_log_is_what_was_acknowledged", "E3"),
        way::<answered::CallsUnknownDefinite>(
            "says now and then that a write that was made was refused",
            "L08_log_is_what_was_acknowledged",
            "E2",
        ),
        way::<watches::LosesAnEvent>("loses one event of several at one revision", "W14_large_txn_replayed", "W3"),
        way::<watches::SplitsBatches>("gives the events of one revision one by one", "W14_large_txn_replayed", "W3"),
        way::<watches::Repeats>("gives every tenth batch twice", "W07_replay_then_live", "W2"),
        way::<watches::SkipsAhead>("starts at the mark if asked to start below it", "W09_start_below_mark", "W8"),
        way::<watches::LosesDeletionAtMark>("loses a deletion at exactly the mark", "W11_start_at_mark_delete", "C4"),
        way::<watches::WatchesTooMuch>("watches a prefix where one key was asked for", "W16_filters", "W4"),
        way::<watches::NoPrev>("never brings what was there before", "W03_what_was_before", "W6"),
        way::<watches::DropsForTheSlow>("drops events that are not fetched in time", "W19_stalled_watcher", "W11"),
        way::<watches::RunsAhead>("reports progress ahead of an event", "W35_never_ahead", "W18"),
        way::<watches::LeaksTasks>("leaves a task behind for each watch", "W20_dropped_watches", "W12"),
    ]
}

/// The methods in which a broken store differs from the working store. The default implementation of each `Twist`
/// method calls the working store; each broken store overrides only some methods.
#[async_trait]
trait Twist: Debug + Send + Sync + 'static {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        inner.range(request).await
    }

    async fn txn(&self, inner: &dyn Store, txn: Txn) -> Result<TxnResponse> {
        inner.txn(txn).await
    }

    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        inner.watch(request).await
    }

    async fn compact(&self, inner: &dyn Store, revision: Revision) -> Result<()> {
        inner.compact(revision).await
    }
}

#[derive(Debug)]
struct TwistedStore<T> {
    inner: Arc<dyn Store>,
    twist: T,
}

#[async_trait]
impl<T: Twist> Store for TwistedStore<T> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.twist.range(&*self.inner, request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.twist.txn(&*self.inner, txn).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.twist.watch(&self.inner, request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.twist.compact(&*self.inner, revision).await
    }
}

struct BrokenHarness<H> {
    harness: H,
    broken: Broken,
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<H: Harness> Harness for BrokenHarness<H> {
    fn abilities(&self) -> &[Ability] {
        self.harness.abilities()
    }

    fn tenancy(&self) -> Tenancy {
        self.harness.tenancy()
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(self.broken(self.harness.fresh().await?))
    }

    async fn fresh_in(&self, scene: Scene) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(self.broken(self.harness.fresh_in(scene).await?))
    }

    async fn join(&self, address: &str, wait: Duration) -> Result<Box<dyn Fixture>> {
        Ok(self.broken(self.harness.join(address, wait).await?))
    }

    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        self.harness.address_in(folder)
    }

    fn make_newer(&self, folder: &Path) -> Result<(), BoxError> {
        self.harness.make_newer(folder)
    }
}

impl<H> BrokenHarness<H> {
    fn broken(&self, inner: Box<dyn Fixture>) -> Box<dyn Fixture> {
        let store = Some((self.broken.wrap)(inner.store()));
        Box::new(BrokenFixture { store, inner, broken: self.broken })
    }
}

#[derive(Debug)]
struct BrokenFixture {
    // The store handle is `None` while the store is being reopened.
    store: Option<Arc<dyn Store>>,
    inner: Box<dyn Fixture>,
    broken: Broken,
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Fixture for BrokenFixture {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone().unwrap_or_else(|| (self.broken.wrap)(self.inner.store()))
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok((self.broken.wrap)(self.inner.another().await?))
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store = None;
        self.inner.reopen().await?;
        self.store = Some((self.broken.wrap)(self.inner.store()));
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        self.inner.close().await
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        self.inner.stored_bytes().await
    }

    fn servers(&self) -> Vec<Server> {
        self.inner.servers()
    }

    async fn connect(&self, addresses: &[SocketAddr]) -> Result<Arc<dyn Store>, BoxError> {
        Ok((self.broken.wrap)(self.inner.connect(addresses).await?))
    }

    async fn restart(&mut self, server: usize) -> Result<(), BoxError> {
        self.inner.restart(server).await
    }

    async fn leader(&self) -> Result<usize, BoxError> {
        self.inner.leader().await
    }

    async fn take_copy(&mut self) -> Result<(), BoxError> {
        self.inner.take_copy().await
    }

    async fn put_back(&mut self) -> Result<(), BoxError> {
        self.inner.put_back().await
    }

    async fn make_room(&self) -> Result<(), BoxError> {
        self.inner.make_room().await
    }

    async fn strangers(&self) -> Result<Vec<RefusedUser>, BoxError> {
        let strangers = self.inner.strangers().await?;
        let wrap = |stranger: RefusedUser| RefusedUser { store: (self.broken.wrap)(stranger.store), ..stranger };
        Ok(strangers.into_iter().map(wrap).collect())
    }

    async fn guest(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok((self.broken.wrap)(self.inner.guest().await?))
    }

    async fn finish(&mut self) -> Result<(), BoxError> {
        self.store = None;
        self.inner.finish().await
    }

    fn address(&self) -> Result<String, BoxError> {
        self.inner.address()
    }

    fn cut_power_after(&mut self, operations: u32) -> Result<(), BoxError> {
        self.inner.cut_power_after(operations)
    }

    async fn restore_power(&mut self, seed: u64) -> Result<(), BoxError> {
        self.store = None;
        self.inner.restore_power(seed).await?;
        self.store = Some((self.broken.wrap)(self.inner.store()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::ReferenceHarness;
    use crate::runner::{Report, RunOptions, Verdict, run};

    fn failures(harness: impl Harness, filter: &str) -> Vec<Report> {
        failures_within(Duration::from_secs(1), harness, filter)
    }

    fn failures_within(patience: Duration, harness: impl Harness, filter: &str) -> Vec<Report> {
        let limits = (patience, 20 * patience);
        let options = RunOptions::new().with_filter(filter).with_patience(limits.0).with_case_limit(limits.1);
        let reports = run(harness, &options).unwrap();
        assert!(!reports.is_empty(), "no case is called {filter}");
        reports.into_iter().filter(|report| matches!(report.verdict, Verdict::Failed(_))).collect()
    }

    fn names(reports: &[Report]) -> Vec<(&str, Option<&str>)> {
        reports.iter().map(|report| (report.name, report.rule_broken())).collect()
    }

    #[test]
    fn healthy_store_passes() {
        let failed = failures(ReferenceHarness, "");
        assert!(failed.is_empty(), "{failed:#?}");
    }

    #[test]
    fn broken_stores_fail_their_case_by_their_rule() {
        for broken in broken() {
            let expected = [(broken.case(), Some(broken.rule()))];
            let mut failed = failures(broken.around(ReferenceHarness), broken.case());
            if names(&failed) != expected {
                // Use a long time limit, because on a busy machine even a correct store call can take longer than a
                // second.
                failed = failures_within(Duration::from_secs(10), broken.around(ReferenceHarness), broken.case());
            }
            if names(&failed) != expected {
                let all = failures(broken.around(ReferenceHarness), "");
                panic!("a store that {} fails {failed:#?}; by all cases: {:?}", broken.name(), names(&all));
            }
        }
    }
}
