//! Opening stores on redb.

#[path = "../../kv-mvcc/tests/local/mod.rs"]
mod local;

use backend_redb::Redb;
use local::opening;

#[test]
fn a_missing_store_is_named_and_not_made() {
    opening::a_missing_store_is_named_and_not_made(&Redb);
}

#[test]
fn a_store_stays_the_same_one() {
    opening::a_store_stays_the_same_one(&Redb);
}

#[test]
fn only_one_has_the_store_at_a_time() {
    opening::only_one_has_the_store_at_a_time(&Redb);
}

#[test]
fn somebodys_folder_is_left_alone() {
    opening::somebodys_folder_is_left_alone(&Redb);
}

#[test]
fn an_empty_folder_becomes_a_store() {
    opening::an_empty_folder_becomes_a_store(&Redb);
}

#[test]
fn a_file_in_the_way_is_named() {
    opening::a_file_in_the_way_is_named(&Redb);
}

#[test]
fn a_damaged_store_is_never_made_anew() {
    opening::a_damaged_store_is_never_made_anew(&Redb);
}

#[test]
fn a_store_without_its_journal_is_refused() {
    opening::a_store_without_its_journal_is_refused(&Redb);
}

#[test]
fn a_strange_identity_is_refused() {
    opening::a_strange_identity_is_refused(&Redb);
}

#[test]
fn a_lost_identity_is_made_good() {
    opening::a_lost_identity_is_made_good(&Redb);
}

#[test]
fn an_unfinished_creation_starts_again() {
    opening::an_unfinished_creation_starts_again(&Redb);
}

#[test]
fn a_mark_on_a_complete_store_is_taken_away() {
    opening::a_mark_on_a_complete_store_is_taken_away(&Redb);
}

#[test]
fn the_other_engines_store_is_named() {
    opening::the_other_engines_store_is_named(&Redb, ("sled", "sled/db"));
}

#[test]
fn everything_is_private() {
    opening::everything_is_private(&Redb);
}
