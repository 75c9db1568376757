//! Contains the fuzz targets, each of which is a function of one input (a byte slice).
//!
//! A fuzz target accepts any bytes, and panics if the code under test misbehaves. The cargo-fuzz programs in the parent
//! folder run the fuzz targets on generated inputs. The test `tests/seeds.rs` runs each fuzz target on the inputs in
//! `tools/fuzz/seeds`, so that no target breaks unnoticed.

#![allow(clippy::unwrap_used, reason = "a fuzz target reports errors by panicking")]

mod args;
mod block;
mod etcd_requests;
mod files;
mod frames;
mod main_plugin;
mod netconf;
mod ranges;
mod rows;
mod selector;
mod store;
mod txns;

pub use args::cni_args;
pub use block::block_json;
pub use etcd_requests::etcd_requests;
pub use files::{damaged_file, packed_store, quiet_engines};
pub use frames::frames;
pub use main_plugin::main_plugin;
pub use netconf::netconf;
pub use ranges::key_ranges;
pub use rows::{damaged_rows, row_codec};
pub use selector::selector;
pub use txns::txn_check;

/// A fuzz target: a name and a function of one input.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name of the cargo-fuzz program, and of the folder with this target's seeds.
    pub name: &'static str,
    /// The function that runs the fuzz target on one input.
    pub run: fn(&[u8]),
}

/// All fuzz targets.
pub const TARGETS: &[Target] = &[
    Target { name: "key_ranges", run: key_ranges },
    Target { name: "txn_check", run: txn_check },
    Target { name: "row_codec", run: row_codec },
    Target { name: "damaged_rows", run: damaged_rows },
    Target { name: "selector", run: selector },
    Target { name: "netconf", run: netconf },
    Target { name: "cni_args", run: cni_args },
    Target { name: "block_json", run: block_json },
    Target { name: "damaged_file", run: damaged_file },
    Target { name: "frames", run: frames },
    Target { name: "main_plugin", run: main_plugin },
    Target { name: "etcd_requests", run: etcd_requests },
];
