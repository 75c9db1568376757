//! Assignments to several attachments of one node in one commit.

use kv::Deadline;

use super::{AssignRequest, Assigned, Done, Findings};
use crate::attachment::Attachment;
use crate::boxed;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};

/// True for different attachments of one node.
fn is_beside(one: &Attachment, other: &Attachment) -> bool {
    let is_same = one.network == other.network && one.container == other.container && one.interface == other.interface;
    one.node == other.node && !is_same
}

impl Ipam {
    /// Assigns addresses to several attachments of one node, as [`assign`](Self::assign) does to each of them, one
    /// after the other, but in one commit, in which a block that several get addresses of is written once. The answers
    /// are in the order of the requests. A commit has room for about a hundred of them.
    ///
    /// If one of several cannot be served, nothing happens to any: assign to each alone then, which may also free the
    /// leftovers of earlier boots.
    ///
    /// # Errors
    /// Those of [`assign`](Self::assign) for one of them; `Invalid` if they are of several nodes, if two of them are
    /// the same, or if there are several and [pending commits](crate::intents) are recorded.
    #[boxed]
    pub async fn assign_together(&self, requests: &[AssignRequest], deadline: Deadline) -> Result<Vec<Vec<Assigned>>> {
        match requests {
            [] => return Ok(Vec::new()),
            [request] => return Ok(vec![self.assign(request, deadline).await?]),
            _ => {}
        }
        let are_apart = |(place, one): (usize, &AssignRequest)| {
            requests[..place].iter().all(|other| is_beside(&one.attachment, &other.attachment))
        };
        if !requests.iter().enumerate().all(are_apart) {
            return Err(Error::Invalid("only different attachments of one node are assigned to together".to_owned()));
        }
        if self.intents().is_some() {
            let text = "where intents are noted, attachments are assigned to one by one";
            return Err(Error::Invalid(text.to_owned()));
        }
        Ok(self.assign_all(requests, &mut Findings::default(), deadline).await?.answers)
    }

    /// Assigns to all, with the hints for the network and node of the first. A pending commit is for the first: where
    /// these are recorded, it is the only one.
    pub(super) async fn assign_all(
        &self,
        requests: &[AssignRequest],
        findings: &mut Findings,
        deadline: Deadline,
    ) -> Result<Done> {
        let Some(AssignRequest { attachment, .. }) = requests.first() else { return Ok(Done::default()) };
        self.settle_intents(attachment, deadline).await?;
        let recalled = self.recall(attachment);
        findings.used.clone_from(&recalled);
        let store = self.noting(attachment);
        let done = transact!(on store, deadline, |tx| {
            self.assign_in(tx, requests, None, findings).await
        })?;
        self.remember(attachment, &recalled, &findings.used);
        Ok(done)
    }
}
