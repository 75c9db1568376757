//! Tests pending-commit files: the exact bytes of each format, the search for an attachment's files, and unreadable
//! files.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::NewPool;
use ipam_core::{Ipam, Nodes};
use kv::wrap::{Fault, FaultyStore};
use kv::{
    Compare, CompareOp, Content, Deadline, Op, Operation, Prev, Range, Revision, Store, StoreExt, Target, TxnRange,
};

use super::*;

fn attachment(container: &str) -> Attachment {
    let text = str::to_owned;
    Attachment {
        network: text("net"),
        container: text(container),
        interface: text("eth0"),
        node: text("n"),
        boot: Some(text("boot0001")),
    }
}

fn txn() -> Txn {
    let read = TxnRange::new(Range::From("f".into())).with_limit(-1).with_content(Content::KeysOnly);
    let span = Range::FromTo("a".into(), "b".into());
    Txn::new()
        .with_compares([
            Compare::unchanged("k", Revision::new(300)),
            Compare::absent("l"),
            Compare::nothing_newer(Range::prefix("p/"), Revision::new(7)),
            Compare::new(span.clone(), CompareOp::NotEqual, Target::Value("v".into())),
            Compare::new(Range::All, CompareOp::Greater, Target::Version(-1)),
            Compare::new(Range::All, CompareOp::Less, Target::CreateRevision(Revision::new(9))),
        ])
        .with_success([Op::put("k", vec![0, 0xff]).with_prev(), Op::delete("l"), Op::delete_range(span)])
        .with_failure([Op::Range(read), Op::range(Range::key("k"))])
}

fn note() -> CommitRecord {
    CommitRecord::new("etcd://h:1", &attachment("c"), &txn())
}

fn in_first_form(note: &CommitRecord) -> Vec<u8> {
    let mut content = Vec::new();
    let mut form = FirstForm(&mut content);
    form.bytes(note.store.as_bytes());
    ["net", "c", "eth0", "n"].iter().for_each(|name| form.bytes(name.as_bytes()));
    form.number(note.txn.compares.len() as u64);
    note.txn.compares.iter().for_each(|compare| form.compare(compare));
    for ops in [&note.txn.success, &note.txn.failure] {
        form.number(ops.len() as u64);
        ops.iter().for_each(|op| form.op(op));
    }
    let mut bytes = b"margay-intent\x01".to_vec();
    bytes.extend(CRC_32.checksum(&content).to_le_bytes());
    bytes.extend(content);
    bytes
}

struct FirstForm<'b>(&'b mut Vec<u8>);

impl FirstForm<'_> {
    fn number(&mut self, number: u64) {
        match number {
            0..=250 => self.0.push(u8::try_from(number).unwrap()),
            251..=0xffff => {
                self.0.push(251);
                self.0.extend(u16::try_from(number).unwrap().to_le_bytes());
            }
            _ => {
                self.0.push(252);
                self.0.extend(u32::try_from(number).unwrap().to_le_bytes());
            }
        }
    }

    fn signed(&mut self, number: i64) {
        self.number(((number << 1) ^ (number >> 63)).cast_unsigned());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn range(&mut self, range: &Range) {
        let (variant, keys) = match range {
            Range::Key(key) => (0, vec![key]),
            Range::Prefix(key) => (1, vec![key]),
            Range::FromTo(from, to) => (2, vec![from, to]),
            Range::From(key) => (3, vec![key]),
            Range::All => (4, Vec::new()),
        };
        self.number(variant);
        keys.into_iter().for_each(|key| self.bytes(key.as_bytes()));
    }

    fn compare(&mut self, compare: &Compare) {
        self.range(&compare.range);
        self.number(match compare.op {
            CompareOp::Equal => 0,
            CompareOp::NotEqual => 1,
            CompareOp::Less => 2,
            CompareOp::Greater => 3,
        });
        match &compare.target {
            Target::Version(version) => {
                self.number(0);
                self.signed(*version);
            }
            Target::CreateRevision(revision) => {
                self.number(1);
                self.signed(revision.get());
            }
            Target::ModRevision(revision) => {
                self.number(2);
                self.signed(revision.get());
            }
            Target::Value(value) => {
                self.number(3);
                self.bytes(value.as_bytes());
            }
            other => panic!("{other:?} is not in the first form"),
        }
    }

    fn op(&mut self, op: &Op) {
        match op {
            Op::Put { key, value, prev, lease: None } => {
                self.number(0);
                self.bytes(key.as_bytes());
                self.bytes(value.as_bytes());
                self.number(u64::from(*prev == Prev::Return));
            }
            Op::Delete { range, prev } => {
                self.number(1);
                self.range(range);
                self.number(u64::from(*prev == Prev::Return));
            }
            Op::Range(read) => {
                self.number(2);
                self.range(&read.range);
                self.signed(read.limit);
                self.number(match read.content {
                    Content::Full => 0,
                    Content::KeysOnly => 1,
                    Content::CountOnly => 2,
                });
            }
            other => panic!("{other:?} is not in the first form"),
        }
    }
}

