//! The program is linked anew when another order of its functions is asked for; see `scripts/link-hot`.

fn main() {
    for file in ["hot-functions", "../scripts/link-hot"] {
        println!("cargo::rerun-if-changed={file}");
    }
}
