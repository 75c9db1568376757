//! Contains the table of all conformance cases. A conformance case that is not in the table does not run.

use crate::case::Weight::{Heavy, Light};
use crate::case::{Case, Group};
use crate::groups::{
    basic, concurrency, crash, crash_compacting, damage, disk, faults_access, faults_cluster, faults_network,
    faults_server, faults_watch, history, limits, power, processes, random, random_clients, range, recorded, revisions,
    txn, txn_compare, watch, watch_load, watch_past, watch_progress,
};
use crate::harness::Tenancy::{Exclusive, Shared};
use crate::harness::{Ability, Scene};

macro_rules! table {
    ($($group:ident {
        $(
            $id:ident $module:ident::$story:ident: $($rule:ident)+
            $(, needs $($need:ident)+)? $(, in $scene:ident)? $(, runs $weight:ident)? $(, beside $tenancy:ident)?;
        )+
    })+) => {
        vec![$($(
            Case {
                name: concat!(stringify!($id), "_", stringify!($story)),
                group: Group::$group,
                rules: &[$(stringify!($rule)),+],
                needs: &[$($(Ability::$need,)+)? $(Ability::$scene)?],
                scene: table!(@scene $($scene)?),
                weight: table!(@weight $($weight)?),
                tenancy: table!(@tenancy $($tenancy)?),
                story: |subject| Box::pin($module::$story(subject)),
            }
        ),+),+]
    };
    (@scene) => { Scene::Plain };
    (@scene $scene:ident) => { Scene::$scene };
    (@weight) => { Light };
    (@weight alone) => { Heavy };
    (@tenancy) => { Exclusive };
    (@tenancy others) => { Shared };
}

