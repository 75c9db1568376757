//! Tests `ipam configure`, `ipam show --show-configuration` and `ipam show --show-borrowed`.

use ipam_core::assign::{HandleRequest, RequestedAddresses};
use ipam_core::model::Owner;
use kv::Deadline;
use serde_json::json;

use crate::common::{Lab, TEST_TIMEOUT};
use crate::habits::files::{document, put, stored, with_file};

#[test]
fn settings_are_set_and_shown() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16").answer();
        let shown = "\
+------------------------------+---------+
| PROPERTY                     | VALUE   |
+------------------------------+---------+
| StrictAffinity               | false   |
| AutoAllocateBlocks           | true    |
| MaxBlocksPerHost             | 0       |
| KubeVirtVMAddressPersistence | Enabled |
| IPCooldownSeconds            | 0       |
+------------------------------+---------+
";
        assert_eq!(lab.margay("ipam show --show-configuration").answer(), shown);
        put(&lab, "/calico/ipam/v2/config", r#"{"auto_allocate_blocks":true,"later":[1]}"#);
        assert_eq!(
            lab.margay("ipam configure --strictaffinity=true --max-blocks-per-host=4").answer(),
            "Successfully set StrictAffinity to: true\nSuccessfully set MaxBlocksPerHost to: 4\n"
        );
        assert_eq!(
            lab.margay("ipam configure --kubevirt-ip-persistence=Disabled --ip-cooldown-seconds=60").answer(),
            "Successfully set KubeVirtVMAddressPersistence to: Disabled\nSuccessfully set IPCooldownSeconds to: 60\n"
        );
        assert_eq!(
            stored(&lab)["/calico/ipam/v2/config"],
            r#"{"strict_affinity":true,"auto_allocate_blocks":true,"maxBlocksPerHost":4,"kubeVirtVMAddressPersistence":"Disabled","ipCooldownSeconds":60,"later":[1]}"#
        );
        assert_eq!(
            lab.margay("ipam show --show-configuration -o json").json(),
            json!({"strict_affinity": true, "auto_allocate_blocks": true, "max_blocks_per_host": 4,
                "kubevirt_ip_persistence": "Disabled", "ip_cooldown_seconds": 60})
        );
        let before = stored(&lab);
        for dry_run in ["", " --dry-run"] {
            let refused = lab.margay(&format!("ipam configure --strictaffinity=false{dry_run}")).failure();
            assert!(
                refused.starts_with("error: MaxBlocksPerHost requires StrictAffinity to be enabled\nhint: "),
                "{refused}"
            );
        }
        assert_eq!(
            lab.margay("ipam configure --max-blocks-per-host=0 --dry-run").answer(),
            "Dry run: would set MaxBlocksPerHost to: 0\n"
        );
        for args in [
            "ipam configure",
            "ipam configure --strictaffinity=maybe",
            "ipam configure --max-blocks-per-host=-1",
            "ipam configure --strictaffinity=true --max-blocks-per-host=1000001",
            "ipam configure --ip-cooldown-seconds=5001",
            "ipam configure --kubevirt-ip-persistence=enabled",
            "ipam show --show-configuration --show-borrowed",
        ] {
            lab.margay(args).failure();
        }
        assert_eq!(stored(&lab), before);
        for args in [
            "ipam configure --strictaffinity=true --max-blocks-per-host=1000000 --dry-run",
            "ipam configure --ip-cooldown-seconds=5000 --dry-run",
            // Scripts for calicoctl pass `--allow-version-mismatch` in any position.
            "--allow-version-mismatch ipam configure --ip-cooldown-seconds=1 --dry-run",
            "ipam --allow-version-mismatch configure --ip-cooldown-seconds=1 --dry-run",
            "ipam configure --ip-cooldown-seconds=1 --dry-run --allow-version-mismatch",
        ] {
            lab.margay(args).answer();
        }
        for args in ["ipam show", "ipam check", "get ippool", "get nodes"] {
            assert_eq!(
                lab.margay(&format!("{args} --allow-version-mismatch")).answer(),
                lab.margay(args).answer(),
                "{args}"
            );
        }
    }
}

#[test]
fn settings_show_borrowed_addresses() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/30 --block-size 30").answer();
        let nodes = format!("{}---\n{}", document("Node", "a", "  {}\n"), document("Node", "b", "  {}\n"));
        assert_eq!(with_file(&lab, "create", &nodes).code, 0);
        let give = |node: &str, handle: &str| {
            let attributes = [("node", node), ("pod", "web"), ("namespace", "default")];
            let attributes = attributes.map(|(name, value)| (name.to_owned(), value.to_owned()));
            let request = HandleRequest::new(handle, Owner::host(node), RequestedAddresses::any(1, 0))
                .with_attributes(attributes.into());
            lab.with_ipam(async |ipam| ipam.assign_to_handle(&request, Deadline::after(TEST_TIMEOUT)).await.unwrap())[0]
                .ip
        };
        give("a", "h1");
        let empty = lab.margay("ipam show --show-borrowed").answer();
        assert_eq!(empty.lines().count(), 4, "{empty}");
        let ip = give("b", "h2").to_string();
        assert_eq!(
            lab.margay("ipam show --show-borrowed -o json").json(),
            json!({"addresses": [{"ip": ip, "node": "b", "block": "10.65.0.0/30", "block_owner": "a", "kind": "pod",
                "allocated_to": "default/web"}], "without_node": 0})
        );
        let table = lab.margay("ipam show --show-borrowed").answer();
        assert!(table.contains("| b              | 10.65.0.0/30 | a           | pod  | default/web  |"), "{table}");
    }
}
