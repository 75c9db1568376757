//! Assigns addresses to an attachment, or to several attachments of one node in one commit. A trial runs the same code and stops
//! before the commit.

mod assignment;
mod auto;
pub mod bridge;
pub mod define;
mod explain;
mod handle;
mod request;
mod secondary;
mod sticky;
mod vm;

use std::collections::BTreeSet;
use std::slice;
use std::time::Duration;

use ipnet::IpNet;
use kv::{Deadline, Key, Range, Transaction};

use crate::assign_context::{AssignContext, read_config};
use crate::attachment::{Attachment, NODE, Ownership, TIMESTAMP, namespace_of};
use crate::boxed_future;
use crate::check::{held_by, renew};
use crate::error::{Error, Result};
use crate::gc::{self, Evidence, Leftover, Leftovers, is_short};
use crate::hints;
use crate::ipam::{Ipam, transact};
use crate::model::{
    Attribute, Block, Owner, Precision, covers_of_overlaps, default_block_size, is_of_prefixes, keys,
    overlaps_of_addresses,
};
use crate::net::Family;
use crate::sticky::Sticky;
use crate::timestamps::parse_go_string;
use crate::write_set::{WriteSet, likely_counters};

use assignment::Assignment;
pub use auto::refuse_among_prefixes;
pub use explain::{AddressSource, Explanation, PoolState, PoolStock, PredictedOutcome};
pub use handle::{BlockRequest, HandleRequest};
pub use request::{
    AssignRequest, AssignedAddress, Bridge, Gateway, NamespaceLabels, PoolDefinition, RepeatPolicy, RequestedAddresses,
};
use sticky::WorkloadAddresses;

/// The most requested addresses for which blocks of every possible size are read along with the surroundings.
const MAX_ADDRESSES_READ_AHEAD: usize = 2;

/// The findings of an attempt, for the next one.
#[derive(Debug, Default)]
struct AttemptFindings {
    /// The blocks that were used last, the latest first.
    used: Vec<IpNet>,
    /// Blocks with releases that are dated far ahead.
    misdated: Vec<IpNet>,
    /// The leftovers of earlier boots in the blocks that were read.
    leftovers: Vec<Leftover>,
    /// The cooldown of released addresses, in seconds.
    cooldown: i64,
    /// True for an attempt that assigns nothing in the end.
    is_trial: bool,
}

impl Ipam {
    /// Assigns addresses to an attachment: any free ones, or requested ones. IPv4 and IPv6 together, and everything
    /// that must be made or mended for them, are one commit; if anything is missing, nothing happens.
    ///
    /// If an attachment requests again what it has, it gets the same answer. An assignment for it that broke off is
    /// settled first, where [pending commits](crate::pending_commits) are recorded.
    ///
    /// # Errors
    /// Those of [`Error`], with Calico's texts.
    #[boxed_future]
    pub async fn assign(&self, request: &AssignRequest, deadline: Deadline) -> Result<Vec<AssignedAddress>> {
        let mut findings = AttemptFindings::default();
        let mut error = match self.assign_all(slice::from_ref(request), &mut findings, deadline).await {
            Ok(done) => return Ok(done.only_answer()),
            Err(error) => error,
        };
        if let Error::Quota(reached) = &mut error {
            // There may be room in the blocks that were read, and leftovers in others.
            findings.leftovers = self.leftovers_of(&reached.subject, &request.attachment, deadline).await?;
            reached.over_leftovers = !findings.leftovers.is_empty();
        }
        let assigned = if is_short(&error) {
            Box::pin(self.assign_over_leftovers(request, &findings, error, deadline)).await
        } else {
            Err(error)
        };
        if assigned.is_err() && !findings.misdated.is_empty() {
            Box::pin(self.redate(&findings.misdated, deadline)).await?;
        }
        assigned
    }

