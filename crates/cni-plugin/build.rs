//! The program is linked anew when another order of its functions is asked for; see `scripts/link-hot`.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A package has only the first, and a file that is missing counts as changed.
    for file in ["hot-functions", "../../scripts/link-hot"].into_iter().filter(|file| Path::new(file).exists()) {
        println!("cargo::rerun-if-changed={file}");
    }
    // The tests start this program some ten thousand times. At a fixed address it needs no corrections of addresses in its
    // memory: a call takes 4.0 ms of processor time instead of 5.0. A release is built in its own way.
    if env::var("OPT_LEVEL").as_deref() == Ok("0") && env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu") {
        println!("cargo::rustc-link-arg-bins=-no-pie");
    }
}
