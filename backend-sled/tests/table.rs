//! Tests how rows of the store are laid out in sled's files.

use backend_sled::Sled;
use kv_local::Engine;
use kv_mvcc::{MAX_ROW_BYTES, Write};

/// For large pages, sled creates separate files that it never syncs; syncing each of these files before a commit is
/// slow. Values are split into rows that are small enough for sled's normal pages, so that sled creates no separate
/// files.
#[test]
fn rows_of_largest_size_fit_in_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let table = Sled.open(&folder.path().join("sled"), "test").expect("a table");
    for n in 0..300_u32 {
        // Write the keys in mixed order, so that sled splits pages in all parts of its tree.
        let writes: Vec<Write> = (0..4)
            .map(|i| {
                Write::Put((n * 7919 % 200 + i * 50).to_be_bytes().repeat(10), vec![n.to_le_bytes()[0]; MAX_ROW_BYTES])
            })
            .collect();
        table.commit(&writes).expect("a commit");
        let files = std::fs::read_dir(folder.path().join("sled/blobs")).expect("sled's folder for them").count();
        assert_eq!(files, 0, "after commit {n}");
    }
}
