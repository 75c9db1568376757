//! Assignments to several attachments of one node in one commit.
//!
//! Who commits for others has their requests from them, and may be the last one to live: so what is noted before it is sent
//! tells apart who still asks and who does not; see [`crate::intents`].

use std::sync::Arc;

use kv::Deadline;

use super::{AssignRequest, Assigned, Done, Findings};
use crate::attachment::Attachment;
use crate::error::{Error, Result};
use crate::intents::StillAsked;
use crate::ipam::{Ipam, transact};
use crate::model::keys;

/// Who asks for itself still asks.
pub(super) fn always() -> StillAsked {
    Arc::new(|| true)
}

/// True for different attachments of one node.
fn is_beside(one: &Attachment, other: &Attachment) -> bool {
    let is_same = one.network == other.network && one.container == other.container && one.interface == other.interface;
    one.node == other.node && !is_same
}

impl Ipam {
    /// Gives addresses to several attachments of one node, as [`assign`](Self::assign) does to each of them, one after the other,
    /// but in one commit, in which a block that several get addresses of is written once. The answers are in the order of
    /// the requests. A commit has room for about a hundred of them.
    ///
    /// If one of them cannot be served, or `still_asked` says that one asks no more, nothing happens to any: assign to each
    /// alone then, which may also free what is left over from earlier boots.
    ///
    /// # Errors
    /// Those of [`assign`](Self::assign) for one of them; `Invalid` if they are of several nodes, or two of them are the same;
    /// `Conflict` of the store if one asks no more.
    pub async fn assign_together(
        &self,
        requests: &[AssignRequest],
        still_asked: &StillAsked,
        deadline: Deadline,
    ) -> Result<Vec<Vec<Assigned>>> {
        let are_apart = |(place, one): (usize, &AssignRequest)| {
            requests[..place].iter().all(|other| is_beside(&one.attachment, &other.attachment))
        };
        if !requests.iter().enumerate().all(are_apart) {
            return Err(Error::Invalid("only different attachments of one node are assigned to together".to_owned()));
        }
        let mut findings = Findings::default();
        Ok(self.assign_all(requests, still_asked, &mut findings, deadline).await?.answers)
    }

    /// Assigns to all, with what is remembered of the network and node of the first, and notes what is sent for each.
    pub(super) async fn assign_all(
        &self,
        requests: &[AssignRequest],
        still_asked: &StillAsked,
        findings: &mut Findings,
        deadline: Deadline,
    ) -> Result<Done> {
        let Some(AssignRequest { attachment, .. }) = requests.first() else { return Ok(Done::default()) };
        let attachments: Vec<&Attachment> = requests.iter().map(|request| &request.attachment).collect();
        self.settle_intents(&attachments, deadline).await?;
        let recalled = self.recall(attachment);
        findings.used.clone_from(&recalled);
        let store = self.noting(requests, still_asked);
        let done = transact!(on store, with self.remembering(deadline), |tx| {
            for request in requests {
                tx.presume_absent(&keys::handle(&request.attachment.handle()));
            }
            self.assign_in(tx, requests, None, findings).await
        })?;
        self.remember(attachment, &recalled, &findings.used);
        Ok(done)
    }
}
