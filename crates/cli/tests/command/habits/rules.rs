//! Tests every rule that a document must satisfy, and the error text for each rule.

use crate::common::Lab;
use crate::habits::files::{document, pool, stored, with_file};

#[test]
fn rules_of_new_pool_are_all_checked() {
    let lab = &Lab::each()[1];
    lab.margay("pool create other 10.1.0.0/16").answer();
    lab.margay("pool create odd 10.2.0.0/16 --block-size 28").answer();
    // The store contains a block that remains from a deleted pool with another block size.
    let owner = ipam_core::model::Owner::host("node1");
    let soon = || kv::Deadline::after(crate::common::TEST_TIMEOUT);
    lab.with_ipam(async |ipam| ipam.claim_affinity(&owner, "10.2.0.0/28".parse().unwrap(), soon()).await.unwrap());
    let key = kv::Key::from("/calico/resources/v3/projectcalico.org/ippools/odd");
    lab.with_ipam(async |ipam| {
        kv::StoreExt::delete(&**ipam.store(), kv::Range::Key(key.clone())).await.map(drop).unwrap();
    });
    let before = stored(lab);

    let many = |lines: &str| format!("  cidr: 10.3.0.0/16\n{lines}");
    for (spec, expected) in [
        ("  natOutgoing: true\n".to_owned(), "IPPool.CIDR = '' (IPPool CIDR must be specified)"),
        ("  cidr: 10.3.0.0\n".to_owned(), "IPPool.CIDR = '10.3.0.0' (IPPool CIDR must be a valid subnet)"),
        ("  cidr: 10.3.0.1/16\n".to_owned(), "IPPool.CIDR = '10.3.0.1/16' (IP pool CIDR is not strictly masked)"),
        ("  cidr: 10.1.5.0/24\n".to_owned(), "IPPool(new) CIDR overlaps with IPPool(other) CIDR 10.1.0.0/16)"),
        ("  cidr: 10.0.0.0/8\n".to_owned(), "IPPool(new) CIDR overlaps with IPPool(other) CIDR 10.1.0.0/16)"),
        ("  cidr: 169.254.7.0/24\n".to_owned(), "overlaps with IPv4 Link Local range 169.254.0.0/16)"),
        ("  cidr: fe80::/64\n".to_owned(), "overlaps with IPv6 Link Local range fe80::/10)"),
        (many("  blockSize: 19\n"), "IPPool.BlockSize = '19' (block size must be between 20 and 32)"),
        (many("  blockSize: 33\n"), "IPPool.BlockSize = '33' (block size must be between 20 and 32)"),
        ("  cidr: fd00::/64\n  blockSize: 115\n".to_owned(), "(block size must be between 116 and 128)"),
        (many("  blockSize: 300\n"), "IPPool.BlockSize = '300' (block size must be between 20 and 32)"),
        ("  cidr: 10.3.0.0/28\n".to_owned(), "IPPool.CIDR = '10.3.0.0/28' (IP pool size is too small"),
        ("  cidr: fd00::/64\n  ipipMode: Always\n".to_owned(), "(IPIP is not supported on an IPv6 IP pool)"),
        (many("  ipipMode: Always\n  vxlanMode: Always\n"), "(Cannot enable both VXLAN and IPIP on the same IPPool)"),
        (many("  ipipMode: Perhaps\n"), "IPPool.IPIPMode = 'Perhaps' (must be one of Never, Always, CrossSubnet)"),
        (
            many("  allowedUses: [LoadBalancer, Workload]\n"),
            "IPPool.AllowedUses = 'LoadBalancer,Workload' (LoadBalancer cannot be used at the same time as: Workload)",
        ),
        (
            many("  allowedUses: [LoadBalancer]\n  ipipMode: Always\n"),
            "IPPool.IPIPMode = 'Always' (Neither IPIPMode nor VXLANMode can be enabled on AllowedUses LoadBalancer IP pool)",
        ),
        (
            many("  allowedUses: [LoadBalancer]\n  vxlanMode: CrossSubnet\n"),
            "IPPool.IPIPMode = 'CrossSubnet' (Neither IPIPMode nor VXLANMode can be enabled",
        ),
        (
            many("  allowedUses: [LoadBalancer]\n  disableBGPExport: true\n"),
            "(IP Pool with AllowedUse LoadBalancer must have DisableBGPExport set to false)",
        ),
        (
            many("  allowedUses: [LoadBalancer]\n  nodeSelector: has(a)\n"),
            "'has(a)' (IP Pool with AllowedUse LoadBalancer must have node selector set to all())",
        ),
        (
            many("  namespaceSelector: has(a)\n"),
            "IPPool.NamespaceSelector = 'has(a)' (IP Pool with AllowedUse Tunnel must not have a namespace selector; set allowedUses to Workload)",
        ),
        (many("  allowedUses: [Pods]\n"), "(must be a list of Workload, Tunnel and LoadBalancer)"),
        (many("  assignmentMode: Sometimes\n"), "IPPool.AssignmentMode = 'Sometimes'"),
        (many("  nodeSelector: global()\n"), "IPPool.NodeSelector = 'global()' (global() is not allowed here)"),
        (many("  nodeSelector: rack ==\n"), "IPPool.NodeSelector = 'rack =='"),
        (many("  namespaceSelector: \"!\"\n"), "IPPool.NamespaceSelector = '!'"),
        (many("  disabled: \"yes\"\n"), "IPPool.Disabled = '\"yes\"' (must be true or false)"),
        (many("  colour: red\n"), "unknown field \"spec.colour\""),
        ("  cidr: 10.2.0.0/16\n".to_owned(), "(block 10.2.0.0/28 of another size exists inside)"),
    ] {
        let said = with_file(lab, "create", &document("IPPool", "new", &spec)).failure();
        assert!(
            said.starts_with("error: failed to create 'IPPool' resource: [") && said.contains(expected),
            "{spec}{said}"
        );
    }
    for name in ["A", "a_b", "-a", "a..b"] {
        let said = with_file(lab, "create", &pool(&format!("\"{name}\""), "10.3.0.0/16")).failure();
        assert!(said.contains(&format!("error with field Metadata.Name = '{name}' (a name has only a-z")), "{said}");
    }
    let versioned = pool("new\n  resourceVersion: \"7\"", "10.3.0.0/16");
    let said = with_file(lab, "create", &versioned).failure();
    assert!(said.contains("Metadata.ResourceVersion = '7' (field must not be set for a Create request)"), "{said}");
    assert_eq!(stored(lab), before);
    with_file(lab, "create", &document("IPPool", "new", "  cidr: 10.2.0.0/16\n  blockSize: 28\n")).answer();
}

