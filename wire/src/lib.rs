//! The private socket of `margay serve`.