/// Converts a pending-commit file from format 1 to format 2, with the given state bytes and a second attachment, of
/// container `d`.
fn for_two(note: &[u8], steps: &str) -> Vec<u8> {
    const BEFORE_THE_REST: usize = 13 + 1 + 4;
    let mut rest = note[BEFORE_THE_REST..].to_vec();
    // The bytes of the second attachment: four names, each preceded by a byte with its length.
    rest.extend(b"\x01\x03net\x01d\x04eth0\x01n");
    let mut bytes = note[..13].to_vec();
    bytes.push(2);
    bytes.extend(u32::try_from(rest.len()).unwrap().to_le_bytes());
    bytes.extend(CRC_32.checksum(&rest).to_le_bytes());
    bytes.extend(rest);
    bytes.extend(steps.bytes());
    bytes
}

/// Writes the file of a pending commit for two attachments, with a hard link for the second attachment. Returns the
/// path of the pending commit's file and the path of its hard link.
fn leave_for_two(folder: &Path, note: &[u8], steps: &str) -> [PathBuf; 2] {
    let paths = ["c", "d"].map(|container| folder.join(format!("{}old{FILE_SUFFIX}", prefix(&attachment(container)))));
    fs::write(&paths[0], for_two(note, steps)).unwrap();
    fs::hard_link(&paths[0], &paths[1]).unwrap();
    paths
}

/// Returns the pending commits of an attachment without querying any cluster.
fn pending(intents: &PendingCommitFolder, attachment: &Attachment) -> io::Result<Vec<PendingCommit>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(intents.pending(attachment))
}

fn record(intents: &PendingCommitFolder, container: &str, txn: &Txn) -> PendingCommitId {
    intents.record(&attachment(container), txn).unwrap()
}

fn ids(pending: io::Result<Vec<PendingCommit>>) -> Vec<PendingCommitId> {
    pending.unwrap().into_iter().map(|pending| pending.id).collect()
}

/// Checks that the bytes of a pending commit's file never change, because such files exist on users' machines. If this
/// test fails, the format of pending-commit files has changed and needs a new format number.
#[test]
fn note_bytes_never_change() {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(&note().encode().unwrap()), GOLDEN);
    let first = in_first_form(&note());
    assert_eq!(hex(&first), GOLDEN_FIRST);
    assert_eq!(hex(&for_two(&first, "")), GOLDEN_FOR_TWO);
}

const GOLDEN: &str = "\
    6d61726761792d696e74656e74039fc52a6d0a657463643a2f2f683a31036e657401630465746830016e0600016b0002fb58\
    0200016c0002000102702f02021002016101620103017604030001040201120300016b0200ff01000100016c000102016101\
    6200020203016601010200016b0000";

const GOLDEN_FIRST: &str = "\
    6d61726761792d696e74656e7401269a1afc0a657463643a2f2f683a31036e657401630465746830016e0600016b0002fb58\
    0200016c0002000102702f02021002016101620103017604030001040201120300016b0200ff010100016c00010201610162\
    00020203016601010200016b0000";

const GOLDEN_FOR_TWO: &str = "\
    6d61726761792d696e74656e74026e000000d773481a0a657463643a2f2f683a31036e657401630465746830016e0600016b\
    0002fb580200016c0002000102702f02021002016101620103017604030001040201120300016b0200ff010100016c000102\
    0161016200020203016601010200016b000001036e657401640465746830016e";

#[test]
fn note_is_read_as_written() {
    assert_eq!(CommitRecord::decode(&note().encode().unwrap()), Ok((note(), None)));
    assert_eq!(CommitRecord::decode(&in_first_form(&note())), Ok((note(), None)));
    for steps in ["", "c"] {
        let bytes = for_two(&in_first_form(&note()), steps);
        let (note, steps_at) = CommitRecord::decode(&bytes).unwrap();
        assert_eq!((&note.txn, steps_at), (&txn(), Some(bytes.len() - steps.len())));
        assert_eq!(["c", "d", "e"].map(|container| note.is_of(&attachment(container))), [true, true, false]);
        assert!(note.encode().is_err(), "it is only read");
    }
}

