//! Wrappers.
