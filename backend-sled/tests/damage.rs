//! Damaged stores on sled.

#[path = "../../kv-mvcc/tests/local/mod.rs"]
mod local;

use backend_sled::Sled;
use local::damage;

#[test]
fn a_damaged_store_is_right_or_refused() {
    damage::a_damaged_store_is_right_or_refused(&Sled, "a_damaged_store_is_right_or_refused");
}
