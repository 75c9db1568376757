//! Giving addresses to an attachment.

mod auto;
pub mod bridge;
pub mod define;
mod ensure;
mod explain;
mod handle;
mod held;
mod request;
mod search;
mod secondary;
mod specific;
mod together;
mod vm;
mod would;

use std::net::IpAddr;
use std::slice;

use ipnet::IpNet;
use kv::{Deadline, Key, Range, Transaction};

use auto::Pass;
pub use ensure::BlockRequest;
pub use explain::{Explanation, Outcome, PoolState, Source, Stock};
pub use handle::HandleRequest;
pub(crate) use held::held_by;
use held::{Held, renew};
pub use request::{AssignRequest, Assigned, Bridge, Gateway, NamespaceLabels, PoolDefinition, Repeated, Wanted};
use specific::Specific;

use crate::attachment::{Attachment, Claim, NODE, TIMESTAMP};
use crate::error::{BridgeError, Error, Result};
use crate::gc::{self, Leftover, Leftovers, is_short};
use crate::hints;
use crate::ipam::{Ipam, transact};
use crate::model::{AssignmentMode, Attribute, Block, Owner, Pool, keys};
use crate::net::Family;
use crate::pools::{self, PoolError, PoolQuery};
use crate::surroundings::{Surroundings, pool_holding, read_config};
use crate::timestamps::parse_go_string;
use crate::workset::Workset;

/// Of how many given addresses the blocks are read along with what surrounds, each in every size that it may have.
const MOST_GIVEN_AHEAD: usize = 2;

/// What an assignment has found out on its way, for the next attempt.
#[derive(Debug, Default)]
struct Findings {
    /// The blocks that were used last, the latest first.
    used: Vec<IpNet>,
    /// Blocks with releases that are dated far ahead.
    misdated: Vec<IpNet>,
    /// What is left over from earlier boots in the blocks that were read.
    leftovers: Vec<Leftover>,
    /// For how long released addresses rest, in seconds.
    rest: i64,
}

impl Ipam {
    /// Gives addresses to an attachment: any free ones, or given ones. IPv4 and IPv6 together, and everything that has to
    /// be made or mended for them, are one commit; if anything is missing, nothing happens.
    ///
    /// An attachment that asks again for what it has gets the same answer. What was begun for it and broke off is settled
    /// first, where [`intents`](crate::intents) are noted.
    ///
    /// # Errors
    /// Those of [`Error`], with Calico's texts.
    pub async fn assign(&self, request: &AssignRequest, deadline: Deadline) -> Result<Vec<Assigned>> {
        let mut findings = Findings::default();
        let error = match self.assign_all(slice::from_ref(request), &mut findings, deadline).await {
            Ok(done) => return Ok(done.only_answer()),
            Err(error) => error,
        };
        let assigned = if is_short(&error) {
            self.assign_over_leftovers(request, &findings, error, deadline).await
        } else {
            Err(error)
        };
        if assigned.is_err() && !findings.misdated.is_empty() {
            self.redate(&findings.misdated, deadline).await?;
        }
        assigned
    }

