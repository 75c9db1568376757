//! Backup files: one revision of a store, in a form that a person can read and that any engine can be filled from.
//!
//! A file is JSON lines. The first line describes the store. Then each key has a line, ascending. The last line has the
//! number of keys and the SHA-256 of all lines before it:
//!
//! ```text
//! {"margay_backup":1,"margay":"0.1.0","engine":"redb","store":"3526f154-...","revision":7,"time":"2026-11-21T16:25:03Z"}
//! {"key":"/calico/ipam/v2/config","value":"{\"strictAffinity\":false}"}
//! {"keys":1,"sha256":"9f86d0818..."}
//! ```
//!
//! If the store's format has leases, they are in the first line (`"margay_backup":2`,
//! `"leases":[{"id":7,"ttl":60}]`), and the line of a key that is attached to a lease names it (`"lease":7`).
//!
//! A key or a value that is not UTF-8 is in `key64` or `value64`, in base64. A file is whole only with its last line,
//! so that a file that was cut off is never read as a smaller store.

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

/// The prefixes that the backup of a cluster has: Calico's and Margay's keys, not those of other users. Ascending.
pub(crate) const CLUSTER_PREFIXES: [&str; 2] = ["/calico/", "/margay/"];
