//! Stores on redb whose processes are killed, and a full disk.

#[path = "../../kv-mvcc/tests/local/mod.rs"]
mod local;

use backend_redb::Redb;
use local::crash;

#[test]
fn what_was_acknowledged_survives_a_kill() {
    crash::what_was_acknowledged_survives_a_kill(&Redb, "what_was_acknowledged_survives_a_kill");
}

#[test]
fn a_killed_creation_is_made_good() {
    crash::a_killed_creation_is_made_good(&Redb, "a_killed_creation_is_made_good");
}

#[test]
fn a_full_disk_loses_nothing() {
    crash::a_full_disk_loses_nothing(&Redb, "a_full_disk_loses_nothing");
}

#[test]
fn everything_is_private() {
    crash::everything_is_private(&Redb);
}

#[test]
fn processes_take_turns_and_count_together() {
    crash::processes_take_turns_and_count_together(&Redb, "processes_take_turns_and_count_together");
}
