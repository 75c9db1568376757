//! Tests `margay install` on a node's files in a temporary folder, with a stand-in for Calico's plugin and a real etcd.
//!
//! The tests need Margay's plugin, which `cargo build --profile ci -p margay-cni-plugin` puts beside the command. Like
//! the plugin's tests, these tests need root, `ip` and the bridge plugin.

mod kills;
mod main_plugin;
mod refusals;
mod runtimes;
mod system;
pub(crate) mod tree;
mod verbs;
