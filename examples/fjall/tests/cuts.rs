//! The store on fjall in its folder, on a disk that forgets what was not synced.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use fjall_store::Fjall;
use testkit::cuts;

fn main() -> ExitCode {
    // fjall 3.1.13 takes the end of its journal, where a power cut has left some pages and not others, for damage, and refuses the store.
    cuts::main(Fjall, Some("JournalRecovery(ChecksumMismatch)"))
}
