//! Opening stores on sled.

#[path = "../../kv-mvcc/tests/local/mod.rs"]
mod local;

use backend_sled::Sled;
use local::opening;

#[test]
fn a_missing_store_is_named_and_not_made() {
    opening::a_missing_store_is_named_and_not_made(&Sled);
}

#[test]
fn a_store_stays_the_same_one() {
    opening::a_store_stays_the_same_one(&Sled);
}

#[test]
fn only_one_has_the_store_at_a_time() {
    opening::only_one_has_the_store_at_a_time(&Sled);
}

#[test]
fn somebodys_folder_is_left_alone() {
    opening::somebodys_folder_is_left_alone(&Sled);
}

#[test]
fn an_empty_folder_becomes_a_store() {
    opening::an_empty_folder_becomes_a_store(&Sled);
}

#[test]
fn a_file_in_the_way_is_named() {
    opening::a_file_in_the_way_is_named(&Sled);
}

#[test]
fn a_damaged_store_is_never_made_anew() {
    opening::a_damaged_store_is_never_made_anew(&Sled);
}

#[test]
fn a_strange_identity_is_refused() {
    opening::a_strange_identity_is_refused(&Sled);
}

#[test]
fn a_lost_identity_is_made_good() {
    opening::a_lost_identity_is_made_good(&Sled);
}

#[test]
fn an_unfinished_creation_starts_again() {
    opening::an_unfinished_creation_starts_again(&Sled);
}

#[test]
fn a_mark_on_a_complete_store_is_taken_away() {
    opening::a_mark_on_a_complete_store_is_taken_away(&Sled);
}

#[test]
fn the_other_engines_store_is_named() {
    opening::the_other_engines_store_is_named(&Sled, ("redb", "db.redb"));
}

#[test]
fn everything_is_private() {
    opening::everything_is_private(&Sled);
}
