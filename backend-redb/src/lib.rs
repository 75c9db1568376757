//! The table on redb.
