//! Tests `get`, `create`, `apply`, `replace` and `delete` on embedded stores.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::common::{Lab, margay};
use crate::habits::files::{document, pool, put, resource, stored, with_file};

#[test]
fn document_of_pool_from_create_to_delete() {
    for lab in Lab::each() {
        let spec = "  cidr: 10.65.0.0/16\n  natOutgoing: true\n  nodeSelector: \"!has(gpu)\"\n";
        let made = with_file(&lab, "create", &document("IPPool", "main", spec)).answer();
        assert_eq!(made, "Successfully created 1 'IPPool' resource(s)\n");
        assert_eq!(
            lab.margay("get ippool").answer(),
            "NAME   CIDR           SELECTOR    \nmain   10.65.0.0/16   !has(gpu)   \n\n"
        );
        assert_eq!(
            lab.margay("get POOLS main -o wide").answer(),
            "\
NAME   CIDR           NAT    IPIPMODE   VXLANMODE   DISABLED   DISABLEBGPEXPORT   SELECTOR    ASSIGNMENTMODE   \n\
main   10.65.0.0/16   true   Never      Never       false      false              !has(gpu)   Automatic        \n\n"
        );
        let stored = resource(&lab, "ippools", "main");
        let (uid, time) = (&stored["metadata"]["uid"], &stored["metadata"]["creationTimestamp"]);
        let shown = lab.margay("get ippool main -o yaml").answer();
        let version = shown.lines().find_map(|line| line.trim().strip_prefix("resourceVersion: ")).unwrap();
        assert_eq!(
            shown,
            format!(
                "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata:\n  creationTimestamp: {time}\n  name: main\n  \
                 resourceVersion: {version}\n  uid: {}\nspec:\n  allowedUses:\n  - Workload\n  - Tunnel\n  assignmentMode: \
                 Automatic\n  blockSize: 26\n  cidr: 10.65.0.0/16\n  ipipMode: Never\n  natOutgoing: true\n  nodeSelector: \
                 '!has(gpu)'\n  vxlanMode: Never\n",
                uid.as_str().unwrap()
            )
        );
        let list = lab.margay("get ippools -o json").answer();
        assert!(list.starts_with("{\n  \"kind\": \"IPPoolList\",\n  \"apiVersion\": \"projectcalico.org/v3\",\n  \"metadata\": {\n    \"resourceVersion\": "), "{list}");
        let list: Value = serde_json::from_str(&list).unwrap();
        assert_eq!(list["items"][0]["metadata"]["name"], "main");

        // A document that was read from the store can be written back only once, because the write changes the stored
        // resource version.
        let changed = shown.replace("natOutgoing: true", "disabled: true");
        assert_eq!(with_file(&lab, "replace", &changed).answer(), "Successfully replaced 1 'IPPool' resource(s)\n");
        let now = resource(&lab, "ippools", "main");
        assert_eq!((&now["metadata"], &now["spec"]["disabled"]), (&stored["metadata"], &json!(true)));
        assert!(now["spec"].get("natOutgoing").is_none());
        let stale = with_file(&lab, "apply", &shown).failure();
        assert!(
            stale.starts_with("error: failed to apply 'IPPool' resource: [update conflict: IPPool(main)]\nhint: "),
            "{stale}"
        );
        let stale = with_file(&lab, "delete", &shown).failure();
        assert!(stale.contains("failed to delete 'IPPool' resource: [update conflict: IPPool(main)]"), "{stale}");

        let again = with_file(&lab, "create", &pool("main", "10.65.0.0/16")).failure();
        assert!(
            again.starts_with(
                "error: failed to create 'IPPool' resource: [resource already exists: IPPool(main)]\nhint: "
            ),
            "{again}"
        );
        let skipped = with_file(&lab, "create --skip-exists", &pool("main", "10.65.0.0/16")).answer();
        assert_eq!(skipped, "Successfully created 1 'IPPool' resource(s)\n");
        assert_eq!(resource(&lab, "ippools", "main"), now);

        assert_eq!(lab.margay("delete ippool main").answer(), "Successfully deleted 1 'IPPool' resource(s)\n");
        let gone = lab.margay("delete ippool main").failure();
        assert!(
            gone.contains("[resource does not exist: IPPool(main) with error: <nil>]\nhint: list the existing"),
            "{gone}"
        );
        assert_eq!(lab.margay("delete ippool main -s").answer(), "Successfully deleted 1 'IPPool' resource(s)\n");
        let gone = with_file(&lab, "replace", &pool("main", "10.65.0.0/16")).failure();
        assert!(gone.contains("failed to replace 'IPPool' resource: [resource does not exist: IPPool(main)"), "{gone}");
        assert_eq!(lab.margay("get ipp").answer(), "NAME   CIDR   SELECTOR   \n\n");
    }
}

