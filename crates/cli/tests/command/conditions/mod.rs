//! Requirements that every command meets: errors about unusable stores, kills, dry runs, and documented JSON members.

mod commands;
mod dry_runs;
pub(crate) mod ground;
mod kills;
mod schema;
mod stores;
