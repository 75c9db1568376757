//! Stores on sled whose processes are killed, and a full disk.

#[path = "../../kv-mvcc/tests/local/mod.rs"]
mod local;

use backend_sled::Sled;
use local::crash;

#[test]
fn what_was_acknowledged_survives_a_kill() {
    crash::what_was_acknowledged_survives_a_kill(&Sled, "what_was_acknowledged_survives_a_kill");
}

#[test]
fn a_killed_creation_is_made_good() {
    crash::a_killed_creation_is_made_good(&Sled, "a_killed_creation_is_made_good");
}

#[test]
fn a_full_disk_loses_nothing() {
    crash::a_full_disk_loses_nothing(&Sled, "a_full_disk_loses_nothing");
}

#[test]
fn everything_is_private() {
    crash::everything_is_private(&Sled);
}

#[test]
fn processes_take_turns_and_count_together() {
    crash::processes_take_turns_and_count_together(&Sled, "processes_take_turns_and_count_together");
}
