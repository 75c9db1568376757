//! Assigns addresses to an attachment, or to several attachments of one node in one commit. A trial assignment
//! ([`Ipam::would_assign`]) runs the code of an assignment, but stops before the commit.

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

/// Maximum number of specifically requested addresses whose blocks are prefetched. For each such address, the prefetch
/// reads one key per possible block size.
const MAX_ADDRESSES_READ_AHEAD: usize = 2;

/// State that one attempt of an assignment passes to the next attempt.
#[derive(Debug, Default)]
struct AttemptFindings {
    /// The blocks from which the attempt assigned addresses, followed by the blocks that earlier assignments used, most
    /// recent first.
    used: Vec<IpNet>,
    /// Blocks with an address whose recorded release time is too far in the future.
    misdated: Vec<IpNet>,
    leftovers: Vec<Leftover>,
    /// The cooldown of released addresses, in seconds.
    cooldown: i64,
    /// True for a trial assignment, which writes nothing.
    is_trial: bool,
}

impl Ipam {
    /// Assigns free or specific addresses to an attachment. All requested IPv4 and IPv6 addresses are assigned in one
    /// commit, which also creates or repairs the keys that these assignments need. If one of the requested addresses
    /// cannot be assigned, nothing is written.
    ///
    /// An attachment that requests its addresses again gets the same answer. If [pending
    /// commits](crate::pending_commits) are recorded, an interrupted earlier assignment to the attachment is settled
    /// first.
    ///
    /// # Errors
    /// Any [`Error`], with Calico's error messages.
    #[boxed_future]
    pub async fn assign(&self, request: &AssignRequest, deadline: Deadline) -> Result<Vec<AssignedAddress>> {
        let mut findings = AttemptFindings::default();
        let mut error = match self.assign_all(slice::from_ref(request), &mut findings, deadline).await {
            Ok(done) => return Ok(done.only_answer()),
            Err(error) => error,
        };
        if let Error::Quota(reached) = &mut error {
            // When an assignment fails because of a quota, it has possibly not read all blocks with leftover addresses
            // of the quota's subject.
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

    /// Repeats an assignment that found no free address. The commit of the repeated assignment also frees leftover
    /// addresses of earlier boots. Returns `error`, the error of the failed assignment, if no leftover address may be
    /// freed, or if the repeated assignment finds no free address either.
    async fn assign_over_leftovers(
        &self,
        request: &AssignRequest,
        findings: &AttemptFindings,
        error: Error,
        deadline: Deadline,
    ) -> Result<Vec<AssignedAddress>> {
        let Some(live) = self.liveness().filter(|_| !findings.leftovers.is_empty()) else { return Err(error) };
        // The leftovers are listed before the evidence of live attachments is gathered, so that an attachment that gets
        // an address in between is not listed.
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
                    tracing::warn!(%address, network, container, interface, "freed an address left over from an earlier boot");
                }
                Ok(done.only_answer())
            }
            Err(other) if is_short(&other) => Err(error),
            Err(other) => Err(other),
        }
    }

    /// Releases leftover addresses, so that their cooldown begins. Later assignments can use the released addresses
    /// once their cooldown has ended.
    async fn start_cooldown(&self, request: &AssignRequest, leftovers: &Leftovers, deadline: Deadline) -> Result<()> {
        let node = &request.attachment.node;
        let (holdings, _) = self.holdings_within(node, &self.read_scope_of(node), deadline).await?;
        let earlier = self.judge(&holdings, &leftovers.evidence).earlier;
        // Free at most one batch of leftovers, because an assignment in a store without a cooldown also frees only one
        // batch in its commit.
        for batch in gc::batches(&earlier).into_iter().take(1) {
            self.free(&batch, deadline).await?;
        }
        Ok(())
    }

    /// Changes recorded release times that are too far in the future to the current time. An address with a release
    /// time in the future stays in cooldown too long, so assignments could keep failing.
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

    /// Reads, in one round trip, what is needed to assign addresses from an owner's blocks. The request that reads the
    /// context also reads the keys in `keys` and lists the keys in the ranges `named`.
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
            // The prefetch assumes that a new block has the default block size; a new block of another size costs an
            // additional request.
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

    /// Carries out all assignment requests in one transaction, one after the other. The attachments of all requests
    /// must be on one node.
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
        // If no recently used block is known, the assignment probably creates a new block. Creating a block needs the
        // keys of all blocks of prefixes, so these keys are prefetched to save a round trip.
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

    /// Remembers, as a hint, the blocks of other owners from which this transaction borrows addresses for the node.
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

/// The outcome of one transaction that assigns addresses for one or more requests.
#[derive(Default)]
struct AssignOutcome {
    /// The addresses assigned for each request, in the order of the requests.
    answers: Vec<Vec<AssignedAddress>>,
    /// The leftover allocations of earlier boots that were freed.
    freed: Vec<gc::Allocation>,
}

impl AssignOutcome {
    /// Returns the assigned addresses of the first request, for a transaction with a single request.
    fn only_answer(self) -> Vec<AssignedAddress> {
        self.answers.into_iter().flatten().collect()
    }
}

/// True if two attachments are different and on the same node.
fn is_beside(one: &Attachment, other: &Attachment) -> bool {
    let is_same = one.network == other.network && one.container == other.container && one.interface == other.interface;
    one.node == other.node && !is_same
}

impl Ipam {
    /// Assigns addresses to several attachments of one node in one commit. Assigns the same addresses as calls of
    /// [`assign`](Self::assign) for each attachment in order, but writes each changed block only once. The answers are
    /// in the order of the requests. About a hundred attachments fit into one commit.
    ///
    /// If the request of one attachment cannot be satisfied, nothing is written for any attachment. If an assignment
    /// for several attachments fails, call [`assign`](Self::assign) for each attachment separately, which can also free
    /// leftover addresses of earlier boots.
    ///
    /// # Errors
    /// Any error of [`assign`](Self::assign) for one of the attachments. `Invalid` if the attachments are on several
    /// nodes, if two attachments are the same, or if there are several attachments and [pending
    /// commits](crate::pending_commits) are recorded.
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

    /// Carries out all assignment requests, using the hints for the network and node of the first request. If pending
    /// commits are recorded, `requests` has only one request, and the pending commit is recorded for the attachment of
    /// this request.
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

/// The addresses that an assignment would assign, and the keys that it would write, as determined by
/// [`Ipam::would_assign`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AssignTrial {
    /// The addresses that the assignment would assign.
    pub assigned: Vec<AssignedAddress>,
    /// The keys that the commit of the assignment would write.
    pub keys: Vec<Key>,
}

impl Ipam {
    /// Returns the addresses that [`assign`](Self::assign) would assign to this attachment now, and the keys that its
    /// commit would write. This trial assignment writes nothing, and does not settle an interrupted earlier assignment.
    /// Leftover addresses of earlier boots count as unused: the network namespaces of the machine are not scanned,
    /// because a scan may take too long for the caller.
    ///
    /// # Errors
    /// Any error of [`assign`](Self::assign).
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
