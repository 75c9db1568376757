//! Assigns the addresses of an ADD, with a probe if one is configured. If namespace labels choose the pool, this module
//! reads the labels of the pod's namespace. On a secondary network with a configured probe, this module assigns a new
//! address only if no device on the layer-2 segment answers for it.
//!
//! The plugin itself, not the daemon, sends the probe: on the container's node, between the commit and the result of
//! the ADD. If the plugin is killed during a probe, the probed addresses stay assigned until the runtime's DEL releases
//! them.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use agent::{Add, Allocator, Check, CheckAnswer, CniError, Code, Del, Quarantine, Result, StoreAccess};
use host::ProbeResult;
use ipam_core::assign::{AssignedAddress, NamespaceLabels};
use ipam_core::attachment::{Attachment, NAMESPACE};

use crate::gojson::GoJson;
use crate::kubernetes::Kubernetes;
use crate::netconf::NetConf;

/// Carries out the ADD of one pod, with an allocator for its addresses and the Kubernetes API for the labels of its
/// namespace.
#[derive(Clone, Copy)]
pub(crate) struct Assigner<'a> {
    pub(crate) allocator: &'a dyn Allocator,
    pub(crate) kubernetes: &'a Kubernetes,
    pub(crate) namespace: &'a str,
}

impl Assigner<'_> {
    /// Assigns the addresses of an ADD. If a pool's selector needs the labels of the pod's namespace, this function
    /// adds these labels to the request. Reading the labels from the Kubernetes API counts towards the store's time
    /// limit.
    ///
    /// # Errors
    /// Any error of the allocator or of the Kubernetes API.
    pub(crate) fn assign(&self, at: &StoreAccess, add: &mut Add) -> Result<Vec<AssignedAddress>> {
        let begun = Instant::now();
        if let Some(assigned) = self.allocator.add(at, add)? {
            return Ok(assigned);
        }
        let at = at.with_time_left(begun);
        add.request.namespace_labels = self.kubernetes.labels(self.namespace, at.patience)?;
        add.request.namespace = NamespaceLabels::Known;
        let assigned = self.allocator.add(&at, add)?;
        assigned.ok_or_else(|| CniError::internal("the labels of the namespace are wanted twice"))
    }
}

/// Maximum and default time to wait for an answer to a probe, in milliseconds.
const MAX_PROBE_MILLIS: u64 = 200;
/// Maximum number of addresses that one ADD probes before the ADD fails.
const MAX_TRIES: usize = 3;
/// The default bridge of the CNI plugin `bridge`.
const DEFAULT_BRIDGE: &str = "cni0";

/// A configured probe: the network interface to send the probe on, and how long to wait for an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) interface: String,
    pub(crate) timeout: Duration,
}

impl Probe {
    /// Reads the setting `ipam.probe`; returns `None` if probes are turned off.
    ///
    /// # Errors
    /// CNI error code 7 if `ipam.probe` is invalid, or if the configuration does not tell on which interface to probe.
    pub(crate) fn from_conf(conf: &NetConf) -> Result<Option<Self>> {
        let mut timeout = MAX_PROBE_MILLIS;
        let mut interface = "";
        match &conf.ipam.probe {
            None | Some(GoJson::Bool(false)) => return Ok(None),
            Some(GoJson::Bool(true)) => {}
            Some(probe @ GoJson::Object(_)) => {
                interface = probe.text_member("interface").map_err(|_| wrong("interface must be a name"))?;
                timeout = match probe.member("timeout") {
                    None => MAX_PROBE_MILLIS,
                    Some(GoJson::Number(number)) => {
                        number.as_u64().filter(|wait| (1..=MAX_PROBE_MILLIS).contains(wait)).unwrap_or(0)
                    }
                    Some(_) => 0,
                };
            }
            Some(_) => return Err(wrong("it must be true, false, or an object with interface and timeout")),
        }
        if timeout == 0 {
            return Err(wrong(&format!("timeout must be a whole number of milliseconds from 1 to {MAX_PROBE_MILLIS}")));
        }
        let bridge = conf.bridge.as_ref().and_then(GoJson::as_str).filter(|name| !name.is_empty());
        let wire = match conf.plugin.as_str() {
            "bridge" => bridge.or(Some(DEFAULT_BRIDGE)),
            // The configuration names no interface for the probe: the containers are in a VLAN of the master interface,
            // and the machine itself has no interface in that VLAN.
            "vlan" => None,
            _ => conf.master.as_ref().and_then(GoJson::as_str),
        };
        let named = Some(interface).filter(|name| !name.is_empty()).or(wire).filter(|name| !name.is_empty());
        let interface = named.ok_or_else(|| {
            wrong("no interface of this machine is known to be on the wire of the network")
                .with_details("name the interface whose wire is probed in ipam.probe.interface")
        })?;
        Ok(Some(Self { interface: interface.to_owned(), timeout: Duration::from_millis(timeout) }))
    }

