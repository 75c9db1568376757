//! Lists the recorded calls for which Margay has a better outcome than Calico, with the expected outcomes.

use serde_json::{Value, json};

use super::Expected;

/// A recorded call for which Margay is expected to have a better outcome than Calico.
pub(crate) struct Deviation {
    pub(crate) case: &'static str,
    /// The index of the call's step in the recorded case.
    pub(crate) step: usize,
    _why: &'static str,
    /// Replaces a recorded outcome with the outcome that Margay should have, which depends on the store's state before
    /// the call.
    pub(crate) better: fn(&mut Expected, &Value),
}

const NO_HANDLE: &str = "Calico fails until the pod object is gone: nothing is held under the machine's handle";
const STALE: &str = "Calico fails for ever: a handle that counts what no block has";
const LEAK: &str = "Calico leaks the address: the pod object was gone before DEL";
const SWITCH: &str = "Calico leaks the address: the switch was changed between ADD and DEL";
const BOTH: &str = "Calico makes a target that was promoted both owners, and clears one of them";
const FAMILY: &str = "Calico ignores the second family of an annotation";
const POOL: &str = "Calico does not touch owners in a pool that is disabled or deleted";
const SILENT: &str = "Calico waits for ever";
const PANIC: &str = "Calico panics";
const UNASKED: &str = "no pool asks for the namespace's labels";

pub(crate) const DEVIATIONS: &[Deviation] = &[
    Deviation { case: "delete-vm", step: 3, _why: NO_HANDLE, better: succeeds },
    Deviation { case: "delete-stopped-vm", step: 3, _why: LEAK, better: |it, _| it.frees("10.65.0.208") },
    Deviation {
        case: "migration-source-deleted-first",
        step: 4,
        _why: BOTH,
        better: |it, _| it.clears("10.65.0.208", "alternate"),
    },
    Deviation { case: "migration-source-deleted-first", step: 6, _why: BOTH, better: |it, _| it.frees("10.65.0.208") },
    Deviation { case: "migration-fails", step: 6, _why: LEAK, better: |it, _| it.clears("10.65.0.208", "alternate") },
    Deviation { case: "migration-without-address", step: 1, _why: NO_HANDLE, better: succeeds },
    Deviation {
        case: "migration-without-address",
        step: 6,
        _why: NO_HANDLE,
        better: |it, before| {
            succeeds(it, before);
            it.frees("10.65.0.208");
        },
    },
    Deviation { case: "persistence-disabled", step: 6, _why: LEAK, better: |it, _| it.frees("10.65.0.209") },
    Deviation { case: "persistence-switched", step: 3, _why: SWITCH, better: |it, _| it.frees("10.65.0.208") },
    Deviation { case: "persistence-switched", step: 6, _why: SWITCH, better: |it, _| it.frees("10.65.0.209") },
    Deviation { case: "not-a-vm", step: 18, _why: LEAK, better: |it, _| it.frees("10.65.0.209") },
    Deviation { case: "objects-missing", step: 3, _why: LEAK, better: |it, _| it.clears("10.65.0.208", "attributes") },
    Deviation {
        case: "api-refuses",
        step: 20,
        _why: UNASKED,
        better: |it, _| {
            it.answers(&["10.65.0.209/29"]);
            it.holds("10.65.0.209", "net1.vmi.shop.till", "10.65.0.208/29", &pod("shop", "till-aaaaa", "till"));
        },
    },
    Deviation { case: "api-refuses", step: 31, _why: SILENT, better: gives_up },
    Deviation { case: "api-refuses", step: 32, _why: SILENT, better: gives_up },
    Deviation { case: "requested-address", step: 1, _why: NO_HANDLE, better: succeeds },
    Deviation {
        case: "requested-address",
        step: 10,
        _why: FAMILY,
        better: |it, _| {
            it.answers(&["fd80:24e2:f998:72d6::21/128"]);
            let till = pod("shop", "till-aaaaa", "till");
            it.holds("fd80:24e2:f998:72d6::21", "net1.vmi.shop.till", "fd80:24e2:f998:72d6::20/125", &till);
        },
    },
    Deviation { case: "pool-gone", step: 2, _why: POOL, better: |it, _| it.answers(&["10.65.0.208/32"]) },
    Deviation { case: "pool-gone", step: 3, _why: POOL, better: |it, _| it.clears("10.65.0.208", "attributes") },
    Deviation { case: "pool-gone", step: 6, _why: POOL, better: |it, _| it.clears("10.65.0.208", "attributes") },
    Deviation {
        case: "long-names",
        step: 0,
        _why: PANIC,
        better: |it, _| {
            it.answers(&["10.65.0.208/29"]);
            let (space, name) = ("k".repeat(63), "k".repeat(63));
            let handle = "net1.vmi._Vhmos_BDDQHT13lWE5PRcSTxvcWoCG7u34_T2ZHmEVY";
            it.holds("10.65.0.208", handle, "10.65.0.208/29", &pod(&space, "long", &name));
        },
    },
    Deviation { case: "long-names", step: 1, _why: PANIC, better: succeeds },
    Deviation {
        case: "stale-handle",
        step: 1,
        _why: STALE,
        better: |it, _| {
            it.answers(&["10.65.0.208/29"]);
            it.state["handles"] = json!({});
            it.holds("10.65.0.208", "net1.vmi.shop.cart", "10.65.0.208/29", &pod("shop", "cart-aaaaa", "cart"));
        },
    },
    Deviation {
        case: "stale-handle",
        step: 2,
        _why: STALE,
        better: |it, _| {
            it.answers(&["10.66.0.9/32"]);
            it.state["handles"] = json!({});
            it.holds("10.66.0.9", "net1.vmi.shop.cart", "10.66.0.8/29", &pod("shop", "cart-aaaaa", "cart"));
        },
    },
    Deviation { case: "stale-handle", step: 3, _why: STALE, better: |it, _| it.state["handles"] = json!({}) },
    Deviation { case: "stale-handle", step: 5, _why: STALE, better: |it, _| it.state["handles"] = json!({}) },
    Deviation {
        case: "main-plugin",
        step: 5,
        _why: FAMILY,
        better: |it, _| {
            let answer = |address: &str| json!({"exit": 0, "stdout": {"cniVersion": "1.0.0", "ips": [{"address": address}], "routes": [{"dst": address}]}});
            // The third IPAM call of the recorded main plugin is a DEL, because the ADDs failed in the recording.
            let nothing = json!({"exit": 0, "stdout": null});
            it.said = json!([answer("10.66.0.9/32"), answer("fd80:24e2:f998:72d6::21/128"), nothing]);
            let (handle, six) = ("net1.vmi.shop.till", "fd80:24e2:f998:72d6::21");
            it.holds(six, handle, "fd80:24e2:f998:72d6::20/125", &json!({}));
        },
    },
];

