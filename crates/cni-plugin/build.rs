//! Relinks the program when the requested order of the program's functions changes; see `scripts/link-hot`.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A published package contains only `hot-functions`, not `scripts/link-hot`. Cargo treats a missing file as
    // changed.
    for file in ["hot-functions", "../../scripts/link-hot"].into_iter().filter(|file| Path::new(file).exists()) {
        println!("cargo::rerun-if-changed={file}");
    }
    // In unoptimized builds, link the plugin at a fixed address: the test suite starts it some ten thousand times.
    // Without relocations, a call takes 4.0 ms of processor time instead of 5.0 ms. Release builds are linked as
    // position-independent executables, as usual.
    if env::var("OPT_LEVEL").as_deref() == Ok("0") && env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu") {
        println!("cargo::rustc-link-arg-bins=-no-pie");
    }
}
