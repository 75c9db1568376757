//! Tests `margay store` on real sled and redb stores.

mod backup;
pub(crate) mod content;
mod disk;
mod format;
mod kill;
mod restore;
mod status;
mod turns;
mod upkeep;
