//! Assignments to several attachments of one node in one commit.
//!
//! Who commits for others has their requests from them, and may be the last one to live: so what is noted before it is sent
//! tells apart who still asks and who does not; see [`crate::intents`].

use std::fmt;
use std::mem;
use std::sync::Arc;

use kv::{Deadline, Transaction};

use super::{AssignRequest, Assigned, Done, Findings};
use crate::attachment::Attachment;
use crate::error::{Error, Result};
use crate::intents::{Askers, StillAsked};
use crate::ipam::{Ipam, transact};
use crate::model::keys;

/// Those who are assigned to in one commit.
pub(super) struct Asking<'j> {
    /// Their requests. There is always one: that of who commits.
    pub(super) requests: Vec<AssignRequest>,
    /// For so many of them nothing is under way that was begun earlier. For the first that is seen to before anything is read.
    settled: usize,
    /// Says who else asks, once.
    join: Box<dyn FnOnce() -> Vec<AssignRequest> + Send + 'j>,
    /// For whom it is noted what is sent.
    pub(super) askers: Askers,
    pub(super) deadline: Deadline,
}

impl fmt::Debug for Asking<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asking").field("requests", &self.requests).finish_non_exhaustive()
    }
}

impl Asking<'_> {
    /// Who asks for itself, and still does.
    pub(super) fn alone(request: &AssignRequest, deadline: Deadline) -> Self {
        Self::with(request, Vec::new, Arc::new(|| true), deadline)
    }
}

impl<'j> Asking<'j> {
    fn with(
        request: &AssignRequest,
        join: impl FnOnce() -> Vec<AssignRequest> + Send + 'j,
        still_asked: StillAsked,
        deadline: Deadline,
    ) -> Self {
        let askers = Askers::new(request.attachment.clone(), still_asked);
        Self { requests: vec![request.clone()], settled: 1, join: Box::new(join), askers, deadline }
    }
}

/// True for different attachments of one node.
fn is_beside(one: &Attachment, other: &Attachment) -> bool {
    let is_same = one.network == other.network && one.container == other.container && one.interface == other.interface;
    one.node == other.node && !is_same
}

impl Ipam {
    /// Gives addresses to several attachments of one node, as [`assign`](Self::assign) does to each of them, one after the other,
    /// but in one commit, in which a block that several get addresses of is written once. `others` says who else asks; it is
    /// called once, after what surrounds the request was read, so that who comes meanwhile is served too. The answers are
    /// in the order of the requests, that of `request` first. A commit has room for about a hundred of them.
    ///
    /// If there are others, and one of all cannot be served, or `still_asked` says that one asks no more, nothing happens to any:
    /// assign to each alone then, which may also free what is left over from earlier boots.
    ///
    /// # Errors
    /// Those of [`assign`](Self::assign) for one of them; `Invalid` if they are of several nodes, or two of them are the same;
    /// `Conflict` of the store if one asks no more.
    pub async fn assign_together(
        &self,
        request: &AssignRequest,
        others: impl FnOnce() -> Vec<AssignRequest> + Send,
        still_asked: &StillAsked,
        deadline: Deadline,
    ) -> Result<Vec<Vec<Assigned>>> {
        self.assign_to(Asking::with(request, others, Arc::clone(still_asked), deadline)).await
    }

    /// Assigns to all, with what is remembered of the network and node of the first, and notes what is sent for each.
    pub(super) async fn assign_all(&self, asking: &mut Asking<'_>, findings: &mut Findings) -> Result<Done> {
        let Some(attachment) = asking.requests.first().map(|request| request.attachment.clone()) else {
            return Ok(Done::default());
        };
        self.settle_intents(&[&attachment], asking.deadline).await?;
        let recalled = self.recall(&attachment);
        findings.used.clone_from(&recalled);
        let store = self.noting(&asking.askers);
        let done = transact!(on store, with self.remembering(asking.deadline), |tx| {
            self.assign_in(tx, asking, None, findings).await
        })?;
        self.remember(&attachment, &recalled, &findings.used);
        Ok(done)
    }

    /// Lets those join who ask by now, if they have not been asked for before. What was begun for them and broke off is settled
    /// first; their handles were not read.
    pub(super) async fn let_join(&self, tx: &mut Transaction, asking: &mut Asking<'_>) -> Result<()> {
        let joined = asking.requests.len();
        asking.requests.extend(mem::replace(&mut asking.join, Box::new(Vec::new))());
        for AssignRequest { attachment, .. } in asking.requests.iter().skip(joined) {
            asking.askers.join(attachment.clone());
            tx.presume_absent(&keys::handle(&attachment.handle()));
        }
        let are_apart = |(place, one): (usize, &AssignRequest)| {
            asking.requests[..place].iter().all(|other| is_beside(&one.attachment, &other.attachment))
        };
        if !asking.requests.iter().enumerate().all(are_apart) {
            return Err(Error::Invalid("only different attachments of one node are assigned to together".to_owned()));
        }
        let unsettled = asking.requests.iter().skip(asking.settled).map(|request| &request.attachment);
        self.settle_intents(&unsettled.collect::<Vec<_>>(), asking.deadline).await?;
        asking.settled = asking.requests.len();
        Ok(())
    }
}
