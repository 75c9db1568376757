//! Whether an assignment would succeed. It runs as one does, up to the commit.

use kv::Deadline;

use super::request::{AssignRequest, Assigned};
use crate::error::Result;
use crate::ipam::{Ipam, transact};

impl Ipam {
    /// What [`assign`](Self::assign) would give to this attachment now. Nothing is written, and nothing that broke off is
    /// settled.
    ///
    /// # Errors
    /// Those of [`assign`](Self::assign).
    pub async fn would_assign(&self, request: &AssignRequest, deadline: Deadline) -> Result<Vec<Assigned>> {
        transact!(self, deadline, |tx| {
            let assigned = self.assign_in(tx, request, &mut Vec::new()).await?;
            tx.forget_writes();
            Ok(assigned)
        })
    }
}
