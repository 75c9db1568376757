use std::cell::RefCell;
use std::collections::BTreeSet;

use agent::{Allocator, Answer, Verb};
use ipam_core::CheckResult;
use ipam_core::assign::{AssignRequest, Bridge, Wanted};
use ipnet::IpNet;

use super::*;
use crate::kubernetes::Kubernetes;

fn probe(json: &str) -> Result<Option<(String, u64)>> {
    let conf = NetConf::decode(&Json::parse(json.as_bytes()).unwrap()).unwrap();
    let millis = |probe: Probe| (probe.interface, u64::try_from(probe.timeout.as_millis()).unwrap());
    Probe::from_conf(&conf).map(|probe| probe.map(millis))
}

#[test]
fn what_is_probed_and_how_long() {
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
fn what_is_no_probe() {
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

/// Gives out 10.0.0.1, 10.0.0.2 and so on, and the requested addresses; remembers who has what.
#[derive(Default)]
struct Books {
    last: RefCell<u8>,
    held: RefCell<BTreeSet<IpAddr>>,
    quarantined: RefCell<Vec<(IpAddr, String)>>,
    is_blind: bool,
}

impl Books {
    fn assign(&self, wanted: &Wanted) -> Vec<Assigned> {
        let mut held = self.held.borrow_mut();
        held.extend(&wanted.these);
        if held.len() < wanted.these.len() + wanted.any_v4 {
            *self.last.borrow_mut() += 1;
            held.insert(IpAddr::from([10, 0, 0, *self.last.borrow()]));
        }
        let network = |ip: &IpAddr, length| IpNet::new(*ip, length).unwrap().trunc();
        let assigned = |ip: &IpAddr| Assigned {
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
    fn call(&self, _: &StoreAt, verb: &Verb) -> Result<Answer> {
        Ok(match verb {
            Verb::Add(add) => Answer::Assigned(self.assign(&add.request.wanted)),
            Verb::Del(_) => {
                self.held.borrow_mut().clear();
                Answer::Released(Vec::new())
            }
            Verb::Check(_) if self.is_blind => Answer::Checked(Checked::Unknown("it is locked".into())),
            Verb::Check(_) => {
                let held = self.held.borrow().iter().copied().collect();
                Answer::Checked(Checked::Compared(CheckResult { held, standings: Vec::new() }))
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
    let mut request = AssignRequest::new(attachment, Wanted { these: ips(wanted), any_v4, any_v6: 0 });
    request.bridge = Some(Bridge::default());
    request.into()
}

/// ADD on a wire with devices that have these addresses. Returns also which addresses were probed.
fn add(books: &Books, add: &Add, devices: &[u8]) -> (Result<Vec<IpAddr>>, Vec<IpAddr>) {
    let probed = RefCell::new(Vec::new());
    let devices = ips(devices);
    let ask = |addresses: &[IpAddr]| {
        probed.borrow_mut().extend(addresses);
        let answer = |ip| if devices.contains(ip) { Probed::Answered(None) } else { Probed::Silent };
        addresses.iter().map(answer).collect()
    };
    let at = StoreAt {
        location: stores::at("memory:").unwrap(),
        lock_file: "/none".into(),
        patience: Duration::from_secs(10),
        spent: Duration::ZERO,
    };
    let (at, add, begun) = (&at, add.clone(), Instant::now());
    let by = &Assigner { allocator: books, kubernetes: &Kubernetes::default(), namespace: "" };
    let done = Probing { interface: "eth1", ask: &ask, by, at, add, old_handle: "", begun }.add();
    (done.map(|done| done.iter().map(Assigned::interface_ip).collect()), probed.into_inner())
}

#[test]
fn another_address_takes_the_place_of_a_devices() {
    let books = Books::default();
    let (done, probed) = add(&books, &request(&[], 1), &[1, 2]);
    assert_eq!((done.unwrap(), probed), (ips(&[3]), ips(&[1, 2, 3])));
    let reason = "a device answered on eth1".to_owned();
    assert_eq!(*books.quarantined.borrow(), [(ips(&[1])[0], reason.clone()), (ips(&[2])[0], reason)]);
    // The container answers for its address by now.
    let (done, probed) = add(&books, &request(&[], 1), &[3]);
    assert_eq!((done.unwrap(), probed), (ips(&[3]), Vec::new()));
}

#[test]
fn only_what_is_new_is_probed_again() {
    let books = Books::default();
    let (done, probed) = add(&books, &request(&[9], 1), &[1]);
    assert_eq!((done.unwrap(), probed), (ips(&[2, 9]), ips(&[1, 9, 2])));
}

#[test]
fn devices_everywhere() {
    let books = Books::default();
    let (done, _) = add(&books, &request(&[], 1), &[1, 2, 3, 4]);
    let error = done.unwrap_err();
    assert_eq!(error.code(), Code::TryAgain);
    assert!(error.message().ends_with("10.0.0.3 (a device answered on eth1)"), "{error}");
    assert!(books.held.borrow().is_empty());
    assert_eq!(books.quarantined.borrow().len(), 3);
}

#[test]
fn a_requested_address_has_no_substitute() {
    let books = Books::default();
    let (done, _) = add(&books, &request(&[9], 1), &[1, 9]);
    let error = done.unwrap_err();
    assert_eq!(error.code(), Code::TryAgain);
    assert!(error.message().contains("address 10.0.0.9 was requested"), "{error}");
    assert!(books.held.borrow().is_empty() && books.quarantined.borrow().is_empty());
    assert_eq!(add(&books, &request(&[9], 0), &[]).0.unwrap(), ips(&[9]), "once the device is gone");
    // The addresses that the container had before stay its own.
    add(&books, &request(&[8, 9], 0), &[8]).0.unwrap_err();
    assert_eq!(*books.held.borrow(), ips(&[8, 9]).into_iter().collect());
}

#[test]
fn nothing_is_probed_where_it_could_be_the_container() {
    let books = Books { is_blind: true, ..Books::default() };
    let (done, probed) = add(&books, &request(&[], 1), &[1]);
    assert_eq!((done.unwrap(), probed), (ips(&[1]), Vec::new()));
}
