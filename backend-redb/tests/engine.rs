//! The duties of an engine, on redb.

use std::process::ExitCode;

use backend_redb::Redb;

fn main() -> ExitCode {
    kv_local::testing::main(Redb)
}
