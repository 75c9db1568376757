//! Searches for names that contain a text, and lists the addresses of a container, a pod or a node.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::ControlFlow;

use ipam_core::model::{Attribute, Block, Owner, same_handle};
use ipam_operator::events::Holder;
use ipnet::IpNet;
use kv::{Deadline, Revision};
use serde::Serialize;

use super::blocks::{AddressRow, AddressRules, visit_blocks};
use super::{Query, json_text_response};
use crate::http::PageContext;
use crate::http::answer::{ANSWER_TTL, HttpError, HttpResponse};

/// Maximum number of results of each kind in an answer.
const MAX_RESULTS: usize = 200;
const MAX_SEARCH_BYTES: usize = 200;

#[derive(Default, Serialize)]
struct SearchResult {
    pools: Vec<PoolMatch>,
    blocks: Vec<String>,
    nodes: BTreeSet<String>,
    addresses: Vec<AddressMatch>,
    /// Whether further results are omitted from the answer.
    more: bool,
}

#[derive(Serialize)]
struct PoolMatch {
    name: String,
    cidr: String,
}

#[derive(Serialize)]
struct AddressMatch {
    block: String,
    #[serde(flatten)]
    address: AddressRow,
}

pub(super) async fn answer(page: &PageContext, query: &Query) -> Result<HttpResponse, HttpError> {
    let text = query.need("q")?.trim().to_lowercase();
    if text.is_empty() || text.len() > MAX_SEARCH_BYTES {
        return Err(HttpError::bad_request(format!("a search has 1 to {MAX_SEARCH_BYTES} characters")));
    }
    let found = page.cache.search.get(&text, ANSWER_TTL, page.cache.read_exclusively(search(page, &text))).await?;
    Ok(json_text_response(&found))
}

