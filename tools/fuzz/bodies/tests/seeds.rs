//! Runs every fuzz target on the target's seeds.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use fuzz_bodies::TARGETS;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

fn names(folder: PathBuf) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect()
}

#[test]
fn fuzz_targets_all_take_their_seeds() {
    for target in TARGETS {
        let mut count = 0;
        for seed in fs::read_dir(folder("seeds").join(target.name)).unwrap() {
            let path = seed.unwrap().path();
            println!("{}: {}", target.name, path.file_name().unwrap().display());
            (target.run)(&fs::read(&path).unwrap());
            count += 1;
        }
        assert!(count >= 3, "{} has {count} seeds", target.name);
        // Besides the seeds, tries the simple inputs with which every fuzzer starts.
        for input in [&[][..], &[0], &[0xff; 100], &[0; 100]] {
            (target.run)(input);
        }
    }
}

#[test]
fn fuzz_targets_are_complete() {
    let table: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(names(folder("fuzz_targets")), table);
    assert_eq!(names(folder("seeds")), table);
}

/// Recreates the packed stores in `tools/fuzz/stores`: run `cargo test -p fuzz-bodies -- --ignored make_stores`, then
/// check the diff.
#[test]
#[ignore = "writes tools/fuzz/stores"]
fn make_stores() {
    for name in ["redb", "sled"] {
        fs::write(folder("stores").join(format!("{name}.pack")), fuzz_bodies::packed_store(name)).unwrap();
    }
}
