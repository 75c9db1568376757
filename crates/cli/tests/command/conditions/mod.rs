//! Tests requirements for every command: errors about unusable stores, recovery after kills, dry runs, and documented
//! JSON fields.

mod commands;
mod dry_runs;
pub(crate) mod ground;
mod kills;
mod schema;
mod stores;