#[test]
fn documents_get_takes_what_calicoctl_scripts_pass() {
    for lab in Lab::each() {
        with_file(&lab, "create", &pool("main", "10.65.0.0/16")).answer();
        let plain = lab.margay("get ippool main").answer();
        for options in ["-n shop", "--namespace=shop", "-A", "-a", "--all-namespaces", "--export"] {
            assert_eq!(lab.margay(&format!("get ippool main {options}")).answer(), plain, "{options}");
        }
        // An exported document can be created in another store. With a name, `--export` omits the fields that belong to
        // one store; without a name, as in calicoctl, `get` prints all stored fields.
        let exported = lab.margay("get ippool main --export -o yaml").answer();
        assert!(exported.contains("\nmetadata:\n  name: main\nspec:\n"), "{exported}");
        lab.margay("delete ippool main").answer();
        with_file(&lab, "create", &exported).answer();
        let list = lab.margay("get ippool --export -o yaml").answer();
        assert!(list.contains("uid: "), "{list}");
        let empty = lab.folder().join("empty.yaml");
        fs::write(&empty, "").unwrap();
        let from_file = format!("get -f {}", empty.display());
        assert!(lab.margay(&from_file).failure().contains("No resources specified"));
        assert_eq!(lab.margay(&format!("{from_file} --skip-empty")).answer(), "");
        assert_eq!(lab.margay(&format!("{from_file} --skip-empty -o json")).answer(), "[]\n");
    }
}

#[test]
fn document_change_keeps_what_document_cannot_say() {
    for lab in Lab::each() {
        lab.margay("pool create lab 10.70.0.0/24 --gateway 10.70.0.1").answer();
        let key = "/calico/resources/v3/projectcalico.org/ippools/old";
        let old = r#"{"kind":"IPPool","apiVersion":"projectcalico.org/v3","later":{"a":1},"metadata":{"name":"old","uid":"u",
            "creationTimestamp":null,"labels":{"l":"1"},"annotations":{"note":"x","margay.io/x":"y"},"strange":1},
            "spec":{"cidr":"10.1.0.0/16","blockSize":28,"natOutgoing":true,"newer":[1]},"status":{"conditions":[]}}"#;
        put(&lab, key, old);
        with_file(&lab, "apply", &pool("old", "10.1.0.0/16")).answer();
        assert_eq!(
            resource(&lab, "ippools", "old"),
            json!({"kind": "IPPool", "apiVersion": "projectcalico.org/v3", "later": {"a": 1}, "metadata": {"name": "old",
                "uid": "u", "creationTimestamp": null, "annotations": {"margay.io/x": "y"}, "strange": 1},
                "spec": {"cidr": "10.1.0.0/16", "blockSize": 28, "newer": [1], "ipipMode": "Never", "vxlanMode": "Never",
                    "nodeSelector": "all()", "allowedUses": ["Workload", "Tunnel"], "assignmentMode": "Automatic"},
                "status": {"conditions": []}})
        );
        // A document that `get` has shown can be written back, even with unknown fields; a misspelt field is refused.
        let shown = lab.margay("get pool old -o json").answer();
        let revision = |lab: &Lab| lab.margay("get pools -o json").json()["metadata"]["resourceVersion"].clone();
        let before = revision(&lab);
        assert_eq!(with_file(&lab, "replace", &shown).answer(), "Successfully replaced 1 'IPPool' resource(s)\n");
        assert_eq!(revision(&lab), before, "an unchanged document was written");
        let slip =
            with_file(&lab, "apply", &document("IPPool", "old", "  cidr: 10.1.0.0/16\n  blocksize: 28\n")).failure();
        assert!(slip.contains("unknown field \"spec.blocksize\""), "{slip}");

        // The reservation of a bridged network's pool records the gateway in an annotation, which `apply` must keep.
        with_file(&lab, "apply", &document("IPReservation", "margay-bridge-lab", "  reservedCIDRs: [10.70.0.0/30]\n"))
            .answer();
        assert_eq!(lab.margay("pool list -o json").json()["pools"][0]["gateway"], "10.70.0.1");
    }
}