    /// Assigns once more after there was no room, and frees the leftovers of earlier boots in the same commit. If there
    /// is still no room, or nothing may be freed, the error stays the same.
    async fn assign_over_leftovers(
        &self,
        request: &AssignRequest,
        findings: &AttemptFindings,
        error: Error,
        deadline: Deadline,
    ) -> Result<Vec<AssignedAddress>> {
        let Some(live) = self.liveness().filter(|_| !findings.leftovers.is_empty()) else { return Err(error) };
        // Taken after the leftovers are known: an attachment that gets an address from here on is not one of them.
        let Some(evidence) = live.evidence().await else { return Err(error) };
        let leftovers = Leftovers { found: findings.leftovers.clone(), evidence };
        if findings.cooldown > 0 {
            self.start_cooldown(request, &leftovers, deadline).await?;
            return Err(error);
        }
        let mut again = AttemptFindings::default();
        let done = transact!(on self.recording_store(&request.attachment), deadline, |tx| {
            self.assign_in(tx, slice::from_ref(request), Some(&leftovers), &mut again).await
        });
        match done {
            Ok(done) => {
                for gc::Allocation { address, network, container, interface, .. } in &done.freed {
                    tracing::warn!(%address, network, container, interface, "freed: left over from an earlier boot");
                }
                Ok(done.only_answer())
            }
            Err(other) if is_short(&other) => Err(error),
            Err(other) => Err(other),
        }
    }

    /// Where there is a cooldown, the assignment cannot have the leftovers yet, but their cooldown begins.
    async fn start_cooldown(&self, request: &AssignRequest, leftovers: &Leftovers, deadline: Deadline) -> Result<()> {
        let node = &request.attachment.node;
        let (holdings, _) = self.holdings_within(node, &self.read_scope_of(node), deadline).await?;
        let earlier = self.judge(&holdings, &leftovers.evidence).earlier;
        // As many as an assignment frees otherwise.
        for batch in gc::batches(&earlier).into_iter().take(1) {
            self.free(&batch, deadline).await?;
        }
        Ok(())
    }

    /// Records releases that are dated far ahead as made now. An assignment that succeeds need not care: it found an
    /// address. One that fails would find them in cooldown again and again.
    async fn redate(&self, blocks: &[IpNet], deadline: Deadline) -> Result<()> {
        for cidr in blocks {
            transact!(self, deadline, |tx| {
                let cooldown = read_config(tx).await?.cooldown_seconds();
                let mut work = WriteSet::new(tx, self.now(), cooldown);
                work.change(*cidr, |_| ()).await?;
                work.write().await
            })?;
        }
        Ok(())
    }

    /// Reads the surroundings of an assignment to an owner, in one round trip, along with other needed keys, and the keys of
    /// ranges.
    async fn read_context(
        &self,
        tx: &mut Transaction,
        owner: &Owner,
        wanted: &RequestedAddresses,
        mut keys: Vec<Key>,
        mut named: Vec<Range>,
    ) -> Result<AssignContext> {
        let given = wanted.these.iter().take(MAX_ADDRESSES_READ_AHEAD);
        for ip in given {
            keys.extend(hints::possible_blocks(*ip).into_iter().map(keys::block));
            // A block of another size takes a request more if it is new.
            let family = Family::of(*ip);
            if let Some(usual) = family.network(*ip, default_block_size(family)) {
                named.extend(covers_of_overlaps(usual, Precision::Coarse).into_iter().flat_map(|cover| cover.coarse));
            }
        }
        let mut owners = vec![owner.clone()];
        if let Owner::Host(name) = owner {
            owners.push(Owner::secondary(name));
        }
        let families = [Family::V4, Family::V6].into_iter().filter(|family| wanted.all_of(*family) > 0);
        let affinities = families
            .flat_map(|family| owners.iter().filter_map(move |owner| keys::affinities_prefix(owner, Some(family))));
        named.extend(affinities.map(Range::Prefix));
        let context = AssignContext::read(self, tx, owner, keys, named).await?;
        context.host.pin(tx)?;
        Ok(context)
    }