async fn search(page: &PageContext, text: &str) -> Result<String, HttpError> {
    let wanted = SearchTerm::of(text);
    let rules = AddressRules::read(page).await?;
    let pools = page.operator.ipam().inventory(Deadline::after(page.limits.answer)).await?.pools;
    let mut found = SearchResult::default();
    for pool in pools.iter().filter(|pool| wanted.is_pool(pool.name(), pool.cidr())).take(MAX_RESULTS) {
        found.pools.push(PoolMatch { name: pool.name().to_owned(), cidr: pool.cidr().to_string() });
    }
    visit_blocks(&*page.store, Revision::UNSET, |mut block| {
        rules.apply(&mut block);
        found.scan(&block, &wanted, &rules);
        if found.addresses.len() > MAX_RESULTS { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .await?;
    if let SearchTerm::Address(ip) = wanted
        && found.addresses.is_empty()
        && let Some(pool) = pools.iter().find(|pool| pool.cidr().contains(&ip))
        && let Some(block) = ipam_core::pools::block_of(pool, ip)
    {
        // Free addresses can be searched for as well.
        let used = if rules.reservations.touches(pool.unit_of(ip)) {
            crate::http::api::blocks::AddressUsage::Reserved
        } else {
            crate::http::api::blocks::AddressUsage::Free
        };
        let address = AddressRow { ip, used, holder: None, since: None };
        found.addresses.push(AddressMatch { block: block.to_string(), address });
    }
    found.more = found.addresses.len() > MAX_RESULTS;
    found.addresses.truncate(MAX_RESULTS);
    found.blocks.truncate(MAX_RESULTS);
    to_json_text(&found)
}

fn to_json_text(document: &impl Serialize) -> Result<String, HttpError> {
    serde_json::to_string(document).map_err(|error| HttpError::unavailable(format!("JSON: {error}")))
}

enum SearchTerm {
    Address(IpAddr),
    Network(IpNet),
    /// A part of a name to search for, in lower case.
    Text(String),
}

impl SearchTerm {
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

impl SearchResult {
    fn scan(&mut self, block: &Block, wanted: &SearchTerm, rules: &AddressRules) {
        let cidr = block.cidr();
        let placed =
            |ip| AddressMatch { block: cidr.to_string(), address: AddressRow::of(block, ip, &rules.reservations) };
        let text = match wanted {
            SearchTerm::Address(ip) => {
                if cidr.contains(ip) {
                    self.addresses.push(placed(*ip));
                }
                return;
            }
            SearchTerm::Network(net) => {
                if net.contains(&cidr) && self.blocks.len() < MAX_RESULTS {
                    self.blocks.push(cidr.to_string());
                }
                return;
            }
            SearchTerm::Text(text) => text,
        };
        self.node(block.owner().as_ref().and_then(Owner::node), text);
        for (ip, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            let holder = Holder::of(entry);
            self.node(holder.node, text);
            let full = holder.namespace.zip(holder.pod).map(|(namespace, pod)| format!("{namespace}/{pod}"));
            let names = [holder.handle, holder.node, holder.network, holder.pod, full.as_deref().or(holder.namespace)];
            let is_named = names.into_iter().flatten().any(|name| has(name, text));
            if (is_named || ip.to_string().starts_with(text.as_str())) && self.addresses.len() <= MAX_RESULTS {
                self.addresses.push(placed(ip));
            }
        }
    }

    fn node(&mut self, node: Option<&str>, text: &str) {
        if let Some(node) = node.filter(|node| has(node, text) && !self.nodes.contains(*node))
            && self.nodes.len() < MAX_RESULTS
        {
            self.nodes.insert(node.to_owned());
        }
    }
}

/// The addresses of a container, a pod or a node, and the blocks of a node.
#[derive(Default, Serialize)]
struct HolderAddresses {
    addresses: Vec<AddressMatch>,
    /// The node's blocks; empty if the holder is a container or a pod.
    blocks: Vec<HolderBlock>,
    more: bool,
}

#[derive(Serialize)]
struct HolderBlock {
    cidr: String,
    used: usize,
    free: usize,
}

/// The container, pod or node whose addresses are requested.
#[derive(Clone, Debug)]
pub(super) enum HolderQuery {
    Container(String),
    Pod(String),
    Node(String),
}

impl HolderQuery {
    pub(super) fn of(query: &Query) -> Result<Self, HttpError> {
        let name = query.need("of")?.to_owned();
        match query.need("kind")? {
            "container" => Ok(Self::Container(name)),
            "pod" => Ok(Self::Pod(name)),
            "node" => Ok(Self::Node(name)),
            other => Err(HttpError::bad_request(format!("{other:?} is neither a container, nor a pod, nor a node"))),
        }
    }

    /// Returns whether the attributes of an assigned address match this container, pod or node.
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

/// Lists the addresses of a container, a pod or a node, and the blocks of a node.
pub(super) async fn list_held(page: &PageContext, query: &Query) -> Result<HttpResponse, HttpError> {
    let party = HolderQuery::of(query)?;
    let read = page.cache.read_exclusively(read_held(page, &party));
    Ok(json_text_response(&page.cache.held.get(&format!("{party:?}"), ANSWER_TTL, read).await?))
}

async fn read_held(page: &PageContext, party: &HolderQuery) -> Result<String, HttpError> {
    let rules = AddressRules::read(page).await?;
    let mut held = HolderAddresses::default();
    visit_blocks(&*page.store, Revision::UNSET, |mut block| {
        rules.apply(&mut block);
        let is_own =
            matches!(party, HolderQuery::Node(name) if block.owner().as_ref().and_then(Owner::node) == Some(name));
        if is_own && held.blocks.len() < MAX_RESULTS {
            let free = block.free_addresses().count();
            held.blocks.push(HolderBlock { cidr: block.cidr().to_string(), used: block.capacity() - free, free });
        }
        for (ip, _) in block.allocated().filter(|(_, entry)| entry.released_at().is_none() && party.has(entry)) {
            if held.addresses.len() >= MAX_RESULTS {
                held.more = true;
                break;
            }
            let address = AddressRow::of(&block, ip, &rules.reservations);
            held.addresses.push(AddressMatch { block: block.cidr().to_string(), address });
        }
        ControlFlow::Continue(())
    })
    .await?;
    to_json_text(&held)
}
