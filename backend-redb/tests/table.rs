//! The table on redb, as every engine's is tested.

#[path = "../../kv-mvcc/tests/local/mod.rs"]
mod local;

use backend_redb::Redb;
use local::contract;

#[test]
fn a_new_table_is_empty() {
    contract::a_new_table_is_empty(&Redb);
}

#[test]
fn rows_are_ordered_by_unsigned_bytes() {
    contract::rows_are_ordered_by_unsigned_bytes(&Redb);
}

#[test]
fn a_scan_stops_when_it_is_told_to() {
    contract::a_scan_stops_when_it_is_told_to(&Redb);
}

#[test]
fn a_commit_puts_replaces_and_deletes() {
    contract::a_commit_puts_replaces_and_deletes(&Redb);
}

#[test]
fn large_rows_and_large_commits_come_back() {
    contract::large_rows_and_large_commits_come_back(&Redb);
}

#[test]
fn a_view_is_a_snapshot() {
    contract::a_view_is_a_snapshot(&Redb);
}

#[test]
fn recovering_reopens_the_table() {
    contract::recovering_reopens_the_table(&Redb);
}
