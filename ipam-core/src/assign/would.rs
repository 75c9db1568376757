//! Whether an assignment would succeed. It runs as one does, up to the commit.

use std::collections::BTreeSet;
use std::slice;
use std::time::Duration;

use kv::{Deadline, Key};

use super::Findings;
use super::request::{AssignRequest, Assigned};
use crate::boxed;
use crate::error::Result;
use crate::gc::{Evidence, Leftovers, is_short};
use crate::ipam::{Ipam, transact};

/// The result of an assignment up to its commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trial {
    /// The addresses that would be assigned.
    pub assigned: Vec<Assigned>,
    /// The keys that the commit would write.
    pub keys: Vec<Key>,
}

impl Ipam {
    /// The addresses that [`assign`](Self::assign) would assign to this attachment now, and the keys that it would write. Nothing is written, and no
    /// assignment that broke off is settled. Leftovers of earlier boots count as not in use: the machine is not
    /// scanned, which may take longer than the caller has.
    ///
    /// # Errors
    /// Those of [`assign`](Self::assign).
    #[boxed]
    pub async fn would_assign(&self, request: &AssignRequest, deadline: Deadline) -> Result<Trial> {
        let mut findings = Findings { is_trial: true, ..Findings::default() };
        let refused = match self.try_assign(request, None, &mut findings, deadline).await {
            Err(error) if is_short(&error) && !findings.leftovers.is_empty() && findings.cooldown <= 0 => error,
            done => return done,
        };
        let (Some(_), Some(boot)) = (self.live(), &request.attachment.boot) else { return Err(refused) };
        let (boot, up, live) = (boot.clone(), Duration::ZERO, BTreeSet::new());
        let evidence = Evidence { boot, up, live, namespaces: None, within: None };
        let leftovers = Leftovers { found: findings.leftovers, evidence };
        let mut again = Findings { is_trial: true, ..Findings::default() };
        match self.try_assign(request, Some(&leftovers), &mut again, deadline).await {
            Err(error) if is_short(&error) => Err(refused),
            done => done,
        }
    }

    async fn try_assign(
        &self,
        request: &AssignRequest,
        leftovers: Option<&Leftovers>,
        findings: &mut Findings,
        deadline: Deadline,
    ) -> Result<Trial> {
        transact!(self, deadline, |tx| {
            let done = self.assign_in(tx, slice::from_ref(request), leftovers, findings).await?;
            Ok(Trial { assigned: done.only_answer(), keys: tx.forget_writes() })
        })
    }
}
