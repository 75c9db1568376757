//! Tests `margay export`, `import` and `migrate` on real sled, redb and etcd stores.

mod files;
pub(crate) mod fill;
mod golden;
mod input;
mod kill;
mod migrate;
mod take_over;
mod turns;
