//! The assignment of an ADD, with the labels of the pod's namespace where a pool is chosen by them.

use std::time::Instant;

use agent::{Add, Allocator, CniError, Result, StoreAt};
use ipam_core::assign::{Assigned, NamespaceLabels};

use crate::kubernetes::Kubernetes;

/// The way to assign for one pod.
#[derive(Clone, Copy)]
pub(crate) struct Assigner<'a> {
    pub(crate) allocator: &'a dyn Allocator,
    pub(crate) kubernetes: &'a Kubernetes,
    /// The pod's namespace.
    pub(crate) namespace: &'a str,
}

impl Assigner<'_> {
    /// Assigns. The labels of the namespace are looked up if they are wanted, within the time for the store; the request has them
    /// afterwards.
    ///
    /// # Errors
    /// Those of the allocator, and of the Kubernetes API.
    pub(crate) fn assign(&self, at: &StoreAt, add: &mut Add) -> Result<Vec<Assigned>> {
        let begun = Instant::now();
        if let Some(assigned) = self.allocator.add(at, add)? {
            return Ok(assigned);
        }
        let at = at.with_time_left(begun);
        add.request.namespace_labels = self.kubernetes.labels(self.namespace, at.patience)?;
        add.request.namespace = NamespaceLabels::Known;
        let assigned = self.allocator.add(&at, add)?;
        assigned.ok_or_else(|| CniError::internal("the labels of the namespace are wanted twice"))
    }
}
