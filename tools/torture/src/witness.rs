//! The witness of the workers' acts, before and after each.

use std::net::IpAddr;

/// A witness of the workers' acts. Revisions are the newest that the worker knows of.
pub(crate) trait Witness: Send + Sync {
    /// An ADD is about to be sent.
    fn adding(&self, container: &str, node: &str);
    /// It was acknowledged, with these addresses.
    fn added(&self, container: &str, addresses: &[IpAddr], revision: i64);
    /// A DEL is about to be sent.
    fn deleting(&self, container: &str, revision: i64);
    /// It was acknowledged.
    fn deleted(&self, container: &str, revision: i64);
    /// An operation is over, and came out like this.
    fn counted(&self, what: &'static str);
    /// Something happened that must not.
    fn failed(&self, what: String);
}
