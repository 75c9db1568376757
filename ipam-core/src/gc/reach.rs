//! Reading what a node holds without reading the whole cluster.
//!
//! A node's own blocks are found by its affinities. In blocks of others it holds something only where it borrowed, or
//! where it lost an affinity; which blocks those are is remembered outside (see [`Hints::held`](crate::hints::Hints)) and
//! handed in. So a look costs the same in a cluster of any size. The rest is found by a pass through all
//! blocks, by their keys first: only those are read that were written since the last pass.

use std::collections::BTreeSet;

use ipnet::IpNet;
use kv::{Content, Deadline, Key, Kv, Pages, Range, Revision, TxnRange};

use super::Holdings;
use crate::boxed;
use crate::error::Result;
use crate::ipam::{Ipam, Nodes, transact};
use crate::model::{Block, Document, Owner, keys};
use crate::usage::{in_time, reread};

/// How many blocks are read in one request.
const AT_ONCE: usize = 32;

/// The part of a cluster's store that is read to find the addresses of a node. A store of one machine is read as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Blocks in which the node may hold something, besides those that it has an affinity to.
    pub blocks: BTreeSet<IpNet>,
    /// Whether all other blocks are gone through, too.
    pub pass: Pass,
}

/// Whether all blocks are gone through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pass {
    /// They are not.
    #[default]
    None,
    /// Those are that were written after this revision; unset for all. In a store that is behind this revision, all are.
    Since(Revision),
}

impl Reach {
    /// The node's own blocks and these.
    pub fn near(blocks: impl IntoIterator<Item = IpNet>) -> Self {
        Self { blocks: blocks.into_iter().map(|cidr| cidr.trunc()).collect(), pass: Pass::None }
    }
}

impl Ipam {
    /// The blocks that are read to find the addresses of a node: its own, and those that are remembered.
    pub fn reach_of(&self, node: &str) -> Reach {
        Reach::near(self.hints().map(|hints| hints.held(node)).unwrap_or_default())
    }

    /// The addresses that a node holds as far as they are in reach, and for a pass the revision up to which all blocks were gone through.
    /// Blocks are read as they are now, a few dozen in a request; nothing that is freed because of it depends on that they
    /// are of one revision.
    ///
    /// # Errors
    /// Those of the store. Damaged blocks are passed over, and the log says so.
    #[boxed]
    pub async fn holdings_within(
        &self,
        node: &str,
        reach: &Reach,
        deadline: Deadline,
    ) -> Result<(Holdings, Option<Revision>)> {
        if self.nodes() == Nodes::FirstSeen {
            return Ok((self.holdings(node, deadline).await?, None));
        }
        let mut holdings = Holdings { node: node.to_owned(), ..Holdings::default() };
        let revision = self.read_near(node, reach, deadline, |block| holdings.add(&block)).await?;
        Ok((holdings, matches!(reach.pass, Pass::Since(_)).then_some(revision)))
    }

    /// Shows each well-formed block in reach of a node of a cluster, once, and returns the revision from which on the blocks
    /// are.
    pub(crate) async fn read_near(
        &self,
        node: &str,
        reach: &Reach,
        deadline: Deadline,
        mut see: impl FnMut(Block) + Send,
    ) -> Result<Revision> {
        let prefixes = Owner::all_of(node).into_iter().filter_map(|owner| keys::affinities_prefix(&owner, None));
        let affinities: Vec<Range> = prefixes.map(Range::Prefix).collect();
        let (own, mut revision) = transact!(self, deadline, |tx| {
            tx.prefetch(Vec::new(), affinities.iter().cloned().map(TxnRange::keys_of).collect()).await?;
            let mut own = BTreeSet::new();
            for range in &affinities {
                let affine = tx.snapshot_keys(range).await?;
                own.extend(affine.iter().filter_map(keys::parse_affinity).map(|(_, cidr)| cidr));
            }
            Ok((own, tx.revision()))
        })?;
        let near: BTreeSet<IpNet> = own.into_iter().chain(reach.blocks.iter().copied()).collect();
        self.scan_blocks(near.iter().copied().collect(), deadline, &mut see).await?;
        if let Pass::Since(since) = reach.pass {
            revision = self.pass(since, &near, deadline, &mut see).await?;
        }
        Ok(revision)
    }

    /// Shows blocks as they are now.
    async fn scan_blocks(
        &self,
        blocks: Vec<IpNet>,
        deadline: Deadline,
        see: &mut (impl FnMut(Block) + Send),
    ) -> Result<()> {
        for some in blocks.chunks(AT_ONCE) {
            let names: Vec<Key> = some.iter().map(|cidr| keys::block(*cidr)).collect();
            let found = transact!(self, deadline, |tx| Ok(tx.peek(&names, Content::Full).await?))?;
            found.iter().flatten().filter_map(decode).for_each(&mut *see);
            in_time(deadline)?;
        }
        Ok(())
    }

    /// Goes through all blocks but those that were seen, and returns the revision at which it did.
    async fn pass(
        &self,
        since: Revision,
        seen: &BTreeSet<IpNet>,
        deadline: Deadline,
        see: &mut (impl FnMut(Block) + Send),
    ) -> Result<Revision> {
        let (written, at) = reread(|| self.written_since(since, seen, deadline)).await?;
        self.scan_blocks(written, deadline, see).await?;
        Ok(at)
    }

    /// Which blocks were written after a revision, by their keys.
    async fn written_since(
        &self,
        since: Revision,
        seen: &BTreeSet<IpNet>,
        deadline: Deadline,
    ) -> kv::Result<(Vec<IpNet>, Revision)> {
        let mut pages = Pages::new(Range::Prefix(keys::blocks_prefix(None)), Revision::UNSET);
        pages = pages.with_content(Content::KeysOnly);
        let mut written = Vec::new();
        while let Some(page) = pages.next(&**self.store()).await? {
            let is_behind = pages.revision() < since;
            let is_new = |kv: &&Kv| is_behind || kv.mod_revision > since;
            let new = page.iter().filter(is_new).filter_map(|kv| keys::parse_block(&kv.key));
            written.extend(new.filter(|cidr| !seen.contains(cidr)));
            in_time(deadline)?;
        }
        Ok((written, pages.revision()))
    }
}

fn decode(kv: &Kv) -> Option<Block> {
    match Block::decode(&kv.key, kv.value.as_bytes()) {
        Ok(block) => Some(block),
        Err(error) => {
            tracing::warn!(%error, "passing over a damaged block");
            None
        }
    }
}
