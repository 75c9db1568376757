//! Runs all conformance cases on the fjall store.

use std::process::ExitCode;

use conformance::{FailureFrequency, KnownFailure};
use fjall_store::Fjall;
use testkit::judged;

const KNOWN: &[KnownFailure] = &[
    KnownFailure {
        case: "D08_data_gone",
        rule: "E6",
        reason: "fjall 3.1.13 cuts its journal where it finds the first damage, and the file is not as it was",
        happens: FailureFrequency::Always,
    },
    KnownFailure {
        case: "D13_file_size_limit",
        rule: "E2",
        reason: "fjall 3.1.13 makes a journal of 64 MiB when it opens, more than the limit of the case",
        happens: FailureFrequency::Always,
    },
];

fn main() -> ExitCode {
    judged::main(Fjall, KNOWN)
}
