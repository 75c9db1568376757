//! The table on sled.
