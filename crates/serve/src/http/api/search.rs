//! Search by a part of a name, and the addresses of a container, a pod or a node.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::ControlFlow;

use ipam_core::model::{Attribute, Block, Owner, same_handle};
use ipam_operator::events::Holder;
use ipnet::IpNet;
use kv::{Deadline, Revision};
use serde::Serialize;

use super::blocks::{Address, Rules, each_block};
use super::{Query, made};
use crate::http::Shown;
use crate::http::answer::{Answer, Failure, MOMENT};

/// The most results of each kind in an answer.
const MOST: usize = 200;
/// The longest text that is looked for.
const LONGEST: usize = 200;

/// The finds of a search.
#[derive(Default, Serialize)]
struct Found {
    pools: Vec<PoolFound>,
    blocks: Vec<String>,
    nodes: BTreeSet<String>,
    addresses: Vec<Placed>,
    /// True if there are more.
    more: bool,
}

#[derive(Serialize)]
struct PoolFound {
    name: String,
    cidr: String,
}

/// An address and its block.
#[derive(Serialize)]
struct Placed {
    block: String,
    #[serde(flatten)]
    address: Address,
}

pub(super) async fn answer(shown: &Shown, query: &Query) -> Result<Answer, Failure> {
    let text = query.need("q")?.trim().to_lowercase();
    if text.is_empty() || text.len() > LONGEST {
        return Err(Failure::question(format!("a search has 1 to {LONGEST} characters")));
    }
    let found = shown.asked.search.get(&text, MOMENT, shown.asked.alone(search(shown, &text))).await?;
    Ok(made(&found))
}

