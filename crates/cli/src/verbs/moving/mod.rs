//! The verbs that move the contents of a store to another store.

mod export;
mod host_local;
mod import;
mod migrate;
mod podman;
mod take_over;
mod whereabouts;
