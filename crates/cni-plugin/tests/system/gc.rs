//! Tests of addresses that are released without DEL: leftovers of an earlier boot when a pool is full, and addresses
//! that the CNI verb GC releases.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::timestamps::go_string;
use serde_json::{Value, json};
use time::{Duration, OffsetDateTime};

use crate::lab::{ENGINES, Engine, Lab};
use crate::process::Call;

const EARLIER: &str = "0badcafe";

trait Collected {
    /// Returns a test store with a pool that a bridge network has already used, so that the gateway address is
    /// reserved.
    fn bridged(engine: Engine, cidr: &str) -> Self;

    /// Assigns an address to a container of the test network, with an assignment time in the past.
    fn plant(&self, container: &str, boot: &str, ago: Duration) -> IpAddr;

    fn gc(&self, valid: &Value) -> Call;

    fn addresses(&self) -> BTreeSet<IpAddr>;
}

impl Collected for Lab {
    fn bridged(engine: Engine, cidr: &str) -> Self {
        let lab = Self::with_pool(engine, cidr);
        lab.add("first").ok();
        lab.del("first").ok();
        lab
    }

    fn plant(&self, container: &str, boot: &str, ago: Duration) -> IpAddr {
        let attachment = Attachment {
            network: "net1".into(),
            container: container.into(),
            interface: "eth0".into(),
            node: "node-1".into(),
            boot: Some(boot.into()),
        };
        let mut request = AssignRequest::new(attachment, RequestedAddresses::any(1, 0));
        let at = go_string(OffsetDateTime::now_utc() - ago);
        request.attributes = BTreeMap::from([("timestamp".to_owned(), at)]);
        self.assign(&request)
    }

    fn gc(&self, valid: &Value) -> Call {
        let mut conf = self.conf_of("bridge");
        conf["cniVersion"] = "1.1.0".into();
        conf["cni.dev/valid-attachments"] = valid.clone();
        Call::new("GC", "unused", &conf).without("CNI_CONTAINERID").without("CNI_NETNS").without("CNI_IFNAME")
    }

    fn addresses(&self) -> BTreeSet<IpAddr> {
        self.books().held.into_keys().collect()
    }
}

#[test]
fn add_without_room_takes_leftovers_of_earlier_boot() {
    for engine in ENGINES {
        let lab = Lab::bridged(engine, "198.18.96.0/29");
        let old: Vec<IpAddr> =
            (0..4).map(|number| lab.plant(&format!("old{number}"), EARLIER, Duration::hours(1))).collect();
        let mut given = BTreeSet::new();
        // Of the pool's eight addresses, three are reserved for the bridge network and one is free.
        for number in 0..3 {
            let outcome = lab.add(&format!("new{number}")).ok();
            assert!(given.insert(outcome.address()));
        }
        let left: Vec<&IpAddr> = old.iter().filter(|address| lab.books().held.contains_key(address)).collect();
        assert!(left.len() < old.len(), "{engine:?}: {left:?}");
        assert!(given.is_subset(&lab.addresses()));
        // When all addresses were assigned in the current boot, an ADD cannot release any of them.
        let mut refused = None;
        for number in 3..8 {
            let outcome = lab.add(&format!("new{number}")).run();
            if outcome.exit != 0 {
                refused = Some(outcome);
                break;
            }
            assert!(given.insert(outcome.address()), "given twice");
        }
        refused.unwrap().refusal().says(&["No IPs available in pools"]);
        assert_eq!(lab.addresses(), given);
    }
}

#[test]
fn adds_at_once_on_full_pool_get_one_address_each() {
    for engine in ENGINES {
        let lab = Lab::bridged(engine, "198.18.97.0/28");
        for number in 0..13 {
            lab.plant(&format!("old{number}"), EARLIER, Duration::hours(1));
        }
        let given: BTreeSet<IpAddr> = thread::scope(|scope| {
            let lab = &lab;
            let calls: Vec<_> =
                (0..8).map(|number| scope.spawn(move || lab.add(&format!("new{number}")).ok().address())).collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        });
        assert_eq!(given.len(), 8, "an address was given twice");
        assert!(given.is_subset(&lab.addresses()));
    }
}