async fn search(shown: &Shown, text: &str) -> Result<String, Failure> {
    let wanted = Wanted::of(text);
    let rules = Rules::read(shown).await?;
    let pools = shown.operator.ipam().inventory(Deadline::after(shown.limits.answer)).await?.pools;
    let mut found = Found::default();
    for pool in pools.iter().filter(|pool| wanted.is_pool(pool.name(), pool.cidr())).take(MOST) {
        found.pools.push(PoolFound { name: pool.name().to_owned(), cidr: pool.cidr().to_string() });
    }
    each_block(&*shown.store, Revision::UNSET, |mut block| {
        rules.apply(&mut block);
        found.scan(&block, &wanted, &rules);
        if found.addresses.len() > MOST { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .await?;
    if let Wanted::Address(ip) = wanted
        && found.addresses.is_empty()
        && let Some(pool) = pools.iter().find(|pool| pool.cidr().contains(&ip))
        && let Some(block) = ipam_core::pools::block_of(pool, ip)
    {
        // An address that nobody has is one that somebody may look for, too.
        let used = if rules.reservations.touches(pool.unit_of(ip)) {
            crate::http::api::blocks::Use::Reserved
        } else {
            crate::http::api::blocks::Use::Free
        };
        let address = Address { ip, used, holder: None, since: None };
        found.addresses.push(Placed { block: block.to_string(), address });
    }
    found.more = found.addresses.len() > MOST;
    found.addresses.truncate(MOST);
    found.blocks.truncate(MOST);
    written(&found)
}

fn written(document: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(document).map_err(|error| Failure::store(format!("JSON: {error}")))
}

/// The object of a search.
enum Wanted {
    Address(IpAddr),
    Network(IpNet),
    /// A part of a name, in lower case.
    Text(String),
}

impl Wanted {
    fn of(text: &str) -> Self {
        let address = text.parse().map(Self::Address);
        let network = || text.parse::<IpNet>().map(|net| Self::Network(net.trunc()));
        address.or_else(|_| network()).unwrap_or_else(|_| Self::Text(text.to_owned()))
    }

    fn is_pool(&self, name: &str, cidr: IpNet) -> bool {
        match self {
            Self::Address(ip) => cidr.contains(ip),
            Self::Network(net) => *net == cidr,
            Self::Text(text) => has(name, text) || cidr.to_string().starts_with(text.as_str()),
        }
    }
}

fn has(name: &str, text: &str) -> bool {
    name.to_lowercase().contains(text)
}

impl Found {
    fn scan(&mut self, block: &Block, wanted: &Wanted, rules: &Rules) {
        let cidr = block.cidr();
        let placed = |ip| Placed { block: cidr.to_string(), address: Address::of(block, ip, &rules.reservations) };
        let text = match wanted {
            Wanted::Address(ip) => {
                if cidr.contains(ip) {
                    self.addresses.push(placed(*ip));
                }
                return;
            }
            Wanted::Network(net) => {
                if net.contains(&cidr) && self.blocks.len() < MOST {
                    self.blocks.push(cidr.to_string());
                }
                return;
            }
            Wanted::Text(text) => text,
        };
        self.node(block.owner().as_ref().and_then(Owner::node), text);
        for (ip, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            let holder = Holder::of(entry);
            self.node(holder.node, text);
            let full = holder.namespace.zip(holder.pod).map(|(namespace, pod)| format!("{namespace}/{pod}"));
            let names = [holder.handle, holder.node, holder.network, holder.pod, full.as_deref().or(holder.namespace)];
            let is_named = names.into_iter().flatten().any(|name| has(name, text));
            if (is_named || ip.to_string().starts_with(text.as_str())) && self.addresses.len() <= MOST {
                self.addresses.push(placed(ip));
            }
        }
    }

    fn node(&mut self, node: Option<&str>, text: &str) {
        if let Some(node) = node.filter(|node| has(node, text) && !self.nodes.contains(*node))
            && self.nodes.len() < MOST
        {
            self.nodes.insert(node.to_owned());
        }
    }
}

/// The addresses and blocks of a party.
#[derive(Default, Serialize)]
struct Held {
    addresses: Vec<Placed>,
    /// The blocks of a node.
    blocks: Vec<BlockHeld>,
    more: bool,
}

#[derive(Serialize)]
struct BlockHeld {
    cidr: String,
    used: usize,
    free: usize,
}

/// A holder of addresses.
#[derive(Clone, Debug)]
pub(super) enum Party {
    Container(String),
    Pod(String),
    Node(String),
}

impl Party {
    pub(super) fn of(query: &Query) -> Result<Self, Failure> {
        let name = query.need("of")?.to_owned();
        match query.need("kind")? {
            "container" => Ok(Self::Container(name)),
            "pod" => Ok(Self::Pod(name)),
            "node" => Ok(Self::Node(name)),
            other => Err(Failure::question(format!("{other:?} is neither a container, nor a pod, nor a node"))),
        }
    }

    /// True if an address with this entry is its.
    pub(super) fn has(&self, entry: &Attribute) -> bool {
        let holder = Holder::of(entry);
        match self {
            Self::Container(name) => {
                holder.container == Some(name) || holder.handle.is_some_and(|handle| same_handle(handle, name))
            }
            Self::Node(name) => holder.node == Some(name),
            Self::Pod(name) => match name.split_once('/') {
                Some((namespace, pod)) => holder.pod == Some(pod) && holder.namespace == Some(namespace),
                None => holder.pod == Some(name),
            },
        }
    }
}

/// The addresses of a container, a pod or a node, and the blocks of a node.
pub(super) async fn held(shown: &Shown, query: &Query) -> Result<Answer, Failure> {
    let party = Party::of(query)?;
    let read = shown.asked.alone(all_held(shown, &party));
    Ok(made(&shown.asked.held.get(&format!("{party:?}"), MOMENT, read).await?))
}

async fn all_held(shown: &Shown, party: &Party) -> Result<String, Failure> {
    let rules = Rules::read(shown).await?;
    let mut held = Held::default();
    each_block(&*shown.store, Revision::UNSET, |mut block| {
        rules.apply(&mut block);
        let is_own = matches!(party, Party::Node(name) if block.owner().as_ref().and_then(Owner::node) == Some(name));
        if is_own && held.blocks.len() < MOST {
            let free = block.free_addresses().count();
            held.blocks.push(BlockHeld { cidr: block.cidr().to_string(), used: block.capacity() - free, free });
        }
        for (ip, _) in block.allocated().filter(|(_, entry)| entry.released_at().is_none() && party.has(entry)) {
            if held.addresses.len() >= MOST {
                held.more = true;
                break;
            }
            let address = Address::of(&block, ip, &rules.reservations);
            held.addresses.push(Placed { block: block.cidr().to_string(), address });
        }
        ControlFlow::Continue(())
    })
    .await?;
    written(&held)
}
