//! Tests of CNI verbs for pods of virtual machines, in cases that the recording does not cover.

use std::collections::BTreeMap;

use agent::CheckAnswer;
use cni_plugin::{PluginName, ProcessOutcome};
use ipam_core::{CheckResult, Standing};
use serde_json::{Value, json};

use super::api::{Api, Content};
use crate::common::{Scripted, call, environment, error_of};

const POD: &str = "virt-launcher-cart-aaaaa";
const CALICO: &str = r#"{"cniVersion":"1.0.0","name":"net1","type":"calico","datastore_type":"sled"}"#;

fn launcher(verb: &str) -> BTreeMap<String, String> {
    let mut env = environment(verb);
    env.insert("CNI_ARGS".into(), format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={POD}"));
    env
}

fn willing() -> Scripted {
    Scripted { add: Some(Ok(Vec::new())), del: Some(Ok(())), ..Scripted::default() }
}

#[test]
fn kubevirt_launcher_is_plain_pod_on_other_networks() {
    let allocator = willing();
    let conf = CALICO.replace("calico", "bridge");
    for verb in ["ADD", "DEL"] {
        let outcome = call(PluginName::Margay, &launcher(verb), conf.as_bytes(), &allocator);
        assert_eq!(outcome.exit, 0, "{outcome:?}");
    }
    assert_eq!((allocator.added.borrow().len(), &allocator.added.borrow()[0].vm), (1, &None));
    assert_eq!((allocator.deleted.borrow().len(), &allocator.deleted.borrow()[0].vm), (1, &None));
}

/// Tests that DEL releases the container's own address even if the Kubernetes API cannot be reached.
#[test]
fn kubevirt_launcher_is_refused_and_released_without_api() {
    let allocator = willing();
    for verb in ["ADD", "DEL"] {
        let (code, text, details) = error_of(&call(PluginName::Margay, &launcher(verb), CALICO.as_bytes(), &allocator));
        assert_eq!(code, 999);
        assert!(text.starts_with("failed to get VMI info: invalid configuration: no configuration"), "{text}");
        assert!(details.contains("kubernetes.kubeconfig"), "{details}");
    }
    assert!(allocator.added.borrow().is_empty());
    assert_eq!((allocator.deleted.borrow().len(), &allocator.deleted.borrow()[0].vm), (1, &None));
}

#[test]
fn kubevirt_check_takes_machine_address_for_its_pods() {
    let check = |env: &BTreeMap<String, String>, standing: Standing| -> ProcessOutcome {
        let standings = vec![("10.0.0.5".parse().unwrap(), standing)];
        let compared = CheckAnswer::Compared(CheckResult { held: Vec::new(), standings });
        call(PluginName::Margay, env, CALICO.as_bytes(), &Scripted { check: Some(Ok(compared)), ..Scripted::default() })
    };
    let machines = || Standing::Another("net1.vmi.shop.cart".into());
    assert_eq!(check(&launcher("CHECK"), machines()).exit, 0);
    assert_eq!(check(&launcher("CHECK"), Standing::Another("net1.c2".into())).exit, 1);
    assert_eq!(check(&launcher("CHECK"), Standing::Free).exit, 1);
    assert_eq!(check(&environment("CHECK"), machines()).exit, 1, "no pod");
}

#[test]
fn kubevirt_call_ends_whatever_api_says() {
    let api = Api::start();
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = super::write_kubeconfig(folder.path(), &api.url);
    let mut conf: Value = serde_json::from_str(CALICO).unwrap();
    conf["kubernetes"] = json!({"kubeconfig": kubeconfig});
    let owner = |name: &str| {
        json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": name,
        "uid": "u", "controller": true}])
    };
    let odd = [
        json!(null),
        json!([]),
        json!("x"),
        json!({"metadata": []}),
        json!({"metadata": {"ownerReferences": {}}}),
        json!({"metadata": {"ownerReferences": [5, null, []]}}),
        json!({"metadata": {"ownerReferences": owner("../../../secrets/x")}}),
        json!({"metadata": {"ownerReferences": owner("x".repeat(5000).as_str())}}),
        json!({"metadata": {"ownerReferences": owner("cart"), "labels": "x"}}),
    ];
    for object in odd {
        let mut content = Content::default();
        content.objects.insert(format!("/api/v1/namespaces/shop/pods/{POD}"), object.clone());
        api.set(content);
        for verb in ["ADD", "DEL"] {
            let outcome = call(PluginName::Margay, &launcher(verb), conf.to_string().as_bytes(), &willing());
            if outcome.exit != 0 {
                let (code, text, _) = error_of(&outcome);
                assert_eq!(code, 999, "{object}");
                assert!(text.starts_with("failed to get VMI info: "), "{object}: {text}");
            }
        }
    }
}
