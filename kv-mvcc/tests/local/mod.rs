//! What every engine of `kv_mvcc::local` is tested for. The backends' tests include this folder.

pub mod contract;
