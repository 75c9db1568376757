//! Tests how rows are stored in sled's files.

use backend_sled::Sled;
use kv_local::Engine;
use kv_mvcc::{MAX_ROW_BYTES, Write};

/// sled never syncs the files that it creates for large pages, and a separate sync of these files is slow. Values are
/// split into rows so small that sled creates no files for large pages.
#[test]
fn rows_of_largest_size_fit_in_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let table = Sled.open(&folder.path().join("sled"), "test").expect("a table");
    for n in 0..300_u32 {
        // The order of these keys makes sled split pages in all parts of the tree, in mixed order.
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
