//! Contains both plugins in one program: the main plugin `margay-cni`, which also runs as `calico`, and the IPAM plugin
//! `margay-ipam`, which also runs as `calico-ipam`.

#[cfg(any(target_env = "musl", test))]
mod memory;

use std::process::ExitCode;

#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: memory::SizedAllocator = memory::SizedAllocator;

fn main() -> ExitCode {
    cni_plugin::main(stores::drivers())
}
