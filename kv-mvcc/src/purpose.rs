//! The purposes of writes, and the room that a store keeps for one of them.

use std::fmt::Debug;

use kv::ErrorKind;

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
    /// The advice for a user, if there is no room for that.
    fn restore(&self) -> Result<(), String>;

    /// Checks that the disk can be written to and has room for a usual commit besides.
    ///
    /// # Errors
    /// The kind of error that a commit would have, and the advice for a user.
    fn check_room(&self) -> Result<(), (ErrorKind, String)>;

    /// Gives up a part. False if there was nothing left.
    fn give_up(&self) -> bool;
}
