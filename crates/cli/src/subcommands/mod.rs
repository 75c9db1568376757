//! Implements the commands of `margay` that read or change a store.

pub(crate) mod check;
pub(crate) mod cluster;
pub(crate) mod documents;
pub(crate) mod etcd;
pub(crate) mod explain;
pub(crate) mod history;
pub(crate) mod map;
pub(crate) mod metrics;
pub(crate) mod moving;
pub(crate) mod node;
pub(crate) mod pool;
pub(crate) mod quarantine;
pub(crate) mod quota;
pub(crate) mod release;
pub(crate) mod reservation;
pub(crate) mod settings;
pub(crate) mod show;
pub(crate) mod sticky;
pub(crate) mod store;
