//! Tests that several compactors together compact the history of a store only once per interval, and that the age of
//! the history is determined correctly.

use std::time::{Duration, SystemTime};

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::NewPool;
use ipam_core::samples::oldest_revision;
use ipam_core::timestamps::{go_string, parse_rfc3339};
use ipam_operator::compaction::{
    COMPACTION_KEY, CompactionMark, CompactionOutcome, MemberSize, compact_older, find_in_cluster, time_after,
};
use kv::{Compare, Op, Revision, Store, StoreExt, Txn};

use crate::world::{World, attachment, soon};

const KEEP: Duration = Duration::from_secs(600);

/// A simulated compactor on one node, with what it noted about the store in its last run.
#[derive(Default)]
struct Compactor(Option<CompactionMark>);

impl Compactor {
    async fn run(&mut self, store: &dyn Store, seconds: u64) -> CompactionOutcome {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds);
        let (outcome, mark) = compact_older(store, self.0.take(), KEEP, now).await.unwrap();
        self.0 = Some(mark);
        outcome
    }
}

/// Writes `changes` revisions and returns the newest revision.
async fn write(store: &dyn Store, changes: usize) -> Revision {
    let mut newest = Revision::UNSET;
    for change in 0..changes {
        newest = store.put("/x", change.to_string()).await.unwrap();
    }
    newest
}

#[tokio::test]
async fn compaction_of_two_nodes_keeps_the_interval() {
    let store = kv_mvcc::memory();
    let (mut one, mut other) = (Compactor::default(), Compactor::default());
    let noted = write(&store, 5).await;
    assert_eq!(one.run(&store, 0).await, CompactionOutcome::Noted { newest: noted });
    assert_eq!(other.run(&store, 1).await, CompactionOutcome::Noted { newest: noted });
    write(&store, 5).await;
    assert_eq!(one.run(&store, 599).await, CompactionOutcome::TooEarly { noted_seconds_ago: 599 });
    assert_eq!(one.run(&store, 600).await, CompactionOutcome::Compacted { oldest: noted });
    let newest = store.get("/x").await.unwrap().unwrap().mod_revision;
    assert_eq!(oldest_revision(&store, newest).await.unwrap(), noted);
    assert_eq!(store.get(COMPACTION_KEY).await.unwrap().unwrap().value.as_bytes(), noted.to_string().as_bytes());
    assert_eq!(other.run(&store, 601).await, CompactionOutcome::OtherCompactor);
    assert_eq!(other.run(&store, 1201).await, CompactionOutcome::Compacted { oldest: newest.next() });
    assert_eq!(other.run(&store, 1801).await, CompactionOutcome::NothingToDo, "only the key has changed");
    // The second compactor goes on after the first has ended.
    let newest = write(&store, 5).await;
    assert_eq!(other.run(&store, 2401).await, CompactionOutcome::NothingToDo, "the changes are too young");
    assert_eq!(other.run(&store, 3001).await, CompactionOutcome::Compacted { oldest: newest });
    assert_eq!(other.run(&store, 3601).await, CompactionOutcome::NothingToDo);
}

#[tokio::test]
async fn compaction_is_left_to_kube_apiserver() {
    let store = kv_mvcc::memory();
    let mut ours = Compactor::default();
    write(&store, 5).await;
    ours.run(&store, 0).await;
    for interval in 1..4 {
        write(&store, 5).await;
        // kube-apiserver's compactor sends this transaction before each compaction.
        let version = store.get(COMPACTION_KEY).await.unwrap().map_or(0, |kv| kv.version);
        assert_eq!(version, interval - 1);
        let unchanged =
            Compare::new(kv::Range::Key(COMPACTION_KEY.into()), kv::CompareOp::Equal, kv::Target::Version(version));
        let txn = Txn::new().with_compares([unchanged]).with_success([Op::put(COMPACTION_KEY, "3")]);
        assert!(store.txn(txn).await.unwrap().succeeded);
        let seconds = u64::try_from(interval).unwrap() * 600;
        assert_eq!(ours.run(&store, seconds).await, CompactionOutcome::OtherCompactor);
    }
    let newest = write(&store, 1).await;
    assert_eq!(oldest_revision(&store, newest).await.unwrap(), Revision::new(1));
}

#[tokio::test]
async fn compaction_is_left_to_the_server_itself() {
    let store = kv_mvcc::memory();
    let mut ours = Compactor::default();
    write(&store, 5).await;
    ours.run(&store, 0).await;
    write(&store, 5).await;
    store.compact(Revision::new(3)).await.unwrap();
    assert_eq!(ours.run(&store, 600).await, CompactionOutcome::OtherCompaction);
    assert!(store.get(COMPACTION_KEY).await.unwrap().is_none());
    // Since the previous run, the store's server has not compacted the history on its own, so Margay's compactor
    // compacts again.
    assert!(matches!(ours.run(&store, 1200).await, CompactionOutcome::Compacted { .. }));
}

