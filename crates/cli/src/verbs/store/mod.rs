//! The verbs that look after a store as a whole.

mod backup;
mod compact;
mod create;
mod restore;
mod status;
mod upgrade;
mod verify;

pub(super) use status::Status;
pub(super) use verify::Verify;
