//! Notes as files: golden bytes, what is found, and what becomes of what is no note.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::{Arc, Mutex};

use kv::{Compare, CompareOp, Content, Op, Range, Revision, Target, TxnRange};

use super::*;

pub(crate) fn attachment(container: &str) -> Attachment {
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

fn note() -> Note {
    Note::new("etcd://h:1", &[attachment("c")], &txn())
}

fn note_for_two() -> Note {
    Note::new("etcd://h:1", &[attachment("c"), attachment("d")], &txn())
}

fn always() -> StillAsked {
    Arc::new(|| true)
}

/// The pending notes, for an attachment on a store that need not be asked anything.
fn pending(intents: &FileIntents, attachment: &Attachment) -> io::Result<Vec<Pending>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(intents.pending(attachment))
}

/// Notes it for these containers.
fn record(intents: &FileIntents, containers: &[&str], txn: &Txn, still_asked: &StillAsked) -> Option<IntentId> {
    let attachments: Vec<Attachment> = containers.iter().map(|container| attachment(container)).collect();
    intents.record(&attachments, txn, still_asked).unwrap()
}

fn ids(pending: io::Result<Vec<Pending>>) -> Vec<IntentId> {
    pending.unwrap().into_iter().map(|pending| pending.id).collect()
}

/// What is on disk on other people's machines: if this fails, the form has changed and needs another version.
#[test]
fn the_bytes_are_these() {
    let hex = |note: Note| note.encode().unwrap().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(note()), GOLDEN);
    assert_eq!(hex(note_for_two()), GOLDEN_FOR_TWO);
}

const GOLDEN: &str = "\
    6d61726761792d696e74656e7401269a1afc0a657463643a2f2f683a31036e657401630465746830016e0600016b0002fb58\
    0200016c0002000102702f02021002016101620103017604030001040201120300016b0200ff010100016c00010201610162\
    00020203016601010200016b0000";

const GOLDEN_FOR_TWO: &str = "\
    6d61726761792d696e74656e74026e000000d773481a0a657463643a2f2f683a31036e657401630465746830016e0600016b\
    0002fb580200016c0002000102702f02021002016101620103017604030001040201120300016b0200ff010100016c000102\
    0161016200020203016601010200016b000001036e657401640465746830016e";

#[test]
fn a_note_comes_back_as_it_was() {
    assert_eq!(Note::decode(&note().encode().unwrap()), Ok((note(), None)));
    let mut bytes = note_for_two().encode().unwrap();
    for _ in 0..2 {
        assert_eq!(Note::decode(&bytes), Ok((note_for_two(), Some(note_for_two().encode().unwrap().len()))));
        bytes.push(CLOSED);
    }
}

#[test]
fn what_is_cut_changed_or_foreign_is_no_note() {
    for note in [note(), note_for_two()] {
        let bytes = note.encode().unwrap();
        for length in 0..bytes.len() {
            assert!(Note::decode(&bytes[..length]).is_err(), "cut to {length}");
        }
        for place in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[place] ^= 1 << bit;
                assert!(Note::decode(&changed).is_err(), "bit {bit} of byte {place}");
            }
        }
    }
    let bytes = note().encode().unwrap();
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(Note::decode(&longer), Err(codec::NoNote::Damaged));
    let mut newer = bytes;
    newer[13] = 3;
    assert_eq!(Note::decode(&newer), Err(codec::NoNote::OtherVersion(3)));
}

#[test]
fn notes_are_found_by_whom_they_concern_until_they_are_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path().join("run/intents"), "etcd://h:1");
    assert_eq!(pending(&intents, &attachment("c")).unwrap(), []);
    let id = record(&intents, &["c"], &txn(), &always()).unwrap();
    let other = record(&intents, &["d"], &Txn::new(), &always()).unwrap();
    assert_ne!(id, other);
    assert_eq!(pending(&intents, &attachment("c")).unwrap(), [Pending { id: id.clone(), txn: txn() }]);
    let elsewhere = FileIntents::new(folder.path().join("run/intents"), "etcd://h:2");
    assert_eq!(pending(&elsewhere, &attachment("c")).unwrap(), [], "another store is not sent this");
    intents.forget(&id);
    intents.forget(&id);
    assert_eq!(pending(&intents, &attachment("c")).unwrap(), []);
    assert_eq!(pending(&intents, &attachment("d")).unwrap().len(), 1);
}

#[test]
fn the_cluster_counts_and_not_the_address() {
    assert_eq!(address_and_cluster("etcd://a:1,b:2 cluster 1f"), ("etcd://a:1,b:2", Some(0x1f)));
    for old in ["etcd://a:1", "etcd members in the SRV records of cluster x", "etcd://a:1 cluster ", ""] {
        assert_eq!(address_and_cluster(old), (old, None));
    }
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path(), "etcd://h:1");
    assert_eq!(intents.name_of_store(), "etcd://h:1");
    let named = Note::new("etcd://h:1 cluster 1f", &[attachment("c")], &txn()).encode().unwrap();
    whole_file::create(folder.path(), &format!("{}1{SUFFIX}", prefix(&attachment("c"))), &named).unwrap();
    // Where the store is no etcd that could be asked, the address is all there is.
    assert_eq!(ids(pending(&intents, &attachment("c"))).len(), 1);
    assert_eq!(intents.noted(&attachment("c")).unwrap().len(), 1);
    let elsewhere = FileIntents::new(folder.path(), "etcd://h:2");
    assert_eq!(ids(pending(&elsewhere, &attachment("c"))), []);
}

