//! Tests `margay migrate` between stores of all kinds.

use crate::moving::fill::{Places, assign, at, calicos, migrate, moved, ours, release};
use crate::store::content::{content, write};

#[test]
fn migration_works_between_all_kinds_of_store() {
    let places = Places::with_etcd();
    let (sled, redb, etcd, last) = (places.sled("a"), places.redb("b"), places.etcd(), places.sled("c"));
    calicos(&sled);
    ours(&sled, 70);
    for (from, to) in [(&sled, &redb), (&redb, &etcd), (&etcd, &last)] {
        let done = migrate(from, to, &["--dry-run"]);
        assert!(done.out.starts_with("Would copy") && done.code == 0, "{}", done.err);
        let json = migrate(from, to, &["-o", "json"]).json();
        let expected = moved(from);
        assert_eq!((&json["keys"], &json["new"]), (&expected.len().into(), &expected.len().into()), "{json}");
        assert_eq!(json["addresses"], 312, "{json}");
        let said = assign(to, "early").unwrap_err().to_string();
        let command = format!("margay migrate {from} {to} --finish");
        assert!(said.contains("a migration that is not finished") && said.contains(&command), "{said}");
        assert!(release(to, "c1").unwrap_err().to_string().contains(&command));
        let said = at(to, &["pool", "create", "more", "10.98.0.0/16"]).failure();
        assert!(said.contains(&command), "{said}");
        assert!(at(to, &["ipam", "show"]).answer().contains("10.99.0.0/16"), "a person may look");
        let said = migrate(from, to, &["--finish"]);
        assert!(said.code == 0 && said.out.starts_with("Successfully moved"), "{}", said.err);
        assert_eq!(content(to), expected);
        // Both stores are in the state that `margay migrate --finish` leaves if it is killed before it prints its
        // answer.
        for more in [&["--finish"][..], &["--finish", "--dry-run"]] {
            let said = migrate(from, to, more).answer();
            assert!(said.contains("is open for use already") && said.contains("312 addresses"), "{said}");
        }
        assert_eq!(content(to), expected);
    }
    assert_eq!(release(&last, "c1").unwrap().len(), 1);
    let said = migrate(&etcd, &last, &["--finish"]).failure();
    assert!(said.contains("is not the target of a migration"), "{said}");
}

#[test]
fn migration_catches_up_when_source_moves_on() {
    let places = Places::new();
    for (from, to) in [(places.sled("a"), places.redb("b")), (places.redb("c"), places.sled("d"))] {
        ours(&from, 20);
        assert_eq!(migrate(&from, &to, &[]).code, 0);
        release(&from, "c3").unwrap();
        assign(&from, "new").unwrap();
        let before = content(&to);
        let said = migrate(&from, &to, &["--finish"]).failure();
        assert!(said.contains("are not equal: 3 documents differ"), "{said}");
        assert!(said.contains("handle/lab.c3 (gone)") && said.contains("handle/lab.new (new)"), "{said}");
        assert_eq!(content(&to), before);
        let json = migrate(&from, &to, &["-o", "json"]).json();
        assert_eq!((&json["new"], &json["changed"], &json["gone"]), (&1.into(), &1.into(), &1.into()), "{json}");
        assert_eq!(migrate(&from, &to, &["--finish", "--dry-run"]).code, 0);
        assert!(assign(&to, "early").is_err());
        assert_eq!(migrate(&from, &to, &["--finish"]).code, 0);
        assert_eq!(content(&to), content(&from));
        assign(&to, "later").unwrap();
    }
}

#[test]
fn migration_leaves_empty_store_when_aborted() {
    let places = Places::with_etcd();
    let (from, to) = (places.sled("a"), places.etcd());
    calicos(&from);
    let own = "/calico/resources/v3/projectcalico.org/nodes/node1".to_owned();
    write(&to, [(own.clone(), b"{}".to_vec())]);
    let before = content(&to);
    let done = migrate(&from, &to, &[]);
    assert!(done.code == 0 && done.out.contains("already stay as they are"), "{}{}", done.out, done.err);
    assert_eq!(content(&to)[own.as_bytes()], b"{}");
    assert_eq!(migrate(&from, &to, &["--abort", "--dry-run"]).code, 0);
    assert!(content(&to).len() > 200);
    let said = migrate(&from, &to, &["--abort"]).answer();
    assert!(said.contains("is empty again"), "{said}");
    assert_eq!(content(&to), before);
    let said = migrate(&from, &to, &["--abort"]).failure();
    assert!(said.contains("is not the target of a migration"), "{said}");
}

#[test]
fn migration_is_refused_when_source_or_target_is_unfit() {
    let places = Places::new();
    let (from, to, third) = (places.sled("a"), places.redb("b"), places.sled("c"));
    ours(&from, 2);
    ours(&third, 2);
    for (from, to, more, words) in [
        (&from, &from, &[][..], "are the same store"),
        (&from, &third, &[], "is not empty"),
        (&from, &third, &["--dry-run"], "is not empty"),
        (&to, &from, &[], "there is no store at"),
        (&from, &to, &["--finish"], "is not the target of a migration"),
    ] {
        let said = migrate(from, to, more).failure();
        assert!(said.contains(words), "{said}");
        assert!(said.contains("hint: "), "{said}");
    }
    assert_eq!(migrate(&from, &to, &[]).code, 0);
    for (from, to, words) in [(&third, &to, "is being filled from"), (&to, &places.sled("d"), "is itself the target")] {
        let said = migrate(from, to, &[]).failure();
        assert!(said.contains(words), "{said}");
    }
    let file = places.path("export");
    let said = at(&to, &["export", file.to_str().unwrap()]).failure();
    assert!(said.contains("is itself the target") && !file.exists(), "{said}");
}