/// Returns all cases. Each table entry has the number and name of a case, the rules that it judges, and the abilities
/// and the kind of store that it needs. A failed case is reported as a violation of the first rule in its list, unless
/// the failure names a different rule. A case with a scene other than [`Scene::Plain`] also needs the ability with the
/// same name as the scene. The words `runs alone` mean that no other case runs at the same time. In a table entry,
/// `beside others` means that other clients may write to the store while the case runs.
pub fn cases() -> Vec<Case> {
    table! {
        Basic {
            B01 basic::get_missing_key: G1 R6, beside others;
            B02 basic::put_and_get: R5 R6, beside others;
            B03 basic::put_twice: R5, beside others;
            B04 basic::put_with_prev: O1, beside others;
            B05 basic::empty_value: K2, beside others;
            B06 basic::delete_with_prev: O2 R2, beside others;
            B07 basic::delete_missing: O3 R3, beside others;
            B08 basic::delete_twice: O3 O2 R3, beside others;
            B09 basic::delete_and_put_again: R5, beside others;
            B10 basic::delete_range: O2 R2, beside others;
            B11 basic::delete_empty_range: O3 R3, beside others;
            B12 basic::every_byte: K2 K1, beside others;
            B13 basic::two_handles: S1, beside others;
        }
        Revisions {
            R01 revisions::fresh_store: R1, needs New;
            R02 revisions::dense: R2 R6;
            R03 revisions::identical_put: R4, beside others;
            R04 revisions::nothing_happens: R3;
            R05 revisions::delete_only_missing: R3 T2;
            R06 revisions::many_puts_one_revision: R2 T2, beside others;
            R07 revisions::noop_delete_and_put: R2 R6, beside others;
            R08 revisions::header_covers_answer: R6, beside others;
            R09 revisions::header_of_past_read: R6 G7, beside others;
            R10 revisions::revision_after_reopen: R7 S2, needs Reopen;
            R11 crash_compacting::deletion_compacted_and_killed: R8 R2, needs Processes Embedded;
        }
        Txn {
            T01 txn_compare::create_by_version: T4 T2, beside others;
            T02 txn_compare::create_by_revisions: T4 T2, beside others;
            T03 txn_compare::update_by_mod_revision: T2, beside others;
            T04 txn_compare::delete_by_mod_revision: T2 O2, beside others;
            T05 txn_compare::numbers_of_missing_key: T4, beside others;
            T06 txn_compare::value_of_missing_key: T5, beside others;
            T07 txn_compare::empty_value: T6, beside others;
            T08 txn_compare::values_are_unsigned: T6, beside others;
            T09 txn_compare::all_compares_count: T1, beside others;
            T10 txn_compare::range_compares: T7, beside others;
            T11 txn_compare::compares_see_state_before: T1 R2, beside others;
            T12 txn::get_put_get: T3 O1 R2, beside others;
            T13 txn::range_after_writes: T3 T2 O2 G4 G5, beside others;
            T14 txn::two_puts: T8 E1, beside others;
            T15 txn::put_and_delete: T8 E1, beside others;
            T16 txn::duplicate_in_other_branch: T8 E1, beside others;
            T17 txn::two_deletes: T8 R2, beside others;
            T18 txn::delete_beside_put: T8 G1, beside others;
            T19 txn::same_key_in_both_branches: T8, beside others;
            T20 txn::one_result_each: T9, beside others;
            T21 txn::failed_txn_writes_nothing: T2 R3, beside others;
            T22 txn::disjoint_txns_race: T11 R2, beside others;
            T23 txn_compare::compare_only_is_fresh: T10 T9 R6, beside others;
            T24 txn_compare::numbers_of_existing_key: T1, beside others;
            T25 txn_compare::unknown_lease: T12 E1, beside others;
        }
        Range {
            G01 range::limits: G4 G3, beside others;
            G02 range::paging: G8 G4 G7, beside others;
            G03 range::byte_order: G3 K1 G1, beside others;
            G04 range::prefixes_of_ff: G2;
            G05 range::everything: G2;
            G06 range::from_a_key: G1;
            G07 range::empty_spans: G1, beside others;
            G08 range::siblings: G1, beside others;
            G09 range::contents: G5 G4, beside others;
            G10 range::large_answer: G10, beside others;
            G11 range::no_torn_reads: G9 T1 S1, beside others;
        }
        History {
            H01 history::every_revision: G7, beside others;
            H02 history::create_delete_recreate: G7, beside others;
            H03 history::range_in_the_past: G7, beside others;
            H04 history::future_revisions: G6;
            H05 history::latest_by_number: G6, beside others;
            H06 history::txn_in_the_past: G7 G9, beside others;
            H07 history::compaction: C3 G6;
            H08 history::compaction_limits: C1 C3;
            H09 history::old_keys_stay: C3;
            H10 history::mark_at_a_deletion: C3 G6;
            H11 history::mark_at_now: C3 C2;
            H12 history::compacted_comes_first: G6;
            H13 history::compaction_is_no_write: C2;
            H14 history::mark_after_reopen: C5 C1, needs Reopen;
            H15 random::against_the_model: G7 T1 W2 W8;
            H16 history::bounded_room: C7, needs Measure, runs alone;
            H17 crash_compacting::killed_while_compacting: C6 C3 S3 S5, needs Processes Embedded;
            H18 random::against_the_model_reopened: G7 T1 W2 W8 R7 C5, needs Reopen;
        }
        Watch {
            W01 watch::simple_events: W2 W5, beside others;
            W02 watch::deletion_fields: W5, beside others;
            W03 watch::what_was_before: W6, beside others;
            W04 watch::creations: W5, beside others;
            W05 watch::order_in_a_txn: W2 W3, beside others;
            W06 watch::mixed_txn: W3 W2, beside others;
            W07 watch_past::replay_then_live: W7 W2 W15;
            W08 watch_past::starts: W1 W9 W2;
            W09 watch_past::start_below_mark: W8 W2;
            W10 watch_past::start_at_mark_put: C4 W6;
            W11 watch_past::start_at_mark_delete: C4;
            W12 watch_past::overtaken_by_mark: W8;
            W13 watch_load::long_backlog: W7 W2 W3, runs alone;
            W14 watch_past::large_txn_replayed: W3 W2, beside others;
            W15 watch::nothing_to_tell: W4 T1, beside others;
            W16 watch::filters: W4, beside others;
            W17 watch::empty_ranges: W10;
            W18 watch_load::many_watchers: W11 W2, beside others;
            W19 watch_load::stalled_watcher: W11 W8 R2, runs alone;
            W20 watch_load::dropped_watches: W12, runs alone;
            W21 faults_watch::cut_mid_stream: W17 W2, needs Network;
            W22 faults_watch::compacted_while_cut_off: W17 W8, needs Network;
            W23 faults_watch::frozen_server: W17, needs Network Servers;
            W24 watch::read_after_event: W14, beside others;
            W26 watch_past::resumes_after_reopen: W13 W2, needs Reopen;
            W27 faults_cluster::left_far_behind: W2 W17, needs Network Servers, in Cluster;
            W28 watch_load::large_values: W16, beside others;
            W29 watch_past::future_and_other_keys: W9;
            W30 watch_past::goes_on_past_its_mark: W8 C2;
            W31 watch_past::resumes_anywhere: W13 W2;
            W32 faults_watch::killed_server: W17 W13, needs Network Servers;
            W33 faults_watch::silent_network: W17, needs Network;
            W34 watch_load::many_stalled_watchers: W11 W8, runs alone;
            W35 watch_progress::never_ahead: W18 W2;
            W36 watch_progress::not_unasked: W18 W3;
            W37 watch_progress::soon: W19 W18, needs Progress;
        }
        Concurrency {
            L01 concurrency::counter: S1 R2, beside others;
            L02 concurrency::one_creator: S1, beside others;
            L03 concurrency::write_skew: S1, beside others;
            L04 concurrency::bank: S1 G9, beside others;
            L05 random_clients::random_clients: S1 R2 T2 W2, beside others;
            L06 concurrency::reader_after_writer: S1, beside others;
            L07 concurrency::revisions_never_go_back: S1, beside others;
            L08 recorded::log_is_what_was_acknowledged: S1 W2 R2 W13 W14 T2 E2, beside others;
            L09 concurrency::dropped_calls: S6 T2, beside others;
            L10 concurrency::block_of_addresses: S1 R5, beside others;
            L11 concurrency::hand_over: S1, beside others;
            L12 random_clients::lost_replies: S1 E2 T2, beside others;
            L13 recorded::lost_replies_and_watches: S1 S6 W2 W13 T2 E2, beside others;
        }
        Limits {
            X01 limits::empty_keys: X1 E1;
            X02 limits::too_many_ops: X2 E1, beside others;
            X03 limits::full_txn: X2, beside others;
            X04 limits::value_sizes: X3 K2 E1, beside others;
            X05 limits::request_sizes: X4 E1, beside others;
            X06 limits::key_sizes: X1;
            X07 limits::large_replies: G10, beside others;
            X08 limits::refusals_change_nothing: E1;
            X09 limits::awkward_keys_in_errors: E4 T8 K1;
            X10 limits::use_after_close: E5, needs Close;
            X11 limits::pages_past_the_longest_keys: G8 X1;
        }
        Durability {
            D01 crash::acknowledged_writes: S3 S5 R8, needs Processes Embedded;
            D02 crash::acknowledged_txns: S3 S5 T2, needs Processes Embedded;
            D03 crash::prefix_of_many_writers: S5 S3, needs Processes Embedded;
            D04 crash::nothing_seen_is_lost: S4 S5, needs Processes Embedded;
            D05 crash::killed_while_opening: S3 S5, needs Processes Embedded;
            D06 crash::killed_while_created: S5 R1, needs Processes Embedded Folder;
            D07 disk::full_disk: E2 S3 S5 E6, needs Processes Embedded Folder Mount;
            D08 damage::data_gone: E6, needs Processes Embedded Folder Damage;
            D09 disk::synced_before_acknowledged: S3, needs Processes Embedded Folder Trace;
            D10 power::power_cuts: S3 S4 S5 E2, needs Reopen PowerLoss;
            D11 disk::many_short_lives: S2 C7, needs Reopen Measure Embedded;
            D12 damage::later_version: E6, needs Processes Embedded Folder Format;
            D13 disk::file_size_limit: E2 S3 S5 E6, needs Processes Embedded Folder;
            D14 disk::closed_under_writers: E2 S3 S5, needs Reopen Close;
            D15 damage::any_damage: E6, needs Processes Embedded Folder Damage;
        }
        Processes {
            M01 processes::second_one_waits: E7 S2, needs Processes Embedded;
            M02 processes::take_turns_and_count: E7 S1, needs Processes, runs alone;
            M03 processes::dead_holder_frees_it: E7 S3 S5, needs Processes Embedded;
            M04 processes::reader_beside_a_writer: G9 S1, needs Processes Embedded;
            M05 processes::watched_from_elsewhere: W7 W3, needs Processes;
            M06 processes::child_does_not_hold_it: E7 S3, needs Processes Embedded;
            M07 processes::two_paths: E7 S2, needs Processes Embedded Folder;
        }
        Faults {
            F01 faults_cluster::follower_dies: N1 E3 S3, needs Network Servers, in Cluster;
            F02 faults_cluster::leader_dies_under_load: S1 S3 E3, needs Network Servers, in Cluster;
            F03 faults_cluster::no_quorum_no_answer: S1 S3 E2, needs Network Servers, in Cluster;
            F04 faults_cluster::no_quorum_no_compare: T10, needs Network Servers, in Cluster;
            F05 faults_server::frozen_server: E2 N2 E3, needs Network Servers;
            F06 faults_cluster::lonely_watch: W17, needs Network Servers, in Cluster;
            F07 faults_cluster::all_restart: S3 R8 W17, needs Network Servers, in Cluster;
            F08 faults_access::full: N5 E2 E3, in Quota;
            F09 faults_access::logins_run_out: N4, in Logins;
            F10 faults_access::strangers: N3, in Tls;
            F11 faults_network::nobody_and_a_silent_one_beside: N1 E3 N2, needs Network;
            F12 faults_access::guest: N3, in Logins;
            F13 faults_network::lost_reply: E2 E3, needs Network;
            F14 faults_network::lost_reply_of_a_guarded_write: E2 E3, needs Network;
            F15 faults_network::lost_request: E3 E2, needs Network;
            F16 faults_network::never_sent: E2 E3, needs Network;
            F17 faults_network::slow_network: N2 W2 E3, needs Network;
            F18 faults_server::killed_under_writers: S3 S5 R8 E2 E3, needs Network Servers;
            F19 faults_server::killed_after_compaction: R8 C3, needs Network Servers;
            F20 faults_server::older_copy: R9, needs Network Servers Copies;
            F21 faults_cluster::dead_endpoint: N1 E3, needs Network Servers, in Cluster;
            F22 faults_cluster::hanging_leader_under_writers: S3 E2 E3, needs Network Servers, in Cluster;
            F23 faults_cluster::writers_without_quorum: E2 S3 E3, needs Network Servers, in Cluster;
            F24 faults_access::strangers: N3, in Logins;
            F25 faults_access::compacting_strangers: N3, in Logins;
        }
    }
}