    /// Assigns once more after there was no room, and frees in the same commit what is left over from earlier boots. If that
    /// does not help either, or nothing may be freed, the error stays what it was.
    async fn assign_over_leftovers(
        &self,
        request: &AssignRequest,
        findings: &Findings,
        error: Error,
        deadline: Deadline,
    ) -> Result<Vec<Assigned>> {
        let Some(live) = self.live().filter(|_| !findings.leftovers.is_empty()) else { return Err(error) };
        // Asked now that it is known who is left over: who gets an address from here on is not among them.
        let Some(evidence) = live.evidence().await else { return Err(error) };
        let leftovers = Leftovers { found: findings.leftovers.clone(), evidence };
        if findings.rest > 0 {
            self.let_rest(request, &leftovers, deadline).await?;
            return Err(error);
        }
        let mut again = Findings::default();
        let done = transact!(on self.noting(&request.attachment), deadline, |tx| {
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

    /// Where released addresses rest, the assignment cannot have them yet, but they begin to rest.
    async fn let_rest(&self, request: &AssignRequest, leftovers: &Leftovers, deadline: Deadline) -> Result<()> {
        let node = &request.attachment.node;
        let (holdings, _) = self.holdings_within(node, &self.reach_of(node), deadline).await?;
        let earlier = self.judge(&holdings, &leftovers.evidence).earlier;
        // As many as an assignment frees otherwise.
        for batch in gc::batches(&earlier).into_iter().take(1) {
            self.free(&batch, deadline).await?;
        }
        Ok(())
    }

    /// Writes down that releases which are dated far ahead happened now. An assignment that succeeds need not care: it
    /// found an address. One that fails would find them resting again and again.
    async fn redate(&self, blocks: &[IpNet], deadline: Deadline) -> Result<()> {
        for cidr in blocks {
            transact!(self, deadline, |tx| {
                let rest = read_config(tx).await?.cooldown_seconds();
                let mut work = Workset::new(tx, self.now(), rest);
                work.change(*cidr, |_| ()).await?;
                work.write().await
            })?;
        }
        Ok(())
    }

    /// Reads what surrounds an assignment to an owner, in one round trip, along with other keys that will be needed.
    async fn read_around(
        &self,
        tx: &mut Transaction,
        owner: &Owner,
        wanted: &Wanted,
        mut keys: Vec<Key>,
    ) -> Result<Surroundings> {
        let given = wanted.these.iter().take(MOST_GIVEN_AHEAD);
        keys.extend(given.flat_map(|ip| hints::possible_blocks(*ip)).map(keys::block));
        let mut owners = vec![owner.clone()];
        if let Owner::Host(name) = owner {
            owners.push(Owner::secondary(name));
        }
        let families = [Family::V4, Family::V6].into_iter().filter(|family| wanted.all_of(*family) > 0);
        let affinities = families
            .flat_map(|family| owners.iter().filter_map(move |owner| keys::affinities_prefix(owner, Some(family))))
            .map(Range::Prefix)
            .collect();
        let around = Surroundings::read(self, tx, owner, keys, affinities).await?;
        around.host.pin(tx)?;
        Ok(around)
    }

    /// Assigns to all who ask, one after the other, in one transaction. All are attachments of one node.
    async fn assign_in(
        &self,
        tx: &mut Transaction,
        requests: &[AssignRequest],
        leftovers: Option<&Leftovers>,
        findings: &mut Findings,
    ) -> Result<Done> {
        let Some(Attachment { node, .. }) = requests.first().map(|request| &request.attachment) else {
            return Ok(Done::default());
        };
        let owner = Owner::host(node);
        let mut wanted = Wanted::default();
        requests.iter().for_each(|request| wanted.add(&request.wanted));
        let mut first: Vec<Key> = requests.iter().map(|request| keys::handle(&request.attachment.handle())).collect();
        for family in [Family::V4, Family::V6].into_iter().filter(|family| wanted.any_of(*family) > 0) {
            let likely = hints::latest_of(&findings.used, family);
            first.extend(likely.map(keys::block));
            let owners = Owner::all_of(node);
            first.extend(likely.iter().flat_map(|cidr| owners.iter().filter_map(|owner| keys::affinity(owner, *cidr))));
        }
        let mut around = self.read_around(tx, &owner, &wanted, first).await?;

        let rest = around.config.cooldown_seconds();
        let mut work = Workset::new(tx, self.now(), rest);
        let mut all = Done::default();
        for request in requests {
            let handle = request.attachment.handle();
            let attachment = Attachment { node: around.host.name.clone(), ..request.attachment.clone() };
            let mut attributes = request.attributes.clone();
            attributes.insert(NODE.to_owned(), attachment.node.clone());
            let holder = Attribute::new(Some(&handle), attachment.mark(&attributes, request.names()));
            let asked_at = attributes.get(TIMESTAMP).and_then(|text| parse_go_string(text));

            let held = held_by(&mut work, &attachment, asked_at, |claim| claim == Claim::Own).await?;
            if let Some(leftovers) = leftovers {
                all.freed.extend(self.free_leftovers(&mut work, &attachment.node, leftovers).await?);
            }
            let around = &mut around;
            let mut assignment = Assignment { ipam: self, request, around, holder, handle, held, answer: Vec::new() };
            let done = assignment.all(&mut work).await;
            assignment.around.allow_all();
            let used = assignment.answer.iter().map(|assigned| assigned.block);
            *findings = Findings {
                used: hints::with_used(&findings.used, used),
                misdated: work.misdated().to_vec(),
                leftovers: match done {
                    Ok(()) => Vec::new(),
                    Err(_) => Leftover::in_blocks(work.blocks(), &attachment),
                },
                rest,
            };
            done?;
            let Assignment { answer, held, .. } = assignment;
            renew(&mut work, &attachment, &held, &answer, &attributes, request.names()).await?;
            all.answers.push(answer);
        }
        self.note_borrowed(&mut work, &around.host.name, &all).await?;
        work.write().await?;
        Ok(all)
    }

    /// Notes from which blocks of others the node is about to have addresses.
    async fn note_borrowed(&self, work: &mut Workset<'_>, node: &str, done: &Done) -> Result<()> {
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

/// What assignments did.
#[derive(Default)]
struct Done {
    /// The answer to each request.
    answers: Vec<Vec<Assigned>>,
    /// What was freed of earlier boots.
    freed: Vec<gc::Allocation>,
}

impl Done {
    /// The answer to a single request.
    fn only_answer(self) -> Vec<Assigned> {
        self.answers.into_iter().flatten().collect()
    }
}

/// An assignment on its way.
struct Assignment<'a> {
    ipam: &'a Ipam,
    request: &'a AssignRequest,
    around: &'a mut Surroundings,
    holder: Attribute,
    handle: String,
    held: Vec<Held>,
    answer: Vec<Assigned>,
}

impl Assignment<'_> {
    /// All that is wanted.
    async fn all(&mut self, work: &mut Workset<'_>) -> Result<()> {
        self.these(work, &self.request.wanted.these).await?;
        for family in [Family::V4, Family::V6] {
            self.any(work, family, self.request.wanted.any_of(family)).await?;
        }
        Ok(())
    }

    /// Any addresses of one family.
    async fn any(&mut self, work: &mut Workset<'_>, family: Family, wanted: usize) -> Result<()> {
        if wanted == 0 {
            return Ok(());
        }
        let requested = self.requested_pools(work, family).await?;
        let pools = self.select(family, &requested)?;
        let mut gateway = None;
        pools.iter().try_for_each(|pool| self.require_manual(pool))?;
        if let Some(bridge) = self.request.bridge {
            if pools.len() > 1 {
                let candidates = pools.iter().map(|pool| pool.name().to_owned()).collect();
                return Err(BridgeError::SeveralPools { family, candidates }.into());
            }
            for pool in &pools {
                gateway = self.prepare_bridge(work, pool, bridge.gateway(family)).await?;
            }
        }
        let of_pools = |held: &&Held| {
            pool_holding(&pools, held.block).is_some() && !self.answer.iter().any(|assigned| assigned.ip == held.ip)
        };
        let mut addresses: Vec<(IpAddr, IpNet)> =
            self.held.iter().filter(of_pools).take(wanted).map(|held| (held.ip, held.block)).collect();
        if addresses.len() < wanted {
            let pools: Vec<&Pool> = pools.iter().collect();
            addresses.extend(self.pass(family, wanted - addresses.len(), &pools).run(work).await?);
        }
        for (ip, block) in addresses {
            let pool = pool_holding(&pools, block).map_or(block, Pool::cidr);
            self.guard_pool(work, pool).await?;
            self.answer.push(Assigned { ip, block, pool, gateway });
        }
        Ok(())
    }

    /// Given addresses.
    async fn these(&mut self, work: &mut Workset<'_>, addresses: &[IpAddr]) -> Result<()> {
        for ip in addresses {
            let requested = self.requested_pools(work, Family::of(*ip)).await?;
            let assigned = self.this(work, *ip, &requested).await?;
            self.guard_pool(work, assigned.pool).await?;
            self.answer.push(assigned);
        }
        Ok(())
    }

    /// One given address.
    async fn this(&mut self, work: &mut Workset<'_>, ip: IpAddr, requested: &[IpNet]) -> Result<Assigned> {
        let pool = pools::pool_of(&self.around.pools, ip, self.request.usage)?.clone();
        self.require_manual(&pool)?;
        let mut gateway = None;
        if let Some(bridge) = self.request.bridge {
            // A network that names its pools has no other addresses.
            if !requested.is_empty() && !requested.contains(&pool.cidr()) {
                return Err(PoolError::AddressOutside.into());
            }
            gateway = self.prepare_bridge(work, &pool, bridge.gateway(pool.family())).await?;
        }
        let held = self.held.iter().find(|held| held.ip == ip);
        if let Some(held) = held
            && self.request.repeated == Repeated::SameAnswer
        {
            return Ok(Assigned { ip, block: held.block, pool: pool.cidr(), gateway });
        }
        if self.request.bridge.is_some() && self.around.reservations.contains(ip) {
            return Err(Error::Reserved(ip));
        }
        let block = self.specific().assign(work, ip, &pool).await?;
        Ok(Assigned { ip, block, pool: pool.cidr(), gateway })
    }

    /// Makes a pool ready for a bridged network, and returns its gateway.
    async fn prepare_bridge(&mut self, work: &mut Workset<'_>, pool: &Pool, wish: Gateway) -> Result<Option<IpAddr>> {
        let prepared = bridge::prepare(self.ipam, work, pool, wish).await?;
        if let Some(written) = prepared.written {
            self.around.set_reservation(written);
        }
        Ok(prepared.gateway)
    }

    fn pass<'p>(&'p self, family: Family, wanted: usize, pools: &'p [&'p Pool]) -> Pass<'p> {
        Pass {
            ipam: self.ipam,
            request: self.request,
            around: self.around,
            family,
            wanted,
            holder: &self.holder,
            handle: &self.handle,
            pools,
            owner: self.owner(),
            other: self.other_owner(),
            now: self.ipam.now(),
        }
    }

