//! Tests that every rule has a conformance case, and that every case has a rule.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use conformance::{cases, rules};

fn rule_ids() -> Vec<String> {
    rules().into_iter().map(|rule| rule.id).collect()
}

fn assert_unique(names: &[&str]) {
    let different: BTreeSet<&str> = names.iter().copied().collect();
    let twice: Vec<&&str> =
        different.iter().filter(|name| names.iter().filter(|other| other == name).count() > 1).collect();
    assert!(twice.is_empty(), "more than once: {twice:?}");
}

#[test]
fn case_names_and_numbers_are_unique() {
    let ids = rule_ids();
    assert_unique(&ids.iter().map(String::as_str).collect::<Vec<_>>());
    let all = cases();
    assert_unique(&all.iter().map(|case| case.name()).collect::<Vec<_>>());
    assert_unique(&all.iter().map(|case| &case.name()[..3]).collect::<Vec<_>>());
}

#[test]
fn case_rules_all_exist() {
    let ids = rule_ids();
    for case in cases() {
        assert!(!case.rules().is_empty(), "{} names no rule", case.name());
        assert_unique(case.rules());
        for rule in case.rules() {
            assert!(ids.iter().any(|id| id == rule), "{} names {rule}, which does not exist", case.name());
        }
    }
}

#[test]
fn rules_all_have_case() {
    let judged: BTreeSet<&str> = cases().iter().flat_map(|case| case.rules()).copied().collect();
    let bare: Vec<String> = rule_ids().into_iter().filter(|id| !judged.contains(id.as_str())).collect();
    assert!(bare.is_empty(), "no case: {bare:?}");
}

fn sources(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

#[test]
fn expectation_rules_all_exist() {
    let ids = rule_ids();
    let mut named = 0;
    for path in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let text = fs::read_to_string(&path).unwrap();
        for rest in text.split(".of(\"").skip(1) {
            let rule = rest.split('"').next().unwrap();
            assert!(ids.iter().any(|id| id == rule), "{} names {rule}, which does not exist", path.display());
            named += 1;
        }
    }
    assert!(named > 50, "only {named} expectations were found");
}
