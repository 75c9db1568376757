//! Tests commands as calicoctl's users type them, on real stores.

mod deletion;
mod documents;
mod endpoints;
mod etcd;
pub(crate) mod files;
mod kills;
mod rules;
mod settings;
mod split;
