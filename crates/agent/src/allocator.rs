//! The allocator of a plugin: one method for all verbs, and for each verb one with its own types.

use std::net::IpAddr;

use ipam_core::assign::Assigned;

use crate::error::{CniError, Result};
use crate::store_at::StoreAt;
use crate::verb::{Add, Answer, Check, Checked, Collected, Del, Gc, Quarantine, Verb};

/// Keeps the books of addresses: the work of the verbs once the protocol is settled.
///
/// Calls are synchronous and come one per process. An implementation opens the store at the location and closes it before it
/// returns: the process may end right after.
pub trait Allocator {
    /// Does a verb. The answer is one to this verb.
    ///
    /// # Errors
    /// The error is printed as it is, and the runtime will call again. On a Calico network its texts are Calico's, with code 999. A
    /// CHECK has code 11 if the store could not be reached.
    fn call(&self, at: &StoreAt, verb: &Verb) -> Result<Answer>;
}

impl dyn Allocator + '_ {
    /// ADD. `None` if a pool is chosen by the labels of the namespace, which the request does not have.
    ///
    /// # Errors
    /// The errors of [`call`](Allocator::call).
    pub fn add(&self, at: &StoreAt, add: &Add) -> Result<Option<Vec<Assigned>>> {
        match self.call(at, &Verb::Add(Box::new(add.clone())))? {
            Answer::Assigned(assigned) => Ok(Some(assigned)),
            Answer::NamespaceWanted => Ok(None),
            other => Err(foreign(&other)),
        }
    }

    /// DEL. The addresses that were released.
    ///
    /// # Errors
    /// The errors of [`call`](Allocator::call).
    pub fn del(&self, at: &StoreAt, del: Del) -> Result<Vec<IpAddr>> {
        match self.call(at, &Verb::Del(del))? {
            Answer::Released(addresses) => {
                tracing::debug!(?addresses, "released");
                Ok(addresses)
            }
            other => Err(foreign(&other)),
        }
    }

    /// CHECK.
    ///
    /// # Errors
    /// The errors of [`call`](Allocator::call).
    pub fn check(&self, at: &StoreAt, check: Check) -> Result<Checked> {
        match self.call(at, &Verb::Check(check))? {
            Answer::Checked(checked) => Ok(checked),
            other => Err(foreign(&other)),
        }
    }

    /// STATUS of such an ADD.
    ///
    /// # Errors
    /// The reason why no ADD can be served: the store, or the configuration. It is printed with code 50.
    pub fn status(&self, at: &StoreAt, add: Add) -> Result<()> {
        if self.call(at, &Verb::Status(Box::new(add)))? == Answer::NamespaceWanted {
            tracing::info!("which pools there are depends on the namespace of the pod");
        }
        Ok(())
    }

    /// GC.
    ///
    /// # Errors
    /// The errors of [`call`](Allocator::call).
    pub fn gc(&self, at: &StoreAt, gc: Gc) -> Result<Collected> {
        match self.call(at, &Verb::Gc(gc))? {
            Answer::Collected(collected) => Ok(collected),
            other => Err(foreign(&other)),
        }
    }

    /// A step of an ADD with a probe.
    ///
    /// # Errors
    /// The errors of [`call`](Allocator::call).
    pub fn quarantine(&self, at: &StoreAt, what: Quarantine) -> Result<()> {
        self.call(at, &Verb::Quarantine(what)).map(drop)
    }
}

/// The error for the answer to another verb, which no allocator gives.
fn foreign(answer: &Answer) -> CniError {
    CniError::internal(format!("the allocator answered another verb: {answer:?}"))
}
