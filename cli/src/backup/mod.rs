//! Backup files: one revision of a store, in a form that a person can read and any store can be made from.
//!
//! JSON lines. The first says what it is, then there is one line for each key, ascending, and the last has the number
//! of keys and the SHA-256 of all lines before it:
//!
//! ```text
//! {"margay_backup":1,"margay":"0.1.0","engine":"redb","store":"3526f154-...","revision":7,"time":"2026-11-21T16:25:03Z"}
//! {"key":"/calico/ipam/v2/config","value":"{\"strictAffinity\":false}"}
//! {"keys":1,"sha256":"9f86d0818..."}
//! ```
//!
//! A store whose format has leases has them in the first line (`"margay_backup":2`, `"leases":[{"id":7,"ttl":60}]`), and a key that
//! is attached to one says so (`"lease":7`).
//!
//! A key or a value that is not UTF-8 stands in `key64` or `value64`, in base64. A file is whole only with its last
//! line, so that one that was cut off is never taken for a smaller store.

mod copy;
mod format;
mod reader;
mod snapshot;
mod writer;

pub(crate) use copy::{Copied, copy};
pub(crate) use format::{Header, Stored};
pub(crate) use reader::Reader;
pub(crate) use snapshot::{Identity, Pages, Snapshot, Stop, aside, identity};
pub(crate) use writer::{Overwrite, Writer};

/// The backup of a cluster, which others use, too: everything that Calico and Margay keep there. Ascending.
pub(crate) const CLUSTER_PREFIXES: [&str; 2] = ["/calico/", "/margay/"];