#[test]
fn rules_of_changes_and_other_kinds_are_all_checked() {
    let lab = &Lab::each()[1];
    lab.margay("pool create main 10.1.0.0/16").answer();
    with_file(lab, "create", &document("IPPool", "lb", "  cidr: 10.2.0.0/24\n  allowedUses: [LoadBalancer]\n"))
        .answer();
    let before = stored(lab);
    for (kind, name, spec, expected) in [
        ("IPPool", "main", "  cidr: 10.9.0.0/16\n", "IPPool.CIDR = '10.9.0.0/16' (IPPool CIDR cannot be modified)"),
        ("IPPool", "main", "  cidr: 10.1.0.0/16\n  blockSize: 27\n", "'27' (IPPool BlockSize cannot be modified)"),
        ("IPPool", "main", "  cidr: 10.1.0.0/16\n  nodeSelector: global()\n", "global() is not allowed here"),
        ("IPPool", "main", "  cidr: 10.1.0.0/16\n  namespaceSelector: has(a)\n", "must not have a namespace selector"),
        (
            "IPPool",
            "lb",
            "  cidr: 10.2.0.0/24\n  allowedUses: [LoadBalancer]\n  nodeSelector: has(a)\n",
            "must have node selector set to all()",
        ),
        (
            "IPPool",
            "lb",
            "  cidr: 10.2.0.0/24\n",
            "allowed use cannot be changed from LoadBalancer to Workload or Tunnel",
        ),
        (
            "IPReservation",
            "r",
            "  reservedCIDRs: [10.0.0.0/33]\n",
            "'10.0.0.0/33' (is neither a network nor an address)",
        ),
        ("IPReservation", "r", "  reservedCIDRs: 10.0.0.0/24\n", "must be a list of networks and addresses"),
        ("IPReservation", "r", "  cidrs: [10.0.0.0/24]\n", "unknown field \"spec.cidrs\""),
        ("Node", "n", "  rack: a\n", "unknown field \"spec.rack\""),
        ("IPAMConfiguration", "other", "  {}\n", "Metadata.Name = 'other' (the settings are named default)"),
        (
            "IPAMConfiguration",
            "default",
            "  maxBlocksPerHost: 2\n",
            "MaxBlocksPerHost requires StrictAffinity to be enabled",
        ),
        ("IPAMConfiguration", "default", "  ipCooldownSeconds: 1201\n", "(must be a number from 0 to 1200)"),
        (
            "IPAMConfiguration",
            "default",
            "  strictAffinity: true\n  maxBlocksPerHost: 1000001\n",
            "(must be a number from 0 to 1000000)",
        ),
        ("IPAMConfiguration", "default", "  autoAllocateBlocks: false\n", "Cannot disable 'StrictAffinity' and"),
        ("IPAMConfiguration", "default", "  strictAffinity: 1\n", "strictAffinity = '1' (must be true or false)"),
    ] {
        let said = with_file(lab, "apply", &document(kind, name, spec)).failure();
        assert!(
            said.contains(&format!("failed to apply '{kind}' resource: [")) && said.contains(expected),
            "{spec}{said}"
        );
    }
    assert_eq!(stored(lab), before);
}
