//! The reasons for which a block refuses a request.

use std::net::IpAddr;

use ipnet::IpNet;

use super::MAX_BLOCK_ADDRESSES;

/// A network that cannot be a block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableBlock {
    /// It has more than [`MAX_BLOCK_ADDRESSES`].
    #[error("block {0} has more than {MAX_BLOCK_ADDRESSES} addresses: give its pool a longer block size")]
    TooLarge(IpNet),
    /// It has no address beside those that the host keeps for itself.
    #[error("block {0} is too small for what its host keeps for itself")]
    NothingLeft(IpNet),
}

/// The address is held already, or in cooldown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("resource already exists: {0} with error: Address already assigned in block")]
pub struct AlreadyAssigned(pub IpAddr);

/// With strict affinity, the block is not the requesting owner's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotOwner {
    /// It has another owner.
    #[error("Block host affinity does not match")]
    Other,
    /// It has no owner.
    #[error("Attempt to assign from block {0} with no affinity")]
    Nobody(IpNet),
}