#[test]
fn notes_are_their_owners_alone() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path().join("intents"), "s");
    let id = record(&intents, &["c"], &txn(), &always()).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.path().join("intents")), 0o700);
    assert_eq!(mode(&folder.path().join("intents").join(id.0)), 0o600);
    assert_eq!(folder.path().join("intents").read_dir().unwrap().count(), 1, "nothing unfinished is left");
}

#[test]
fn what_cannot_be_read_is_nobodys_and_stays() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path(), "etcd://h:1");
    let id = record(&intents, &["c"], &txn(), &always()).unwrap();
    let path = folder.path().join(&id.0);
    let whole = fs::read(&path).unwrap();
    let prefix = prefix(&attachment("c"));
    // One that only looks like this attachment's, and what nobody should have put there.
    let foreign = Note::new("etcd://h:1", &[attachment("d")], &Txn::new()).encode().unwrap();
    fs::write(folder.path().join(format!("{prefix}1{SUFFIX}")), foreign).unwrap();
    fs::write(folder.path().join(format!("{prefix}2{SUFFIX}")), &whole[..whole.len() / 2]).unwrap();
    fs::write(folder.path().join(format!("{prefix}3{SUFFIX}.tmp")), &whole).unwrap();
    fs::write(folder.path().join("README"), "hello").unwrap();
    fs::create_dir(folder.path().join(format!("{prefix}4{SUFFIX}"))).unwrap();
    assert_eq!(pending(&intents, &attachment("c")).unwrap(), [Pending { id, txn: txn() }]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 6);
}

#[test]
fn a_note_for_several_is_found_by_each() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path(), "etcd://h:1");
    let all = ["c", "d", "e"];
    let id = record(&intents, &all, &txn(), &always()).unwrap();
    assert_eq!(folder.path().read_dir().unwrap().count(), 3);
    assert_eq!(fs::metadata(folder.path().join(id.0.rsplit(AND).next().unwrap())).unwrap().nlink(), 3);
    for container in all {
        assert_eq!(intents.noted(&attachment(container)).unwrap()[0].txn, txn());
    }
    assert_eq!(ids(intents.noted(&attachment("f"))), []);
    // Nobody but who only looks has found it, so it goes for all of them.
    intents.forget(&id);
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}

#[test]
fn a_note_for_several_that_was_found_stays_for_each_until_that_one_has_settled_it() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path(), "etcd://h:1");
    let id = record(&intents, &["c", "d"], &txn(), &always()).unwrap();
    let found = pending(&intents, &attachment("d")).unwrap();
    assert_eq!(found[0].txn, txn());
    // Its writer learns the outcome while it is sent again.
    intents.forget(&id);
    for container in ["c", "d", "c", "d"] {
        assert_eq!(pending(&intents, &attachment(container)).unwrap().len(), 1, "{container}");
    }
    intents.forget(&found[0].id);
    assert_eq!(ids(pending(&intents, &attachment("d"))), []);
    let [last] = &ids(pending(&intents, &attachment("c")))[..] else { panic!("it is gone") };
    intents.forget(last);
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}

#[test]
fn an_open_note_that_was_found_is_void_and_nothing_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path(), "etcd://h:1");
    for finder in ["c", "d", "e"] {
        let found = intents.clone();
        // After all could find it, and before it is closed.
        let still_asked: StillAsked = Arc::new(move || {
            assert_eq!(ids(found.noted(&attachment(finder))), [], "it was not sent");
            assert_eq!(ids(pending(&found, &attachment(finder))), []);
            true
        });
        assert_eq!(record(&intents, &["c", "d", "e"], &txn(), &still_asked), None, "{finder}");
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }
}

#[test]
fn an_open_note_of_a_dead_process_is_void() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path(), "etcd://h:1");
    // What there is when it dies before the note is closed.
    let kept = Arc::new(Mutex::new(Vec::new()));
    let (seen, path) = (Arc::clone(&kept), folder.path().to_owned());
    let still_asked: StillAsked = Arc::new(move || {
        let names = path.read_dir().unwrap().map(|entry| entry.unwrap().path());
        *seen.lock().unwrap() = names.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
        false
    });
    assert_eq!(record(&intents, &["c", "d"], &txn(), &still_asked), None);
    let kept = kept.lock().unwrap();
    assert_eq!(kept.len(), 2);
    fs::write(&kept[0].0, &kept[0].1).unwrap();
    fs::hard_link(&kept[0].0, &kept[1].0).unwrap();
    for container in ["c", "d"] {
        assert_eq!(ids(pending(&intents, &attachment(container))), []);
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}