/// Returns the address attributes of a virtual machine's only pod, on node1.
fn pod(namespace: &str, pod: &str, machine: &str) -> Value {
    json!({"namespace": namespace, "node": "node1", "pod": format!("virt-launcher-{pod}"), "vmi-name": machine,
        "vm-uid": "aaaaaaaa-0000-4000-8000-000000000001", "vmi-uid": "bbbbbbbb-0000-4000-8000-000000000001"})
}

fn succeeds(it: &mut Expected, _: &Value) {
    (it.exit, it.said) = (0, Value::Null);
}

fn gives_up(it: &mut Expected, _: &Value) {
    it.exit = 1;
    it.said = json!({"code": 999, "msg": "failed to get VMI info: <api> gave no answer in 5.0 s"});
}

impl Expected {
    /// Changes the expected outcome to a successful ADD with the given addresses.
    fn answers(&mut self, addresses: &[&str]) {
        let ips: Vec<Value> = addresses.iter().map(|address| json!({"address": address})).collect();
        let routes: Vec<Value> = addresses.iter().map(|address| json!({"dst": address})).collect();
        self.exit = 0;
        self.said = json!({"cniVersion": "1.0.0", "ips": ips, "routes": routes});
    }

    /// Changes the expected state of the store: the address is free, and its handle is deleted.
    fn frees(&mut self, address: &str) {
        let gone = self.state["addresses"].as_object_mut().unwrap().remove(address).unwrap();
        self.state["handles"].as_object_mut().unwrap().remove(gone["handle"].as_str().unwrap()).unwrap();
    }

    /// Removes from the expected store state the address attributes in the field `owner`.
    fn clears(&mut self, address: &str, owner: &str) {
        let holder = self.state["addresses"][address].as_object_mut().unwrap();
        let gone = holder.remove(owner).unwrap();
        assert!(!gone.as_object().unwrap().is_empty());
        if owner == "attributes" {
            holder.insert(owner.to_owned(), json!({}));
        }
    }

    /// Sets in the expected store state that the handle holds the address in the given block, and that the address has
    /// the attributes `owner`.
    fn holds(&mut self, address: &str, handle: &str, block: &str, owner: &Value) {
        self.state["addresses"][address] = json!({"handle": handle, "attributes": owner});
        self.state["handles"][handle][block] = 1.into();
    }
}