#[test]
fn documents_of_nodes_reservations_and_settings() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16 --node-selector rack=='a'").answer();
        let node = "apiVersion: projectcalico.org/v3\nkind: Node\nmetadata:\n  name: node1\n  labels: {rack: a}\nspec:\n  bgp: \
                    {ipv4Address: 10.0.0.1/24}\n";
        let made = with_file(&lab, "create", node);
        assert_eq!((made.code, made.out.as_str()), (0, "Successfully created 1 'Node' resource(s)\n"));
        assert!(
            made.err.starts_with("note: from now on this store gives addresses to registered nodes only"),
            "{}",
            made.err
        );
        assert!(lab.assign("net", "c1").starts_with("10.65."));
        assert_eq!(lab.margay("get nodes").answer(), "NAME    \nnode1   \n\n");
        assert_eq!(
            lab.margay("get no -o wide").answer(),
            "NAME    ASN       IPV4          IPV6   \nnode1   (64512)   10.0.0.1/24          \n\n"
        );
        let bare = document("Node", "node1", "  orchRefs: []\n");
        assert_eq!(with_file(&lab, "apply", &bare).answer(), "Successfully applied 1 'Node' resource(s)\n");
        assert!(resource(&lab, "nodes", "node1")["metadata"].get("labels").is_none());

        let text = document("IPReservation", "r", "  reservedCIDRs:\n  - 10.65.0.0/30\n  - 10.65.1.1\n");
        with_file(&lab, "create", &text).answer();
        assert_eq!(lab.margay("get ipreservations").answer(), "NAME   \nr      \n\n");
        assert_eq!(
            lab.margay("get reservation r -o wide").answer(),
            "NAME   CIDRS                    \nr      10.65.0.0/30,10.65.1.1   \n\n"
        );

        assert_eq!(
            lab.margay("get ipamconfig -o wide").answer(),
            "NAME      STRICTAFFINITY   AUTOALLOCATEBLOCKS   MAXBLOCKSPERHOST   \ndefault   false            true                 0                  \n\n"
        );
        assert!(!stored(&lab).contains_key("/calico/ipam/v2/config"), "reading stores nothing");
        let text = document("IPAMConfiguration", "default", "  strictAffinity: true\n  maxBlocksPerHost: 4\n");
        assert_eq!(
            with_file(&lab, "create", &text).answer(),
            "Successfully created 1 'IPAMConfiguration' resource(s)\n"
        );
        assert_eq!(
            stored(&lab)["/calico/ipam/v2/config"],
            r#"{"strict_affinity":true,"auto_allocate_blocks":true,"maxBlocksPerHost":4,"kubeVirtVMAddressPersistence":"Enabled"}"#
        );
        let shown = lab.margay("get ipamconfig default -o yaml").answer();
        assert!(shown.contains("\n  maxBlocksPerHost: 4\n  strictAffinity: true\n"), "{shown}");
        lab.margay("delete ipamconfig default").answer();
        assert!(!stored(&lab).contains_key("/calico/ipam/v2/config"));

        assert_eq!(lab.margay("delete node node1").answer(), "Successfully deleted 1 'Node' resource(s)\n");
        assert!(!stored(&lab).keys().any(|key| key.contains("/nodes/")));
    }
}

