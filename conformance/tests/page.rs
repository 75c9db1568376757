//! Checks that the Rust code in `README.md` is quoted from source files that are compiled and run.

use std::fs;
use std::path::{Path, PathBuf};

/// The source files from which `README.md` quotes. Each quoted file is a test or a part of a test.
const SOURCES: [&str; 6] = [
    "tests/readme/main.rs",
    "tests/readme/history.rs",
    "../examples/sqlite/src/table.rs",
    "../examples/sqlite/src/lib.rs",
    "../examples/plugged/src/lib.rs",
    "../examples/plugged/src/bin/margay.rs",
];

fn read(file: &str) -> String {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn rules_page_quotes_compiled_table() {
    let sources = SOURCES.map(read);
    let page = read("README.md");
    let blocks: Vec<&str> =
        page.split("```rust\n").skip(1).filter_map(|rest| rest.split_once("```")).map(|(block, _)| block).collect();
    assert!(blocks.len() >= 3, "{} blocks of Rust", blocks.len());
    for block in blocks {
        assert!(sources.iter().any(|source| source.contains(block)), "in none of {SOURCES:?}:\n{block}");
    }
}
