//! Why a store is written to, and the room that it keeps for one of the reasons.

use std::fmt::Debug;

/// The purpose of the writes through a store or a handle to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// Any write.
    #[default]
    Any,
    /// A release. On a full disk the store drops history and the reserve to make room for it.
    Release,
}

/// Room that a store keeps on its disk for releases.
pub trait Reserve: Debug + Send + Sync {
    /// Puts back what was given up.
    ///
    /// # Errors
    /// What is missing, and what to do about it, if there is no room for that.
    fn restore(&self) -> Result<(), String>;

    /// Looks whether there is room on the disk for a usual commit besides.
    ///
    /// # Errors
    /// What is missing, and what to do about it.
    fn check_room(&self) -> Result<(), String>;

    /// Gives up a part. False if there was nothing left.
    fn give_up(&self) -> bool;
}