    /// True for a network that is not Calico's, in a store that Calico reads.
    fn is_secondary(&self) -> bool {
        self.request.bridge.is_some() && self.around.beside_calico
    }

    /// The owner from whose blocks addresses come: the node, or the virtual owner of its secondary networks.
    fn owner(&self) -> Owner {
        if self.is_secondary() { Owner::secondary(&self.around.host.name) } else { self.around.host.owner() }
    }

    /// The other one of the node's two owners.
    fn other_owner(&self) -> Option<Owner> {
        match self.around.host.owner() {
            Owner::Host(name) if self.is_secondary() => Some(Owner::host(name)),
            Owner::Host(name) => Some(Owner::secondary(&name)),
            Owner::Virtual(_) | Owner::Other(_) => None,
        }
    }

    /// Refuses a pool from which Calico takes addresses, too, for a network that is not Calico's.
    fn require_manual(&self, pool: &Pool) -> Result<()> {
        if self.is_secondary() && pool.assignment_mode() != AssignmentMode::Manual {
            return Err(BridgeError::CalicosPool { pool: pool.name().to_owned() }.into());
        }
        Ok(())
    }

    fn specific(&self) -> Specific<'_> {
        Specific {
            request: self.request,
            around: self.around,
            holder: &self.holder,
            handle: &self.handle,
            owner: self.owner(),
            is_secondary: self.is_secondary(),
            now: self.ipam.now(),
        }
    }

    /// The networks of the pools that the request names for a family; those that it defines are made first.
    async fn requested_pools(&mut self, work: &mut Workset<'_>, family: Family) -> Result<Vec<IpNet>> {
        let mut names = Vec::new();
        for definition in self.request.define.iter().filter(|one| Family::of_net(one.cidr) == family) {
            names.push(
                define::prepare(self.ipam, work, self.around, definition, &self.request.attachment.network).await?,
            );
        }
        if names.is_empty() {
            names = self.request.pools(family).to_vec();
        }
        Ok(names
            .iter()
            .map(|text| pools::parse_requested(text, &self.around.pools, family))
            .collect::<Result<_, PoolError>>()?)
    }

    /// The pools to take any address of a family from, in order.
    fn select(&self, family: Family, requested: &[IpNet]) -> Result<Vec<Pool>> {
        let query = PoolQuery {
            family,
            requested,
            node: &self.around.host.name,
            node_labels: &self.around.host.labels,
            namespace_labels: &self.request.namespace_labels,
            wanted: self.request.usage,
            host_reserved: self.request.host_reserved.as_ref(),
        };
        if self.request.namespace == NamespaceLabels::NotYetRead
            && pools::asks_for_namespace(&self.around.pools, &query)
        {
            return Err(Error::NamespaceWanted);
        }
        Ok(pools::select_pools(&self.around.pools, &query)?.into_iter().cloned().collect())
    }

    /// Makes the commit fail if the pool is deleted or changed meanwhile.
    async fn guard_pool(&self, work: &mut Workset<'_>, cidr: IpNet) -> Result<()> {
        if let Some(pool) = self.around.pools.iter().find(|pool| pool.cidr() == cidr) {
            work.tx.get(&keys::resource(keys::ResourceKind::IpPool, pool.name())).await?;
        }
        Ok(())
    }
}