#[tokio::test]
async fn compaction_starts_anew_after_another_store_or_clock() {
    let store = kv_mvcc::memory();
    let mut ours = Compactor::default();
    write(&store, 5).await;
    ours.run(&store, 1000).await;
    assert!(matches!(ours.run(&store, 10).await, CompactionOutcome::Noted { .. }), "the clock was set back");
    let restored = kv_mvcc::memory();
    write(&restored, 2).await;
    assert!(
        matches!(ours.run(&restored, 2000).await, CompactionOutcome::Noted { .. }),
        "the store has fewer revisions"
    );
    assert_eq!(ours.run(&restored, 3000).await, CompactionOutcome::Compacted { oldest: Revision::new(3) });
    let newest = write(&restored, 1).await;
    assert_eq!(ours.run(&restored, 4000).await, CompactionOutcome::NothingToDo, "the change is too young");
    assert_eq!(ours.run(&restored, 5000).await, CompactionOutcome::Compacted { oldest: newest });
    assert_eq!(oldest_revision(&restored, newest.next()).await.unwrap(), newest);
}

#[tokio::test]
async fn history_age_is_that_of_the_next_assignment() {
    let world = World::new().await;
    world.add(NewPool::new("net", "10.0.0.0/26".parse().unwrap()).with_block_size(26)).await;
    let mut revisions = Vec::new();
    for hour in 1..6 {
        let mut request = AssignRequest::new(attachment("a", &format!("c{hour}")), RequestedAddresses::any(1, 0));
        let at = parse_rfc3339(&format!("2026-11-21T0{hour}:00:00Z")).unwrap();
        request.attributes.insert("timestamp".into(), go_string(at));
        world.assign(&request).await.unwrap();
        revisions.push((world.ipam.store().put("/x", "y").await.unwrap(), at));
    }
    let store = &**world.ipam.store();
    for pair in revisions.windows(2) {
        assert_eq!(time_after(store, pair[0].0).await.unwrap(), Some(pair[1].1));
    }
    assert_eq!(time_after(store, Revision::new(1)).await.unwrap(), Some(revisions[0].1));
    let (newest, _) = revisions[4];
    assert_eq!(time_after(store, newest).await.unwrap(), None);
    // A release of an address does not count as an assignment.
    world.ipam.release_attachment(&attachment("a", "c5"), &[], soon()).await.unwrap();
    assert_eq!(time_after(store, newest).await.unwrap(), None);
    assert_eq!(time_after(store, revisions[3].0).await.unwrap(), Some(revisions[4].1));
}

#[tokio::test]
async fn history_and_members_of_a_full_cluster_are_found() {
    let world = World::new().await;
    world.add(NewPool::new("net", "10.0.0.0/26".parse().unwrap()).with_block_size(26)).await;
    let mut request = AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(1, 0));
    request.attributes.insert("timestamp".into(), go_string(parse_rfc3339("2026-11-20T00:00:00Z").unwrap()));
    world.assign(&request).await.unwrap();
    let store = &**world.ipam.store();
    let newest = store.put("/x", "y").await.unwrap();
    let find = async |bytes_in_use: u64, problems: &[&str], now: &str| {
        let problems = problems.iter().map(|problem| (*problem).to_owned()).collect();
        let member = MemberSize {
            endpoint: "http://a:1".into(),
            bytes: bytes_in_use,
            bytes_in_use,
            quota_bytes: 1000,
            problems,
        };
        let now = parse_rfc3339(now).unwrap();
        let found = find_in_cluster(store, newest, &[member], 60, now).await.unwrap();
        found.into_iter().map(|finding| finding.code.as_str()).collect::<Vec<_>>()
    };
    let (same_day, next_day) = ("2026-11-20T23:59:59Z", "2026-11-21T00:00:01Z");
    assert_eq!(find(610, &["alarm:NOSPACE "], same_day).await, ["CLU-01", "CLU-02"]);
    assert_eq!(find(609, &[], same_day).await, [""; 0]);
    assert_eq!(find(109, &[], next_day).await, [""; 0]);
    assert_eq!(find(110, &[], next_day).await, ["CLU-03"]);
    assert_eq!(find(990, &["alarm:NOSPACE "], next_day).await, ["CLU-01", "CLU-02", "CLU-03"]);
}