    /// Carries out all requests, one after the other, in one transaction. All are for attachments of one node.
    async fn assign_in(
        &self,
        tx: &mut Transaction,
        requests: &[AssignRequest],
        leftovers: Option<&Leftovers>,
        findings: &mut AttemptFindings,
    ) -> Result<AssignOutcome> {
        let Some(Attachment { node, .. }) = requests.first().map(|request| &request.attachment) else {
            return Ok(AssignOutcome::default());
        };
        let owner = Owner::host(node);
        let mut wanted = RequestedAddresses::default();
        requests.iter().for_each(|request| wanted.add(&request.wanted));
        let mut first: Vec<Key> = requests.iter().map(|request| keys::handle(&request.attachment.handle())).collect();
        first.extend(
            requests.iter().filter_map(|request| request.sticky.as_ref()).map(|sticky| keys::sticky(&sticky.name)),
        );
        // Without a block that may serve, a new one is likely, and needs to know the blocks of prefixes.
        let mut named = Vec::new();
        for family in [Family::V4, Family::V6] {
            if wanted.these.iter().any(|ip| Family::of(*ip) == family)
                || (wanted.any_of(family) > 0 && hints::latest_of(&findings.used, family).next().is_none())
            {
                named.push(Range::Prefix(keys::blocks_of_prefixes_prefix(family)));
            }
        }
        for family in [Family::V4, Family::V6].into_iter().filter(|family| wanted.any_of(*family) > 0) {
            let most = requests.iter().map(|request| request.likely_blocks(family)).max().unwrap_or(1);
            let likely: Vec<IpNet> = hints::latest_of(&findings.used, family).take(most).collect();
            first.extend(likely.iter().copied().map(keys::block));
            let owners = Owner::all_of(node);
            first.extend(likely.iter().flat_map(|cidr| owners.iter().filter_map(|owner| keys::affinity(owner, *cidr))));
            let of_addresses = likely.iter().filter(|cidr| !is_of_prefixes(**cidr));
            named.extend(of_addresses.flat_map(|cidr| overlaps_of_addresses(*cidr)));
        }
        if let [AssignRequest { attachment, attributes, .. }] = requests {
            first.extend(likely_counters(&attachment.network, node, namespace_of(attributes)));
        }
        let mut context = self.read_context(tx, &owner, &wanted, first, named).await?;

        let cooldown = context.config.cooldown_seconds();
        let mut work = WriteSet::new(tx, self.now(), cooldown);
        work.heed_quotas().await?;
        let is_trial = findings.is_trial;
        let mut all = AssignOutcome::default();
        for request in requests {
            let handle = request.attachment.handle();
            let attachment = Attachment { node: context.host.name.clone(), ..request.attachment.clone() };
            let mut attributes = request.attributes.clone();
            attributes.insert(NODE.to_owned(), attachment.node.clone());
            let mut marked = attachment.mark(&attributes, request.names());
            let plain = request.sticky.as_ref().map(|_| Attribute::new(Some(&handle), marked.clone()));
            marked.extend(request.sticky.iter().flat_map(Sticky::attributes));
            let holder = Attribute::new(Some(&handle), marked);
            let asked_at = attributes.get(TIMESTAMP).and_then(|text| parse_go_string(text));

            let held = held_by(&mut work, &attachment, asked_at, |claim| claim == Ownership::Own).await?;
            if let Some(leftovers) = leftovers {
                all.freed.extend(self.free_leftovers(&mut work, &attachment.node, leftovers).await?);
            }
            let context = &mut context;
            let kept = match plain {
                Some(plain) => WorkloadAddresses::read(&mut work, request, plain).await?,
                None => None,
            };
            let mut assignment = Assignment { held, kept, ..Assignment::new(self, request, context, holder, handle) };
            let done = match assignment.all(&mut work).await {
                Ok(()) => work.check_quotas((!is_trial).then_some(&**self.store())).await,
                failed => failed,
            };
            assignment.context.allow_all();
            let used = assignment.answer.iter().map(|assigned| assigned.block);
            let mut used = hints::with_used(&findings.used, used);
            assignment.set_back_full(&mut work, &mut used).await?;
            *findings = AttemptFindings {
                used,
                misdated: work.misdated().to_vec(),
                leftovers: match done {
                    Ok(()) => Vec::new(),
                    Err(_) => Leftover::in_blocks(work.blocks(), &attachment),
                },
                cooldown,
                is_trial,
            };
            done?;
            let Assignment { answer, held, kept, .. } = assignment;
            if let Some(kept) = kept {
                kept.write(&mut work)?;
            }
            renew(&mut work, &attachment, &held, &answer, &attributes, request.names()).await?;
            all.answers.push(answer);
        }
        self.note_borrowed(&mut work, &context.host.name, &all).await?;
        work.write().await?;
        Ok(all)
    }