#[test]
fn note_is_refused_when_cut_changed_or_foreign() {
    let whole = note().encode().unwrap();
    let first = in_first_form(&note());
    for bytes in [whole.clone(), for_two(&first, ""), first] {
        for length in 0..bytes.len() {
            assert!(CommitRecord::decode(&bytes[..length]).is_err(), "cut to {length}");
        }
        for place in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[place] ^= 1 << bit;
                assert!(CommitRecord::decode(&changed).is_err(), "bit {bit} of byte {place}");
            }
        }
    }
    let mut longer = whole.clone();
    longer.push(0);
    assert_eq!(CommitRecord::decode(&longer), Err(RecordError::Damaged));
    let mut newer = whole;
    newer[13] = 4;
    assert_eq!(CommitRecord::decode(&newer), Err(RecordError::OtherVersion(4)));
}

#[test]
fn notes_are_found_by_attachment_until_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let intents = PendingCommitFolder::new(folder.path().join("run/intents"), "etcd://h:1");
    assert_eq!(pending(&intents, &attachment("c")).unwrap(), []);
    let id = record(&intents, "c", &txn());
    let other = record(&intents, "d", &Txn::new());
    assert_ne!(id, other);
    assert_eq!(pending(&intents, &attachment("c")).unwrap(), [PendingCommit { id: id.clone(), txn: txn() }]);
    let elsewhere = PendingCommitFolder::new(folder.path().join("run/intents"), "etcd://h:2");
    assert_eq!(pending(&elsewhere, &attachment("c")).unwrap(), [], "another store is not sent this");
    intents.forget(&id);
    intents.forget(&id);
    assert_eq!(pending(&intents, &attachment("c")).unwrap(), []);
    assert_eq!(pending(&intents, &attachment("d")).unwrap().len(), 1);
}

#[test]
fn notes_are_found_by_cluster_when_address_changes() {
    assert_eq!(address_and_cluster("etcd://a:1,b:2 cluster 1f"), ("etcd://a:1,b:2", Some(0x1f)));
    for old in ["etcd://a:1", "etcd members in the SRV records of cluster x", "etcd://a:1 cluster ", ""] {
        assert_eq!(address_and_cluster(old), (old, None));
    }
    let folder = tempfile::tempdir().unwrap();
    let intents = PendingCommitFolder::new(folder.path(), "etcd://h:1");
    assert_eq!(intents.name_of_store(), "etcd://h:1");
    let named = CommitRecord::new("etcd://h:1 cluster 1f", &attachment("c"), &txn()).encode().unwrap();
    whole_file::create(folder.path(), &format!("{}1{FILE_SUFFIX}", prefix(&attachment("c"))), &named).unwrap();
    // Without a cluster to query, a pending commit is found only under the store address with which it was recorded.
    assert_eq!(ids(pending(&intents, &attachment("c"))).len(), 1);
    assert_eq!(intents.recorded_here(&attachment("c")).unwrap().len(), 1);
    let elsewhere = PendingCommitFolder::new(folder.path(), "etcd://h:2");
    assert_eq!(ids(pending(&elsewhere, &attachment("c"))), []);
}

#[test]
fn notes_are_private_to_owner() {
    let folder = tempfile::tempdir().unwrap();
    let intents = PendingCommitFolder::new(folder.path().join("intents"), "s");
    let id = record(&intents, "c", &txn());
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.path().join("intents")), 0o700);
    assert_eq!(mode(&folder.path().join("intents").join(id.0)), 0o600);
    assert_eq!(folder.path().join("intents").read_dir().unwrap().count(), 1, "nothing unfinished is left");
}

#[test]
fn notes_are_kept_and_ignored_when_unreadable() {
    let folder = tempfile::tempdir().unwrap();
    let intents = PendingCommitFolder::new(folder.path(), "etcd://h:1");
    let id = record(&intents, "c", &txn());
    let path = folder.path().join(&id.0);
    let whole = fs::read(&path).unwrap();
    let prefix = prefix(&attachment("c"));
    // Add a file of another attachment with the same name prefix, and files that are not pending commits.
    let foreign = CommitRecord::new("etcd://h:1", &attachment("d"), &Txn::new()).encode().unwrap();
    fs::write(folder.path().join(format!("{prefix}1{FILE_SUFFIX}")), foreign).unwrap();
    fs::write(folder.path().join(format!("{prefix}2{FILE_SUFFIX}")), &whole[..whole.len() / 2]).unwrap();
    fs::write(folder.path().join(format!("{prefix}3{FILE_SUFFIX}.tmp")), &whole).unwrap();
    fs::write(folder.path().join("README"), "hello").unwrap();
    fs::create_dir(folder.path().join(format!("{prefix}4{FILE_SUFFIX}"))).unwrap();
    assert_eq!(pending(&intents, &attachment("c")).unwrap(), [PendingCommit { id, txn: txn() }]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 6);
}

