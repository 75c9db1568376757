//! Drawings of blocks: in a terminal, or as a picture.

mod cells;
mod picture;
mod terminal;

use ipam_core::census::{AddressUse, BlockCensus, Census};
use ipnet::IpNet;
use serde::Serialize;

use crate::output::printable;

pub(crate) use picture::{html, svg};
pub(crate) use terminal::{Style, draw};

/// The most blocks of a pool that is drawn with a sign for each address; larger pools have a sign for each block.
const MOST_BLOCKS_IN_DETAIL: usize = 64;

/// The detail of a drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Addresses in pools with few blocks, otherwise blocks.
    Auto,
    /// A sign for each address.
    Addresses,
    /// A sign for each block.
    Blocks,
}

/// The blocks of a pool, or all blocks that are in no pool.
#[derive(Debug, Serialize)]
pub(crate) struct Section {
    /// The pool's name; `None` for blocks that are in no pool.
    pub(crate) pool: Option<String>,
    /// Its network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cidr: Option<String>,
    /// The number of blocks that fit into the pool; `None` if it is too large.
    #[serde(skip)]
    pub(crate) places: Option<u64>,
    /// Its blocks.
    pub(crate) blocks: Vec<Drawn>,
}

/// A block.
#[derive(Debug, Serialize)]
pub(crate) struct Drawn {
    /// The block.
    pub(crate) cidr: String,
    /// The node or other owner of the block; empty if there is none.
    pub(crate) owner: String,
    /// Addresses in use, borrowed ones too.
    pub(crate) in_use: usize,
    /// Addresses in use by other nodes than the owner.
    pub(crate) borrowed: usize,
    /// Released addresses in cooldown.
    pub(crate) in_cooldown: usize,
    /// Reserved addresses that are not in use.
    pub(crate) reserved: usize,
    /// Addresses that can be assigned.
    pub(crate) free: usize,
    /// A sign for each address.
    pub(crate) addresses: String,
    #[serde(skip)]
    uses: Vec<AddressUse>,
    #[serde(skip)]
    net: IpNet,
}

/// The sections to draw: these pools, or all pools and the blocks that are in no pool.
pub(crate) fn sections(census: Census, pools: &[String]) -> Vec<Section> {
    let wanted = |name: &str, cidr: IpNet| {
        pools.is_empty() || pools.iter().any(|pool| pool == name || *pool == cidr.to_string())
    };
    let mut sections: Vec<Section> = Vec::new();
    for pool in census.pools.into_iter().filter(|pool| wanted(pool.pool.name(), pool.pool.cidr())) {
        let bits = u32::from(pool.pool.block_size().saturating_sub(pool.pool.cidr().prefix_len()));
        sections.push(Section {
            pool: Some(printable(pool.pool.name())),
            cidr: Some(pool.pool.cidr().to_string()),
            places: 1_u64.checked_shl(bits).filter(|_| bits < 40),
            blocks: pool.blocks.into_iter().map(Drawn::new).collect(),
        });
    }
    if pools.is_empty() && !census.orphaned.is_empty() {
        let blocks = census.orphaned.into_iter().map(Drawn::new).collect();
        sections.push(Section { pool: None, cidr: None, places: None, blocks });
    }
    sections
}

impl Drawn {
    fn new(block: BlockCensus) -> Self {
        let count = |wanted| block.count(wanted);
        let borrowed = count(AddressUse::Borrowed);
        Self {
            cidr: block.cidr.to_string(),
            owner: match &block.owner {
                Some(owner) if owner.node().is_some() => printable(owner.node().unwrap_or_default()),
                Some(other) => printable(&other.to_string()),
                None => String::new(),
            },
            in_use: count(AddressUse::Used) + borrowed,
            borrowed,
            in_cooldown: count(AddressUse::InCooldown),
            reserved: count(AddressUse::Reserved),
            free: count(AddressUse::Free),
            addresses: block.uses.iter().map(|found| cells::sign(*found)).collect(),
            net: block.cidr,
            uses: block.uses,
        }
    }

    /// The tenths of the block that cannot be assigned; 10 only if no address can be assigned, and 0 only if all can.
    fn tenths(&self) -> usize {
        let all = self.uses.len();
        let gone = all - self.free;
        match gone {
            0 => 0,
            gone if gone == all => 10,
            gone => (gone * 10 / all).clamp(1, 9),
        }
    }

    /// The numbers of the block in words.
    fn reported(&self) -> String {
        let owner = if self.owner.is_empty() { "nobody's" } else { &self.owner };
        let mut reported = format!("{} ({owner}): {} of {} in use", self.cidr, self.in_use, self.uses.len());
        for (count, what) in
            [(self.borrowed, "borrowed"), (self.in_cooldown, "in cooldown"), (self.reserved, "reserved")]
        {
            if count > 0 {
                reported.push_str(&format!(", {count} {what}"));
            }
        }
        reported
    }
}

impl Section {
    /// True if there is a sign for each address.
    fn in_detail(&self, detail: Detail) -> bool {
        match detail {
            Detail::Auto => self.blocks.len() <= MOST_BLOCKS_IN_DETAIL,
            Detail::Addresses => true,
            Detail::Blocks => false,
        }
    }

    /// The heading: the pool and its numbers.
    fn heading(&self) -> String {
        let sum = |of: fn(&Drawn) -> usize| self.blocks.iter().map(of).sum::<usize>();
        let name = match (&self.pool, &self.cidr) {
            (Some(pool), Some(cidr)) => format!("{pool}  {cidr}"),
            _ => "in no pool".to_owned(),
        };
        let claimed = self.blocks.len();
        let blocks = match self.places {
            Some(places) => format!("{claimed} of {places} blocks claimed"),
            None if claimed == 1 => "1 block".to_owned(),
            None => format!("{claimed} blocks"),
        };
        let mut heading = format!("{name}  {blocks}");
        if claimed > 0 {
            heading.push_str(&format!(": {} in use", sum(|block| block.in_use)));
            for (count, what) in [
                (sum(|block| block.borrowed), "of them borrowed"),
                (sum(|block| block.in_cooldown), "in cooldown"),
                (sum(|block| block.reserved), "reserved"),
                (sum(|block| block.free), "free"),
            ] {
                if count > 0 {
                    heading.push_str(&format!(", {count} {what}"));
                }
            }
        }
        heading
    }
}
