//! Runs the fjall store on a simulated disk that, at a power cut, loses unsynced data.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use fjall_store::Fjall;
use testkit::cuts;

fn main() -> ExitCode {
    // After a power cut, pages may be missing at the end of fjall's journal. The version fjall 3.1.13 treats missing
    // journal pages as damage and refuses to open the store.
    cuts::main(Fjall, Some("JournalRecovery(ChecksumMismatch)"))
}
