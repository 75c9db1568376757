//! Damaged stores on redb.

#[path = "../../kv-mvcc/tests/local/mod.rs"]
mod local;

use backend_redb::Redb;
use local::damage;

#[test]
fn a_damaged_store_is_right_or_refused() {
    damage::a_damaged_store_is_right_or_refused(&Redb, "a_damaged_store_is_right_or_refused");
}