#[test]
fn documents_from_several_files() {
    for lab in Lab::each() {
        let folder = lab.folder().join("all");
        fs::create_dir_all(folder.join("below")).unwrap();
        fs::write(folder.join("a.yaml"), format!("---\n{}---\n{}", pool("a", "10.1.0.0/16"), pool("b", "10.2.0.0/16")))
            .unwrap();
        let list = json!({"kind": "IPPoolList", "apiVersion": "projectcalico.org/v3", "items": [
            {"metadata": {"name": "c"}, "spec": {"cidr": "10.3.0.0/16"}}]});
        fs::write(folder.join("b.json"), list.to_string()).unwrap();
        fs::write(folder.join("c.txt"), "no document").unwrap();
        fs::write(folder.join("below/d.yml"), document("Node", "n", "  {}\n")).unwrap();
        let path = folder.display();
        assert_eq!(lab.margay(&format!("apply -f {path}")).answer(), "Successfully applied 3 'IPPool' resource(s)\n");
        let all = lab.margay(&format!("apply -R -f {path}"));
        assert_eq!(all.out, "Successfully applied 4 resource(s)\n");
        let names = lab.margay("get pools").answer();
        assert_eq!(
            names.lines().filter_map(|line| line.split(' ').next()).collect::<Vec<_>>(),
            ["NAME", "a", "b", "c", ""]
        );

        // `get` with several names prints each existing document separately, and reports the missing documents last.
        let some = lab.margay("get pools b x a");
        assert_eq!(
            (some.code, some.out.as_str()),
            (
                1,
                "NAME   CIDR          SELECTOR   \nb      10.2.0.0/16   all()      \n\nNAME   CIDR          SELECTOR   \na      10.1.0.0/16   all()      \n\n"
            )
        );
        assert!(
            some.err.starts_with("error: resource does not exist: IPPool(x) with error: <nil>\nhint: "),
            "{}",
            some.err
        );
        assert_eq!(lab.margay("get pools b a -o json").json().as_array().unwrap().len(), 2);

        let text = format!("{}---\n{}", pool("d", "10.4.0.0/16"), pool("e", "10.4.0.0/24"));
        let partly = with_file(&lab, "create", &text);
        assert_eq!(
            (partly.code, partly.out.as_str()),
            (1, "Partial success: created 1 out of 2 'IPPool' resources:\n")
        );
        assert!(
            partly.err.starts_with("error: hit error: [error with field IPPool.CIDR = '10.4.0.0/24' (IPPool(e) CIDR"),
            "{}",
            partly.err
        );
        let deleted = lab.margay(&format!("delete -f {path} -o json")).json();
        assert_eq!((deleted["deleted"].as_array().unwrap().len(), &deleted["failed"]), (3, &json!([])));
    }
}

#[test]
fn documents_dry_run_checks_everything_and_writes_nothing() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16").answer();
        let before = stored(&lab);
        let said = with_file(&lab, "create --dry-run", &pool("b", "10.2.0.0/16")).answer();
        assert_eq!(said, "Dry run: would have created 1 'IPPool' resource(s)\n");
        let both = format!("{}---\n{}", pool("b", "10.2.0.0/16"), pool("c", "10.2.0.0/24"));
        let said = with_file(&lab, "apply --dry-run", &both);
        assert_eq!((said.code, said.out.as_str()), (1, "Dry run: would have applied 1 out of 2 'IPPool' resources:\n"));
        assert!(said.err.contains("overlaps with IPPool(b)"), "{}", said.err);
        let twice = format!("{}---\n{}", pool("b", "10.2.0.0/16"), pool("b", "10.2.0.0/16"));
        let said = with_file(&lab, "create --dry-run", &twice);
        assert!(said.err.contains("resource already exists: IPPool(b)"), "{}", said.err);
        let said = with_file(&lab, "replace --dry-run", &pool("main", "10.66.0.0/16")).failure();
        assert!(said.contains("IPPool CIDR cannot be modified"), "{said}");
        assert_eq!(
            lab.margay("delete pool main --dry-run").answer(),
            "Dry run: would have deleted 1 'IPPool' resource(s)\n"
        );
        assert_eq!(lab.margay("pool delete main --dry-run").answer(), "Dry run: would delete pool main\n");
        lab.margay("ipam configure --strictaffinity=true --dry-run").answer();
        lab.margay("ipam split 4 --name main --dry-run").answer();
        assert_eq!(stored(&lab), before);
        lab.assign("net", "c1");
        let refused = lab.margay("delete pool main --dry-run").failure();
        assert!(refused.contains("still has 1 address in use"), "{refused}");
    }
}

