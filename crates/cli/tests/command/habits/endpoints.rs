//! Tests that workload endpoints and profiles are shown as calicoctl shows them.

use serde_json::{Value, json};

use crate::common::Lab;
use crate::habits::files::{document, pool, put, stored, with_file};

const ENDPOINTS: &str = "/calico/resources/v3/projectcalico.org/workloadendpoints";
const PROFILES: &str = "/calico/resources/v3/projectcalico.org/profiles";

/// Creates a store with a profile, the workload endpoint of a container and the workload endpoint of a pod.
fn filled(lab: &Lab) {
    lab.margay("pool create main 10.65.0.0/16").answer();
    let container = json!({"kind": "WorkloadEndpoint", "apiVersion": "projectcalico.org/v3",
        "metadata": {"name": "node1-cni-c1-eth0", "namespace": "default", "uid": "u1",
            "creationTimestamp": "2026-11-23T06:42:01Z"},
        "spec": {"orchestrator": "cni", "node": "node1", "containerID": "c1", "endpoint": "eth0",
            "ipNetworks": ["10.65.166.128/32"], "profiles": ["net1"], "interfaceName": "calic1",
            "mac": "3a:b6:31:a9:b7:9b"}});
    let pod = json!({"kind": "WorkloadEndpoint", "apiVersion": "projectcalico.org/v3", "later": {"a": 1},
        "metadata": {"name": "node1-k8s-pod1-eth0", "namespace": "shop", "uid": "u2",
            "creationTimestamp": "2026-11-23T06:42:02Z"},
        "spec": {"orchestrator": "k8s", "node": "node1", "containerID": "5f2d", "pod": "pod1", "endpoint": "eth0",
            "ipNetworks": ["10.66.0.128/32", "fd80::1/128"],
            "ipNATs": [{"internalIP": "10.66.0.128", "externalIP": "10.99.0.5"},
                {"internalIP": "fd80::1", "externalIP": "fd80::99"}],
            "profiles": ["kns.shop", "ksa.shop.seller"], "interfaceName": "cali8085686fbb3",
            "ports": [{"name": "http", "protocol": "TCP", "port": 8080, "hostPort": 0, "hostIP": ""}],
            "newer": [1]}});
    let profile = json!({"kind": "Profile", "apiVersion": "projectcalico.org/v3",
        "metadata": {"name": "net1", "uid": "u3", "creationTimestamp": "2026-11-23T06:42:01Z"},
        "spec": {"ingress": [{"action": "Allow", "source": {"selector": "has(net1)"}}],
            "egress": [{"action": "Allow"}], "labelsToApply": {"net1": "", "also": "x"}}});
    put(lab, &format!("{ENDPOINTS}/default/node1-cni-c1-eth0"), &container.to_string());
    put(lab, &format!("{ENDPOINTS}/shop/node1-k8s-pod1-eth0"), &pod.to_string());
    put(lab, &format!("{PROFILES}/net1"), &profile.to_string());
}

#[test]
fn endpoints_are_listed_by_namespace() {
    for lab in Lab::each() {
        filled(&lab);
        assert_eq!(
            lab.margay("get wep").answer(),
            "\
WORKLOAD   NODE    NETWORKS           INTERFACE   \n           \
           node1   10.65.166.128/32   calic1      \n\n"
        );
        let nats = format!("{:<45}", "NATS");
        assert_eq!(
            lab.margay("get workloadendpoints -n shop -o wide").answer(),
            format!(
                "\
NAMESPACE   NAME                  WORKLOAD   NODE    NETWORKS                     INTERFACE         PROFILES                   {nats}\n\
shop        node1-k8s-pod1-eth0   pod1       node1   10.66.0.128/32,fd80::1/128   cali8085686fbb3   kns.shop,ksa.shop.seller   \
{{10.66.0.128 10.99.0.5}},{{fd80::1 fd80::99}}   \n\n"
            )
        );
        assert_eq!(
            lab.margay("get weps --all-namespaces").answer(),
            "\
NAMESPACE   WORKLOAD   NODE    NETWORKS                     INTERFACE         \n\
default                node1   10.65.166.128/32             calic1            \n\
shop        pod1       node1   10.66.0.128/32,fd80::1/128   cali8085686fbb3   \n\n"
        );
        let list = lab.margay("get wep -A -o json").json();
        assert_eq!((&list["kind"], list["items"].as_array().unwrap().len()), (&json!("WorkloadEndpointList"), 2));
        assert_eq!(
            lab.margay("get wep -n sh -o json").json()["items"],
            json!([]),
            "no namespace begins another's name"
        );
        assert_eq!(lab.margay("get wep -n none").answer(), "NAMESPACE   WORKLOAD   NODE   NETWORKS   INTERFACE   \n\n");
    }
}

