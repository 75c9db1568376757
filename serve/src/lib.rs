//! The daemon `margay serve`: one process that keeps a store open for plugins, commands and people.

pub mod http;
pub mod metrics;