    /// Carries out an ADD, and probes the addresses that it assigns.
    ///
    /// # Errors
    /// Any error of the ADD. CNI error code 11 if other devices use all probed addresses, or use a requested address.
    pub(crate) fn add(
        &self,
        at: &StoreAccess,
        add: Add,
        old_handle: &str,
        by: &Assigner<'_>,
    ) -> Result<Vec<AssignedAddress>> {
        let ask = |addresses: &[IpAddr]| host::probe(&self.interface, addresses, self.timeout);
        ProbeRun { interface: &self.interface, ask: &ask, by, at, add, old_handle, begun: Instant::now() }.add()
    }
}

fn wrong(reason: &str) -> CniError {
    CniError::config(format!("ipam.probe: {reason}"))
}

/// The state of an ADD that probes its addresses.
struct ProbeRun<'a> {
    interface: &'a str,
    ask: &'a dyn Fn(&[IpAddr]) -> Vec<ProbeResult>,
    by: &'a Assigner<'a>,
    at: &'a StoreAccess,
    add: Add,
    old_handle: &'a str,
    begun: Instant,
}

impl ProbeRun<'_> {
    fn add(mut self) -> Result<Vec<AssignedAddress>> {
        let Some(before) = self.held() else { return self.assign() };
        let assigned = self.assign()?;
        let settled = self.settle(before.clone(), assigned);
        // Addresses that the container had before the ADD stay assigned until the container's DEL.
        if settled.is_err() && before.is_empty() {
            let (attachment, old_handle) = (self.attachment(), self.old_handle.to_owned());
            let (addresses, namespace) = (Vec::new(), self.add.request.attributes.get(NAMESPACE).cloned());
            let del = Del { attachment, old_handle, addresses, endpoint: None, namespace, vm: None };
            if let Err(error) = self.by.allocator.del(&self.time_left(), del) {
                tracing::warn!(
                    %error,
                    "the ADD failed after a probe found an address in use; the container's addresses cannot be \
                     released, and stay assigned until DEL"
                );
            }
        }
        settled
    }

    fn assign(&mut self) -> Result<Vec<AssignedAddress>> {
        self.by.assign(&self.time_left(), &mut self.add)
    }

    fn attachment(&self) -> Attachment {
        self.add.request.attachment.clone()
    }

    fn time_left(&self) -> StoreAccess {
        self.at.with_time_left(self.begun)
    }

    /// Returns the addresses that the attachment had before the ADD, which are not probed, because the container itself
    /// may answer for them. Returns `None` if the attachment's addresses cannot be read from the store.
    fn held(&self) -> Option<Vec<IpAddr>> {
        if self.at.location.path().is_some_and(|path| !path.exists()) {
            return Some(Vec::new());
        }
        let (attachment, old_handle) = (self.attachment(), self.old_handle.to_owned());
        let why = match self.by.allocator.check(self.at, Check { attachment, old_handle, addresses: Vec::new() }) {
            Ok(CheckAnswer::Compared(found)) => return Some(found.held),
            Ok(CheckAnswer::Unknown(why)) => why,
            Err(error) => error.to_string(),
        };
        tracing::warn!(
            why,
            "cannot read the container's current addresses from the store; assigning the new addresses without a \
             probe, because the container itself could answer a probe"
        );
        None
    }

    /// Probes the newly assigned addresses, and replaces each address that another device uses.
    fn settle(&mut self, mut known: Vec<IpAddr>, mut assigned: Vec<AssignedAddress>) -> Result<Vec<AssignedAddress>> {
        let mut devices = Vec::new();
        for attempt in 1..=MAX_TRIES {
            // Do not probe an assigned prefix, because a prefix is routed to its container, so no other device on the
            // layer-2 segment can use its addresses.
            let addresses = assigned.iter().filter(|assigned| assigned.prefix_length.is_none());
            let mut new: Vec<IpAddr> = addresses.map(AssignedAddress::interface_ip).collect();
            new.retain(|address| !known.contains(address));
            let found = self.foreign(&new);
            known.extend(new.iter().filter(|address| !found.iter().any(|(foreign, _)| foreign == *address)));
            if found.is_empty() {
                return Ok(assigned);
            }
            let wanted = |(address, _): &&(IpAddr, String)| self.add.request.wanted.these.contains(address);
            if let Some((address, reason)) = found.iter().find(wanted) {
                let message = format!("address {address} was requested, and a device has it: {reason}");
                return Err(CniError::new(Code::TryAgain, message)
                    .with_details("take the address away from the device, or request another one"));
            }
            devices.extend(found.iter().map(|(address, reason)| format!("{address} ({reason})")));
            self.by.allocator.quarantine(&self.time_left(), Quarantine { attachment: self.attachment(), found })?;
            if attempt < MAX_TRIES {
                assigned = self.assign()?;
            }
        }
        let message = format!("devices that no store knows have the addresses {}", devices.join(", "));
        Err(CniError::new(Code::TryAgain, message)
            .with_details("the addresses are in quarantine: margay ipam quarantine list; the next ADD tries others"))
    }

    /// Returns the addresses that other devices use, each with the reason for its quarantine. If a probe fails, the ADD
    /// continues as if no device had answered.
    fn foreign(&self, addresses: &[IpAddr]) -> Vec<(IpAddr, String)> {
        let mut found = Vec::new();
        for (address, probed) in addresses.iter().zip((self.ask)(addresses)) {
            match probed {
                ProbeResult::Silent => {}
                ProbeResult::Unable(reason) => tracing::warn!(
                    %address,
                    reason,
                    "cannot probe whether another device uses the address; assigning the address without a probe"
                ),
                ProbeResult::Answered(mac) => {
                    let device = mac.map_or_else(|| "a device".to_owned(), |mac| mac.to_string());
                    let reason = format!("{device} answered on {}", self.interface);
                    tracing::warn!(
                        %address,
                        reason,
                        "another device already uses the address; not assigning the address to the container"
                    );
                    found.push((*address, reason));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use agent::{Allocator, Answer, Verb};
    use ipam_core::CheckResult;
    use ipam_core::assign::{AssignRequest, Bridge, RequestedAddresses};
    use ipnet::IpNet;

    use super::*;
    use crate::kubernetes::Kubernetes;

    fn probe(json: &str) -> Result<Option<(String, u64)>> {
        let conf = NetConf::decode(&GoJson::parse(json.as_bytes()).unwrap()).unwrap();
        let millis = |probe: Probe| (probe.interface, u64::try_from(probe.timeout.as_millis()).unwrap());
        Probe::from_conf(&conf).map(|probe| probe.map(millis))
    }

    #[test]
    fn probe_settings_are_read() {
        let of = |json: &str| probe(json).unwrap();
        let some = |interface: &str, timeout| Some((interface.to_owned(), timeout));
        assert_eq!(of(r#"{"type":"macvlan"}"#), None);
        assert_eq!(of(r#"{"type":"ptp","ipam":{"probe":false}}"#), None, "no wire is needed for none");
        assert_eq!(of(r#"{"type":"ptp","bridge":7,"ipam":{"probe":null}}"#), None);
        assert_eq!(of(r#"{"type":"macvlan","master":"eth1","ipam":{"probe":true}}"#), some("eth1", 200));
        assert_eq!(of(r#"{"type":"bridge","bridge":"br0","ipam":{"probe":{"timeout":50}}}"#), some("br0", 50));
        assert_eq!(of(r#"{"type":"bridge","ipam":{"probe":true}}"#), some("cni0", 200));
        assert_eq!(of(r#"{"type":"ptp","ipam":{"probe":{"interface":"eth2"}}}"#), some("eth2", 200));
        assert_eq!(of(r#"{"type":"macvlan","master":"a","ipam":{"probe":{"Interface":"b"}}}"#), some("b", 200));
    }

    #[test]
    fn probe_settings_are_refused_when_malformed() {
        let cases = [
            (r#"{"type":"vlan","master":"eth1","vlanId":5,"ipam":{"probe":true}}"#, "no interface of this machine"),
            (r#"{"type":"ptp","ipam":{"probe":true}}"#, "no interface of this machine"),
            (r#"{"type":"macvlan","master":7,"ipam":{"probe":true}}"#, "no interface of this machine"),
            (r#"{"master":"a","ipam":{"probe":"eth1"}}"#, "true, false, or an object"),
            (r#"{"master":"a","ipam":{"probe":{"interface":1}}}"#, "interface must be a name"),
            (r#"{"master":"a","ipam":{"probe":{"timeout":0}}}"#, "from 1 to 200"),
            (r#"{"master":"a","ipam":{"probe":{"timeout":201}}}"#, "from 1 to 200"),
            (r#"{"master":"a","ipam":{"probe":{"timeout":"50"}}}"#, "from 1 to 200"),
            (r#"{"master":"a","ipam":{"probe":{"timeout":1.5}}}"#, "from 1 to 200"),
        ];
        for (json, text) in cases {
            let error = probe(json).unwrap_err();
            assert_eq!(error.code().number(), 7, "{json}");
            assert!(error.message().contains(text), "{json}: {error}");
        }
        assert!(probe(cases[0].0).unwrap_err().details().contains("ipam.probe.interface"));
    }

    /// A test allocator that assigns 10.0.0.1, 10.0.0.2 and so on, or the requested addresses.
    #[derive(Default)]
    struct Books {
        last: RefCell<u8>,
        held: RefCell<BTreeSet<IpAddr>>,
        quarantined: RefCell<Vec<(IpAddr, String)>>,
        is_blind: bool,
    }

    impl Books {
        fn assign(&self, wanted: &RequestedAddresses) -> Vec<AssignedAddress> {
            let mut held = self.held.borrow_mut();
            held.extend(&wanted.these);
            if held.len() < wanted.these.len() + wanted.any_v4 {
                *self.last.borrow_mut() += 1;
                held.insert(IpAddr::from([10, 0, 0, *self.last.borrow()]));
            }
            let network = |ip: &IpAddr, length| IpNet::new(*ip, length).unwrap().trunc();
            let assigned = |ip: &IpAddr| AssignedAddress {
                ip: *ip,
                prefix_length: None,
                block: network(ip, 26),
                pool: network(ip, 24),
                gateway: None,
            };
            held.iter().map(assigned).collect()
        }
    }

    impl Allocator for Books {
        fn call(&self, _: &StoreAccess, verb: &Verb) -> Result<Answer> {
            Ok(match verb {
                Verb::Add(add) => Answer::Assigned(self.assign(&add.request.wanted)),
                Verb::Del(_) => {
                    self.held.borrow_mut().clear();
                    Answer::Released(Vec::new())
                }
                Verb::Check(_) if self.is_blind => Answer::Checked(CheckAnswer::Unknown("it is locked".into())),
                Verb::Check(_) => {
                    let held = self.held.borrow().iter().copied().collect();
                    Answer::Checked(CheckAnswer::Compared(CheckResult { held, standings: Vec::new() }))
                }
                Verb::Quarantine(what) => {
                    for (ip, _) in &what.found {
                        assert!(self.held.borrow_mut().remove(ip));
                    }
                    self.quarantined.borrow_mut().extend(what.found.clone());
                    Answer::Released(Vec::new())
                }
                Verb::Status(_) | Verb::Gc(_) => panic!("no step of an ADD: {verb:?}"),
            })
        }
    }

    fn ips(last: &[u8]) -> Vec<IpAddr> {
        last.iter().map(|last| IpAddr::from([10, 0, 0, *last])).collect()
    }

    fn request(wanted: &[u8], any_v4: usize) -> Add {
        let attachment = Attachment {
            network: "net".into(),
            container: "c1".into(),
            interface: "eth0".into(),
            node: "n1".into(),
            boot: None,
        };
        let mut request = AssignRequest::new(attachment, RequestedAddresses { these: ips(wanted), any_v4, any_v6: 0 });
        request.bridge = Some(Bridge::default());
        request.into()
    }

    /// Runs an ADD on a layer-2 segment where the addresses in `devices` are already in use. Returns the result of the
    /// ADD, and the addresses that the ADD probed.
    fn add(books: &Books, add: &Add, devices: &[u8]) -> (Result<Vec<IpAddr>>, Vec<IpAddr>) {
        let probed = RefCell::new(Vec::new());
        let devices = ips(devices);
        let ask = |addresses: &[IpAddr]| {
            probed.borrow_mut().extend(addresses);
            let answer = |ip| if devices.contains(ip) { ProbeResult::Answered(None) } else { ProbeResult::Silent };
            addresses.iter().map(answer).collect()
        };
        let at = StoreAccess {
            location: stores::at("memory:").unwrap(),
            lock_file: "/none".into(),
            patience: Duration::from_secs(10),
            spent: Duration::ZERO,
        };
        let (at, add, begun) = (&at, add.clone(), Instant::now());
        let by = &Assigner { allocator: books, kubernetes: &Kubernetes::default(), namespace: "" };
        let done = ProbeRun { interface: "eth1", ask: &ask, by, at, add, old_handle: "", begun }.add();
        (done.map(|done| done.iter().map(AssignedAddress::interface_ip).collect()), probed.into_inner())
    }

    #[test]
    fn probe_replaces_address_when_device_has_it() {
        let books = Books::default();
        let (done, probed) = add(&books, &request(&[], 1), &[1, 2]);
        assert_eq!((done.unwrap(), probed), (ips(&[3]), ips(&[1, 2, 3])));
        let reason = "a device answered on eth1".to_owned();
        assert_eq!(*books.quarantined.borrow(), [(ips(&[1])[0], reason.clone()), (ips(&[2])[0], reason)]);
        // The container itself may answer a probe of an address that it already has.
        let (done, probed) = add(&books, &request(&[], 1), &[3]);
        assert_eq!((done.unwrap(), probed), (ips(&[3]), Vec::new()));
    }

    #[test]
    fn probe_repeats_only_for_new_addresses() {
        let books = Books::default();
        let (done, probed) = add(&books, &request(&[9], 1), &[1]);
        assert_eq!((done.unwrap(), probed), (ips(&[2, 9]), ips(&[1, 9, 2])));
    }

    #[test]
    fn probe_gives_up_when_devices_are_everywhere() {
        let books = Books::default();
        let (done, _) = add(&books, &request(&[], 1), &[1, 2, 3, 4]);
        let error = done.unwrap_err();
        assert_eq!(error.code(), Code::TryAgain);
        assert!(error.message().ends_with("10.0.0.3 (a device answered on eth1)"), "{error}");
        assert!(books.held.borrow().is_empty());
        assert_eq!(books.quarantined.borrow().len(), 3);
    }

    #[test]
    fn probe_substitutes_no_requested_address() {
        let books = Books::default();
        let (done, _) = add(&books, &request(&[9], 1), &[1, 9]);
        let error = done.unwrap_err();
        assert_eq!(error.code(), Code::TryAgain);
        assert!(error.message().contains("address 10.0.0.9 was requested"), "{error}");
        assert!(books.held.borrow().is_empty() && books.quarantined.borrow().is_empty());
        assert_eq!(add(&books, &request(&[9], 0), &[]).0.unwrap(), ips(&[9]), "once the device is gone");
        // After an ADD that failed, the container keeps the addresses that it had before.
        add(&books, &request(&[8, 9], 0), &[8]).0.unwrap_err();
        assert_eq!(*books.held.borrow(), ips(&[8, 9]).into_iter().collect());
    }

    #[test]
    fn probe_is_skipped_when_container_could_answer() {
        let books = Books { is_blind: true, ..Books::default() };
        let (done, probed) = add(&books, &request(&[], 1), &[1]);
        assert_eq!((done.unwrap(), probed), (ips(&[1]), Vec::new()));
    }
}