#[test]
fn endpoint_is_shown_whole() {
    for lab in Lab::each() {
        filled(&lab);
        let shown = lab.margay("get WEP node1-k8s-pod1-eth0 --namespace shop -o json").answer();
        let order = [
            "\"kind\"",
            "\"metadata\"",
            "\"orchestrator\"",
            "\"node\"",
            "\"containerID\"",
            "\"pod\"",
            "\"ipNetworks\"",
            "\"internalIP\"",
            "\"externalIP\"",
            "\"profiles\"",
            "\"interfaceName\"",
            "\"hostPort\"",
        ];
        let places = order.map(|field| shown.find(field).unwrap());
        assert!(places.is_sorted(), "{shown}");
        let shown: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(
            (&shown["later"], &shown["spec"]["newer"]),
            (&json!({"a": 1}), &json!([1])),
            "unknown fields are lost"
        );
        assert!(shown["metadata"]["resourceVersion"].is_string(), "{shown}");
        let yaml = lab.margay("get wep node1-cni-c1-eth0 --export -o yaml").answer();
        assert!(yaml.contains("\nmetadata:\n  name: node1-cni-c1-eth0\nspec:\n  containerID: c1\n"), "{yaml}");

        let elsewhere = lab.margay("get wep node1-k8s-pod1-eth0").failure();
        assert_eq!(
            elsewhere,
            "error: resource does not exist: WorkloadEndpoint(default/node1-k8s-pod1-eth0) with error: <nil>\n\
             hint: list the existing resources with: margay get workloadendpoint -A\n"
        );
        let all = lab.margay("get wep node1-cni-c1-eth0 -A").failure();
        assert!(all.contains("cannot use --all-namespace flag for getting a single resource"), "{all}");
        let both = lab.margay("get wep -n shop -A").failure();
        assert!(both.contains("cannot use both --namespace and --all-namespaces flags at the same time"), "{both}");

        // A document in a file names its own namespace, so `get -f` finds it without the option `-n`.
        let file = document("WorkloadEndpoint", "node1-k8s-pod1-eth0\n  namespace: shop", "  {}\n");
        let of_file = with_file(&lab, "get -o json", &file).json();
        assert_eq!(of_file["spec"]["pod"], "pod1");
        let other = with_file(&lab, "get -n default", &file).failure();
        assert!(other.contains("resource namespace does not match client namespace. shop != default"), "{other}");
        let bare = document("WorkloadEndpoint", "node1-k8s-pod1-eth0", "  {}\n");
        assert_eq!(with_file(&lab, "get -n shop -o json", &bare).json()["spec"]["pod"], "pod1");
    }
}

#[test]
fn profiles_are_shown() {
    for lab in Lab::each() {
        filled(&lab);
        assert_eq!(lab.margay("get profile").answer(), "NAME   \nnet1   \n\n");
        assert_eq!(lab.margay("get pros -n shop -A").answer(), "NAME   \nnet1   \n\n", "they have no namespace");
        assert_eq!(lab.margay("get pro -o wide").answer(), "NAME   LABELS         \nnet1   also=x,net1=   \n\n");
        let shown = lab.margay("get profiles net1 -o yaml").answer();
        assert!(shown.contains("\nkind: Profile\n") && shown.contains("\n  ingress:\n  - action: Allow\n"), "{shown}");
        let missing = lab.margay("get profile net2").failure();
        assert!(
            missing.contains("does not exist: Profile(net2)") && missing.contains("margay get profile\n"),
            "{missing}"
        );
    }
}

#[test]
fn endpoints_are_written_by_plugin_only_and_can_be_deleted() {
    for lab in Lab::each() {
        filled(&lab);
        let before = stored(&lab);
        let endpoint = lab.margay("get wep node1-cni-c1-eth0 -o yaml").answer();
        for verb in ["create", "apply", "replace"] {
            let refused = with_file(&lab, verb, &endpoint).failure();
            let text = format!(
                "operation {verb} is not supported on WorkloadEndpoint(default/node1-cni-c1-eth0): the CNI plugin keeps it"
            );
            assert!(refused.contains(&text) && refused.contains("\nhint: "), "{refused}");
        }
        let profile = lab.margay("get profile net1 -o yaml").answer();
        let refused = with_file(&lab, "apply", &profile).failure();
        assert!(refused.contains("operation apply is not supported on Profile(net1)"), "{refused}");
        let refused = lab.margay("delete profile net1").failure();
        assert!(refused.contains("operation delete is not supported on Profile(net1)"), "{refused}");
        assert_eq!(stored(&lab), before);
        // If a file also contains a workload endpoint, which `apply` refuses, the file's other documents are still
        // written.
        let both = with_file(&lab, "apply", &format!("{endpoint}---\n{}", pool("b", "10.66.0.0/16")));
        assert_eq!((both.code, both.out.as_str()), (1, "Partial success: applied 1 out of 2 resources:\n"));

        let missing = lab.margay("delete wep node1-k8s-pod1-eth0").failure();
        assert!(missing.contains("does not exist: WorkloadEndpoint(default/node1-k8s-pod1-eth0)"), "{missing}");
        let tried = lab.margay("delete wep node1-k8s-pod1-eth0 -n shop --dry-run").answer();
        assert_eq!(tried, "Dry run: would have deleted 1 'WorkloadEndpoint' resource(s)\n");
        let done = lab.margay("delete wep node1-k8s-pod1-eth0 -n shop").answer();
        assert_eq!(done, "Successfully deleted 1 'WorkloadEndpoint' resource(s)\n");
        let left: Vec<String> = stored(&lab).into_keys().filter(|key| key.starts_with(ENDPOINTS)).collect();
        assert_eq!(left, [format!("{ENDPOINTS}/default/node1-cni-c1-eth0")]);
        // A stored document that cannot be parsed can still be deleted.
        put(&lab, &left[0], "{");
        with_file(&lab, "delete", &endpoint.replace("resourceVersion", "generateName")).answer();
        assert!(!stored(&lab).contains_key(&left[0]));
    }
}
