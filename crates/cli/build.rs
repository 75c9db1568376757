//! Links the program with the same options as the plugin; see `crates/cni-plugin/build.rs` for the reason.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var("OPT_LEVEL").as_deref() == Ok("0") && env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu") {
        println!("cargo::rustc-link-arg-bins=-no-pie");
    }
}
