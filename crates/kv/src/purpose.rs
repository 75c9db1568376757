//! The purposes of writes.

/// The purpose of the writes through a store or a handle to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Purpose {
    /// Any write.
    #[default]
    Any,
    /// A release. On a full disk an embedded store drops history, and room that it keeps for that.
    Release,
}
