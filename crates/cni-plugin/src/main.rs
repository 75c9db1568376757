//! Both plugins: `margay-cni`, the main one, which also runs under the name `calico`; and `margay-ipam`, also
//! `calico-ipam`.

#[cfg(any(target_env = "musl", test))]
mod memory;

use std::process::ExitCode;

#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: memory::SizedAllocator = memory::SizedAllocator;

fn main() -> ExitCode {
    cni_plugin::main(stores::drivers())
}