#[test]
fn earlier_version_note_for_several_counts_until_done() {
    let note = in_first_form(&note());
    // A process that finds the file of a pending commit appends the state bytes "void" and "found" to the file. A
    // transaction is pending if "c" (closed) comes before "v" (void) or without "v", and "f" (found) comes before "d"
    // (done) or without "d".
    let pending_after = ["c", "cv", "cf", "cvf", "cfd", "cvfd"];
    let settled_after = ["", "v", "vc", "vf", "vcd", "cd", "cdf", "cdvf"];
    for (steps, is_pending) in
        pending_after.map(|steps| (steps, true)).into_iter().chain(settled_after.map(|steps| (steps, false)))
    {
        let folder = tempfile::tempdir().unwrap();
        let intents = PendingCommitFolder::new(folder.path(), "etcd://h:1");
        let paths = leave_for_two(folder.path(), &note, steps);
        for (container, path) in ["c", "d"].into_iter().zip(paths) {
            for _ in 0..2 {
                let found = pending(&intents, &attachment(container)).unwrap();
                assert_eq!(found.iter().any(|found| found.txn == txn()), is_pending, "{steps}, {container}");
                assert_eq!(path.exists(), is_pending, "{steps}, {container}");
            }
            // Each attachment removes only its own hard link to the file, so the other attachment still finds the
            // pending commit.
            ids(pending(&intents, &attachment(container))).iter().for_each(|id| intents.forget(id));
        }
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }
}

/// Checks which state bytes a process appends when it finds a pending-commit file of format 2. If the writer of a
/// pending commit still runs, it does not send a transaction whose file has the state byte "void", and does not remove
/// a file with the state byte "found".
#[test]
fn earlier_version_note_gets_steps_its_writer_looks_at() {
    let folder = tempfile::tempdir().unwrap();
    let intents = PendingCommitFolder::new(folder.path(), "etcd://h:1");
    let note = in_first_form(&note());
    let whole = for_two(&note, "");
    for (before, after) in [("", "vf"), ("c", "cvf")] {
        let [path, _] = leave_for_two(folder.path(), &note, before);
        drop(ids(pending(&intents, &attachment("d"))));
        assert_eq!(fs::read(&path).unwrap()[whole.len()..], *after.as_bytes());
        fs::read_dir(folder.path()).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
    }
}

#[tokio::test]
async fn earlier_version_note_is_settled_by_each_attachment() {
    let folder = tempfile::tempdir().unwrap();
    let store = kv_mvcc::memory();
    let ipam = |store: Arc<dyn Store>| {
        Ipam::new(store, Nodes::FirstSeen)
            .with_pending_commits(Arc::new(PendingCommitFolder::new(folder.path(), "etcd://h:1")))
    };
    let soon = || Deadline::after(Duration::from_secs(30));
    let one = |container| AssignRequest::new(attachment(container), RequestedAddresses::any(1, 0));
    let sound = ipam(Arc::new(store.clone()));
    sound.create_pool(&NewPool::new("v4", "10.0.0.0/24".parse().unwrap()), None, soon()).await.unwrap();
    sound.assign(&one("before"), soon()).await.unwrap();
    // The test store carries out the first transaction and delays all later transactions.
    let asked = AtomicU32::new(0);
    let late = FaultyStore::new(store.clone(), move |operation| {
        (operation == Operation::Txn && asked.fetch_add(1, SeqCst) > 0).then_some(Fault::Held)
    });
    let broken = ipam(Arc::new(late.clone()));
    broken.assign(&one("c"), Deadline::after(Duration::from_millis(200))).await.unwrap_err();
    let note = folder.path().read_dir().unwrap().next().unwrap().unwrap().path();
    let (sent, _) = CommitRecord::decode(&fs::read(&note).unwrap()).unwrap();
    leave_for_two(folder.path(), &in_first_form(&sent), "c");
    fs::remove_file(note).unwrap();

    // Releasing container `d` settles the pending commit by sending it again, which assigns an address to container
    // `c`; releasing `c` then frees this address.
    assert_eq!(sound.release_attachment(&attachment("d"), &[], soon()).await.unwrap(), Vec::<std::net::IpAddr>::new());
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    assert_eq!(sound.release_attachment(&attachment("c"), &[], soon()).await.unwrap().len(), 1);
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    let before = store.list(Range::All).await.unwrap().kvs;
    assert!(!late.deliver_held().await.unwrap().is_empty());
    assert_eq!(store.list(Range::All).await.unwrap().kvs, before);
}
