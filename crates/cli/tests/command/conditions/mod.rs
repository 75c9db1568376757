//! The conditions of every command: its errors when its store is not as it should be, that it can be killed and tried,
//! and what its JSON has.

mod commands;
mod dry_runs;
pub(crate) mod ground;
mod kills;
mod schema;
mod stores;
