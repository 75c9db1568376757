//! Notes as files: golden bytes, what is found, and what becomes of what is no note.

use std::os::unix::fs::PermissionsExt;

use kv::{Compare, CompareOp, Content, Op, Range, Revision, Target, TxnRange};

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

fn note() -> Note {
    Note::new("etcd://h:1", &attachment("c"), &txn())
}

/// What is on disk on other people's machines: if this fails, the form has changed and needs another version.
#[test]
fn the_bytes_are_these() {
    let hex: String = note().encode().unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, GOLDEN);
}

const GOLDEN: &str = "\
    6d61726761792d696e74656e7401269a1afc0a657463643a2f2f683a31036e657401630465746830016e0600016b0002fb58\
    0200016c0002000102702f02021002016101620103017604030001040201120300016b0200ff010100016c00010201610162\
    00020203016601010200016b0000";

#[test]
fn a_note_comes_back_as_it_was() {
    assert_eq!(Note::decode(&note().encode().unwrap()), Ok(note()));
}

#[test]
fn what_is_cut_changed_or_foreign_is_no_note() {
    let bytes = note().encode().unwrap();
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
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(Note::decode(&longer), Err(codec::NoNote::Damaged));
    let mut newer = bytes;
    newer[13] = 2;
    assert_eq!(Note::decode(&newer), Err(codec::NoNote::OtherVersion(2)));
}

#[test]
fn notes_are_found_by_whom_they_concern_until_they_are_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path().join("run/intents"), "etcd://h:1");
    assert_eq!(intents.pending(&attachment("c")).unwrap(), []);
    let id = intents.record(&attachment("c"), &txn()).unwrap();
    let other = intents.record(&attachment("d"), &Txn::new()).unwrap();
    assert_ne!(id, other);
    assert_eq!(intents.pending(&attachment("c")).unwrap(), [Pending { id: id.clone(), txn: txn() }]);
    let elsewhere = FileIntents::new(folder.path().join("run/intents"), "etcd://h:2");
    assert_eq!(elsewhere.pending(&attachment("c")).unwrap(), [], "another store is not sent this");
    intents.forget(&id);
    intents.forget(&id);
    assert_eq!(intents.pending(&attachment("c")).unwrap(), []);
    assert_eq!(intents.pending(&attachment("d")).unwrap().len(), 1);
}

#[test]
fn notes_are_their_owners_alone() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path().join("intents"), "s");
    let id = intents.record(&attachment("c"), &txn()).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.path().join("intents")), 0o700);
    assert_eq!(mode(&folder.path().join("intents").join(id.0)), 0o600);
    assert_eq!(folder.path().join("intents").read_dir().unwrap().count(), 1, "nothing unfinished is left");
}

#[test]
fn what_cannot_be_read_is_nobodys_and_stays() {
    let folder = tempfile::tempdir().unwrap();
    let intents = FileIntents::new(folder.path(), "etcd://h:1");
    let id = intents.record(&attachment("c"), &txn()).unwrap();
    let path = folder.path().join(&id.0);
    let whole = fs::read(&path).unwrap();
    let prefix = prefix(&attachment("c"));
    // One that only looks like this attachment's, and what nobody should have put there.
    let foreign = Note::new("etcd://h:1", &attachment("d"), &Txn::new()).encode().unwrap();
    fs::write(folder.path().join(format!("{prefix}1{SUFFIX}")), foreign).unwrap();
    fs::write(folder.path().join(format!("{prefix}2{SUFFIX}")), &whole[..whole.len() / 2]).unwrap();
    fs::write(folder.path().join(format!("{prefix}3{SUFFIX}.tmp")), &whole).unwrap();
    fs::write(folder.path().join("README"), "hello").unwrap();
    fs::create_dir(folder.path().join(format!("{prefix}4{SUFFIX}"))).unwrap();
    assert_eq!(intents.pending(&attachment("c")).unwrap(), [Pending { id, txn: txn() }]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 6);
}
