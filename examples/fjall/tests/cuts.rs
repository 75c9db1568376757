//! Runs the fjall store on a disk that forgets unsynced data.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use fjall_store::Fjall;
use testkit::cuts;

fn main() -> ExitCode {
    // After a power cut, the end of the journal may lack some pages. Fjall 3.1.13 treats missing pages at the end of
    // the journal as damage and refuses to open the store.
    cuts::main(Fjall, Some("JournalRecovery(ChecksumMismatch)"))
}
