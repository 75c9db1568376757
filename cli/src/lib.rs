//! The operator command margay.