    /// Records as a hint from which blocks of other owners the node is about to have addresses.
    async fn note_borrowed(&self, work: &mut WriteSet<'_>, node: &str, done: &AssignOutcome) -> Result<()> {
        let mut borrowed = Vec::new();
        for assigned in done.answers.iter().flatten() {
            let owner = work.block(assigned.block).await?.and_then(Block::owner);
            if owner.as_ref().and_then(Owner::node) != Some(node) && !borrowed.contains(&assigned.block) {
                borrowed.push(assigned.block);
            }
        }
        self.note_held(node, &borrowed);
        Ok(())
    }
}

/// The outcome of assignments.
#[derive(Default)]
struct AssignOutcome {
    /// The answer to each request.
    answers: Vec<Vec<AssignedAddress>>,
    /// The freed leftovers of earlier boots.
    freed: Vec<gc::Allocation>,
}

impl AssignOutcome {
    /// The answer to a single request.
    fn only_answer(self) -> Vec<AssignedAddress> {
        self.answers.into_iter().flatten().collect()
    }
}

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
    /// the same, or if there are several and [pending commits](crate::pending_commits) are recorded.
    #[boxed_future]
    pub async fn assign_together(
        &self,
        requests: &[AssignRequest],
        deadline: Deadline,
    ) -> Result<Vec<Vec<AssignedAddress>>> {
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
        if self.pending_commits().is_some() {
            let text = "where intents are noted, attachments are assigned to one by one";
            return Err(Error::Invalid(text.to_owned()));
        }
        Ok(self.assign_all(requests, &mut AttemptFindings::default(), deadline).await?.answers)
    }

    /// Assigns to all, with the hints for the network and node of the first. A pending commit is for the first: where
    /// these are recorded, it is the only one.
    async fn assign_all(
        &self,
        requests: &[AssignRequest],
        findings: &mut AttemptFindings,
        deadline: Deadline,
    ) -> Result<AssignOutcome> {
        let Some(AssignRequest { attachment, .. }) = requests.first() else { return Ok(AssignOutcome::default()) };
        self.settle_pending_commits(attachment, deadline).await?;
        let recalled = self.recall(attachment);
        findings.used.clone_from(&recalled);
        let store = self.recording_store(attachment);
        let done = transact!(on store, deadline, |tx| {
            self.assign_in(tx, requests, None, findings).await
        })?;
        self.remember(attachment, &recalled, &findings.used);
        Ok(done)
    }
}

/// The result of an assignment up to its commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AssignTrial {
    /// The addresses that would be assigned.
    pub assigned: Vec<AssignedAddress>,
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
    #[boxed_future]
    pub async fn would_assign(&self, request: &AssignRequest, deadline: Deadline) -> Result<AssignTrial> {
        let mut findings = AttemptFindings { is_trial: true, ..AttemptFindings::default() };
        let refused = match self.try_assign(request, None, &mut findings, deadline).await {
            Err(error) if is_short(&error) && !findings.leftovers.is_empty() && findings.cooldown <= 0 => error,
            done => return done,
        };
        let (Some(_), Some(boot)) = (self.liveness(), &request.attachment.boot) else { return Err(refused) };
        let (boot, up, live) = (boot.clone(), Duration::ZERO, BTreeSet::new());
        let evidence = Evidence { boot, up, live, namespaces: None, within: None };
        let leftovers = Leftovers { found: findings.leftovers, evidence };
        let mut again = AttemptFindings { is_trial: true, ..AttemptFindings::default() };
        match self.try_assign(request, Some(&leftovers), &mut again, deadline).await {
            Err(error) if is_short(&error) => Err(refused),
            done => done,
        }
    }

    async fn try_assign(
        &self,
        request: &AssignRequest,
        leftovers: Option<&Leftovers>,
        findings: &mut AttemptFindings,
        deadline: Deadline,
    ) -> Result<AssignTrial> {
        transact!(self, deadline, |tx| {
            let done = self.assign_in(tx, slice::from_ref(request), leftovers, findings).await?;
            Ok(AssignTrial { assigned: done.only_answer(), keys: tx.forget_writes() })
        })
    }
}