/// Tests `podman start` after a reboot: the container and its fixed address are unchanged, but the network namespace is
/// new.
#[test]
fn fixed_address_is_given_again_after_reboot() {
    for engine in ENGINES {
        let lab = Lab::bridged(engine, "198.18.98.0/24");
        let address = lab.plant("c1", EARLIER, Duration::hours(1));
        let add = lab.add("c1").with("CNI_NETNS", "/run/netns/a-new-one");
        let add = add.with("CNI_ARGS", &format!("IgnoreUnknown=1;IP={address}"));
        assert_eq!(add.ok().address(), address);
        let boot = lab.attribute(address, "margay.io/boot");
        assert!(host::boot_id().unwrap().starts_with(&boot), "{boot} is not this boot");
        assert_eq!(lab.add("c1").ok().address(), address, "also without naming it");
    }
}

/// A process in a network namespace of its own; dropping the value ends the process and the network namespace.
struct Namespace(Child);

impl Namespace {
    fn new() -> Self {
        let namespace = Self(Command::new("unshare").args(["--net", "sleep", "600"]).spawn().unwrap());
        let own = host::network_namespace(Path::new("/proc/self/ns/net"));
        let is_made = || namespace.name().is_some() && namespace.name() != own;
        let made = (0..200).any(|_| {
            thread::sleep(std::time::Duration::from_millis(20));
            is_made()
        });
        assert!(made, "this test needs root");
        namespace
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    fn name(&self) -> Option<String> {
        host::network_namespace(Path::new(&self.path()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn netns_is_recorded_anew_when_container_restarts() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "198.18.90.0/24");
        let namespaces = [Namespace::new(), Namespace::new()];
        for namespace in &namespaces {
            let address = lab.add("c1").with("CNI_NETNS", &namespace.path()).ok().address();
            assert_eq!(Some(lab.attribute(address, "margay.io/netns")), namespace.name());
            assert_eq!(lab.addresses().len(), 1, "the same container keeps its address");
        }
    }
}

#[test]
fn gc_frees_what_list_lacks() {
    for engine in ENGINES {
        let lab = Lab::bridged(engine, "198.18.99.0/24");
        let old = Duration::minutes(5);
        let (kept, gone) = (lab.plant("kept", EARLIER, old), lab.plant("gone", EARLIER, old));
        let (young, ahead) = (lab.plant("young", EARLIER, Duration::seconds(5)), lab.plant("ahead", EARLIER, -old));
        let list = json!([{"containerID": "kept", "ifname": "eth0"}, {"containerID": "other", "ifname": "eth0"}]);
        let mut foreign = lab.conf_of("bridge");
        foreign["name"] = "net2".into();
        let other = Call::new("ADD", "gone", &foreign).ok().address();
        assert_eq!(lab.gc(&list).ok().stdout, "");
        assert_eq!(lab.addresses(), [kept, young, ahead, other].into(), "{gone}");
        lab.gc(&list).ok();
        // If the list of valid attachments is missing or invalid, GC releases nothing; if it is empty, GC releases all
        // addresses of the network that are older than a minute.
        for wrong in [Value::Null, json!({}), json!([{"containerID": "kept"}])] {
            let refusal = lab.gc(&wrong).run().refusal();
            assert_eq!(refusal.code, 7);
            refusal.says(&["nothing was released"]);
        }
        assert_eq!(lab.addresses().len(), 4);
        lab.gc(&json!([])).ok();
        assert_eq!(lab.addresses(), [young, ahead, other].into());
    }
}

#[test]
fn gc_is_done_and_makes_nothing_when_store_is_missing() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        lab.gc(&json!([])).ok();
        assert!(!lab.store.exists());
    }
}
