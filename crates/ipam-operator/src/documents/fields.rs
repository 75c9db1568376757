//! The order in which calicoctl prints the fields of documents that are only shown.

/// The fields of an endpoint's spec, of its floating addresses and of its ports.
pub(super) const ENDPOINT: [&str; 22] = [
    "orchestrator",
    "workload",
    "node",
    "containerID",
    "pod",
    "endpoint",
    "serviceAccountName",
    "ipNetworks",
    "ipNATs",
    "internalIP",
    "externalIP",
    "ipv4Gateway",
    "ipv6Gateway",
    "profiles",
    "interfaceName",
    "mac",
    "ports",
    "protocol",
    "port",
    "hostPort",
    "hostIP",
    "allowSpoofedSourcePrefixes",
];

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
