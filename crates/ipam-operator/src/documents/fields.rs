//! The order in which calicoctl prints the fields of documents that are only shown.

/// The fields of a profile's spec, of its rules and of what a rule is about.
pub(super) const PROFILE: [&str; 11] = [
    "ingress",
    "egress",
    "labelsToApply",
    "action",
    "ipVersion",
    "nets",
    "selector",
    "notNets",
    "notSelector",
    "source",
    "destination",
];
