//! The store on a real etcd, judged by all cases: each gets an etcd of its own.

mod support;

use std::process::ExitCode;

use conformance::{BoxError, Happens, KnownFailure};
use support::harness::OnEtcd;

/// Cases that some versions of etcd fail.
const LOST_DELETION: KnownFailure = KnownFailure {
    case: "W11_start_at_mark_delete",
    rule: "C4",
    reason: "etcd before 3.4.36 and 3.5.18 loses a deletion at the compaction revision; later ones do not",
    // Until the compaction has worked its way through the file, the deletion is there.
    happens: Happens::Sometimes,
};

/// A case that etcd 3.4 fails; with later ones it was not tried.
const ANYBODY_COMPACTS: KnownFailure = KnownFailure {
    case: "F25_compacting_strangers",
    rule: "N3",
    reason: "etcd 3.4 lets anybody compact who reaches it; use client certificates",
    happens: Happens::Always,
};

/// What is about stores that a process holds by itself; what becomes of a store when its server is killed is in cases of
/// its own.
const IGNORED: &[&str] = &[
    "R11_deletion_compacted_and_killed",
    "H17_killed_while_compacting",
    "D01_acknowledged_writes",
    "D02_acknowledged_txns",
    "D03_prefix_of_many_writers",
    "D04_nothing_seen_is_lost",
    "D05_killed_while_opening",
    "D06_killed_while_created",
    "D07_full_disk",
    "D08_data_gone",
    "D09_synced_before_acknowledged",
    "D10_power_cuts",
    "D11_many_short_lives",
    "D12_later_version",
    "D13_file_size_limit",
    "D15_any_damage",
    "M01_second_one_waits",
    "M03_dead_holder_frees_it",
    "M04_reader_beside_a_writer",
    "M06_child_does_not_hold_it",
    "M07_two_paths",
];

fn main() -> Result<ExitCode, BoxError> {
    let known: &[KnownFailure] = match support::version()? {
        [..=3, ..=3, _] | [3, 4, ..=35] | [3, 5, ..=17] => &[LOST_DELETION, ANYBODY_COMPACTS],
        _ => &[KnownFailure { happens: Happens::Sometimes, ..ANYBODY_COMPACTS }],
    };
    Ok(conformance::main_knowing(OnEtcd, IGNORED, known))
}