#[test]
fn documents_make_store_only_for_pool_that_can_be_made() {
    for lab in Lab::each() {
        for (args, text) in [
            ("create", pool("main", "10.65.0.1/16")),
            ("replace", pool("main", "10.65.0.0/16")),
            ("apply", document("Node", "n", "  {}\n")),
        ] {
            let refused = with_file(&lab, args, &text).failure();
            assert!(refused.starts_with("error: there is no store at "), "{args}: {refused}");
            assert!(!lab.exists());
        }
        let tried = with_file(&lab, "create --dry-run", &pool("main", "10.65.0.0/16")).answer();
        assert!(tried.starts_with("Dry run: would have created 1 ") && !lab.exists(), "{tried}");
        with_file(&lab, "apply", &pool("main", "10.65.0.0/16")).answer();
        assert!(lab.exists());
    }
}

#[test]
fn documents_error_is_one_line_when_unreadable() {
    let lab = &Lab::each()[1];
    lab.margay("pool create main 10.65.0.0/16").answer();
    for (text, reason) in [
        ("", "No resources specified"),
        ("---\n---\n", "No resources specified"),
        ("a: [1\n", "cannot understand "),
        ("kind: \"\u{1b}[2J\"\napiVersion: projectcalico.org/v3\n", "\\u{1b}"),
        (
            "kind: NetworkPolicy\n",
            "kind 'NetworkPolicy' is none that Margay keeps: IPPool, IPReservation, Node, IPAMConfiguration, \
             WorkloadEndpoint, Profile",
        ),
        ("kind: IPPool\napiVersion: v1\n", "must be projectcalico.org/v3"),
        (
            "kind: IPPool\napiVersion: projectcalico.org/v3\nmetadata: {name: 7}\n",
            "name must be a text, and is 7: put it in quotes",
        ),
    ] {
        let said = with_file(lab, "apply", text).failure();
        assert!(said.starts_with("error: ") && said.contains(reason) && said.contains("\nhint: "), "{text:?}: {said}");
        assert!(said.lines().count() == 2 && !said.contains('\u{1b}'), "{text:?}: {said}");
    }
    let said = lab.margay("apply -f /nowhere/pool.yaml").failure();
    assert!(said.starts_with("error: cannot read /nowhere/pool.yaml: No such file"), "{said}");
    for (args, reason) in [
        ("get policies", "not ippool, ipreservation, node, ipamconfig, workloadendpoint or profile"),
        ("get", "required"),
        ("get pool -f x", "cannot be used with"),
        ("delete pool", "resource name must be specified"),
        ("create", "--filename"),
    ] {
        let said = lab.margay(args).failure();
        assert!(said.contains(reason), "{args}: {said}");
    }
    assert!(margay(["get", "--help"]).answer().lines().count() <= 50);
}

#[test]
fn documents_come_from_standard_input() {
    use std::io::Write;
    let lab = &Lab::each()[1];
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &lab.location.to_string(), "apply", "-f", "-"]).env_clear();
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(pool("main", "10.65.0.0/16").as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "Successfully applied 1 'IPPool' resource(s)\n");
}

#[test]
fn answers_can_all_be_yaml() {
    let lab = &Lab::each()[1];
    lab.margay("pool create main 10.65.0.0/16").answer();
    let text = lab.margay("pool list -o yaml").answer();
    assert!(
        text.starts_with("pools:\n- assignment_mode: Automatic\n  block_size: 26\n  cidr: 10.65.0.0/16\n"),
        "{text}"
    );
    assert_eq!(lab.margay("pool list -o wide").answer(), lab.margay("pool list -o ps").answer());
}
