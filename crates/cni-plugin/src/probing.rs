//! The probe of a secondary network: a new address is handed out only if no device on the wire answers for it.
//!
//! The plugin probes between the commit of the ADD and its result, on the node of the container: the daemon never waits
//! for the wire. A plugin that is killed meanwhile leaves a usual allocation, which the runtime's DEL frees.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use agent::{Add, Check, Checked, CniError, Code, Del, Quarantine, Result, StoreAt};
use host::Probed;
use ipam_core::assign::Assigned;
use ipam_core::attachment::{Attachment, NAMESPACE};

use crate::assigner::Assigner;
use crate::gojson::Json;
use crate::netconf::NetConf;

/// The longest wait for an answer, and the wait if the configuration names none, in milliseconds.
const LONGEST: u64 = 200;
/// So many addresses are tried for one ADD.
const TRIES: usize = 3;
/// The bridge of the bridge plugin if the configuration names none.
const DEFAULT_BRIDGE: &str = "cni0";

/// The probe that a configuration wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) interface: String,
    pub(crate) timeout: Duration,
}

impl Probe {
    /// Reads `ipam.probe`; `None` if it is off.
    ///
    /// # Errors
    /// Code 7 for what is no probe, or for a network that does not say on which interface.
    pub(crate) fn from_conf(conf: &NetConf) -> Result<Option<Self>> {
        let mut timeout = LONGEST;
        let mut interface = "";
        match &conf.ipam.probe {
            None | Some(Json::Bool(false)) => return Ok(None),
            Some(Json::Bool(true)) => {}
            Some(probe @ Json::Object(_)) => {
                interface = probe.text_member("interface").map_err(|_| wrong("interface must be a name"))?;
                timeout = match probe.member("timeout") {
                    None => LONGEST,
                    Some(Json::Number(number)) => {
                        number.as_u64().filter(|wait| (1..=LONGEST).contains(wait)).unwrap_or(0)
                    }
                    Some(_) => 0,
                };
            }
            Some(_) => return Err(wrong("it must be true, false, or an object with interface and timeout")),
        }
        if timeout == 0 {
            return Err(wrong(&format!("timeout must be a whole number of milliseconds from 1 to {LONGEST}")));
        }
        let bridge = conf.bridge.as_ref().and_then(Json::as_str).filter(|name| !name.is_empty());
        let wire = match conf.plugin.as_str() {
            "bridge" => bridge.or(Some(DEFAULT_BRIDGE)),
            // The wire of the containers is a VLAN of the master's, which the machine itself has no interface in.
            "vlan" => None,
            _ => conf.master.as_ref().and_then(Json::as_str),
        };
        let named = Some(interface).filter(|name| !name.is_empty()).or(wire).filter(|name| !name.is_empty());
        let interface = named.ok_or_else(|| {
            wrong("no interface of this machine is known to be on the wire of the network")
                .with_details("name the interface whose wire is probed in ipam.probe.interface")
        })?;
        Ok(Some(Self { interface: interface.to_owned(), timeout: Duration::from_millis(timeout) }))
    }

    /// ADD with a probe of the addresses that are new.
    ///
    /// # Errors
    /// Those of ADD; code 11 if devices have all addresses that were tried, or one that was requested.
    pub(crate) fn add(&self, at: &StoreAt, add: Add, old_handle: &str, by: &Assigner<'_>) -> Result<Vec<Assigned>> {
        let ask = |addresses: &[IpAddr]| host::probe(&self.interface, addresses, self.timeout);
        Probing { interface: &self.interface, ask: &ask, by, at, add, old_handle, begun: Instant::now() }.add()
    }
}

fn wrong(reason: &str) -> CniError {
    CniError::config(format!("ipam.probe: {reason}"))
}

/// An ADD with a probe.
struct Probing<'a> {
    interface: &'a str,
    ask: &'a dyn Fn(&[IpAddr]) -> Vec<Probed>,
    by: &'a Assigner<'a>,
    at: &'a StoreAt,
    add: Add,
    old_handle: &'a str,
    begun: Instant,
}

impl Probing<'_> {
    fn add(mut self) -> Result<Vec<Assigned>> {
        let Some(before) = self.held() else { return self.assign() };
        let assigned = self.assign()?;
        let settled = self.settle(before.clone(), assigned);
        // A container that had addresses before keeps them until its DEL.
        if settled.is_err() && before.is_empty() {
            let (attachment, old_handle) = (self.attachment(), self.old_handle.to_owned());
            let (addresses, namespace) = (Vec::new(), self.add.request.attributes.get(NAMESPACE).cloned());
            let del = Del { attachment, old_handle, addresses, endpoint: None, namespace, vm: None };
            if let Err(error) = self.by.allocator.del(&self.time_left(), del) {
                tracing::warn!(%error, "the addresses stay assigned until the DEL");
            }
        }
        settled
    }

    fn assign(&mut self) -> Result<Vec<Assigned>> {
        self.by.assign(&self.time_left(), &mut self.add)
    }

    fn attachment(&self) -> Attachment {
        self.add.request.attachment.clone()
    }

    fn time_left(&self) -> StoreAt {
        self.at.with_time_left(self.begun)
    }

    /// The addresses that the attachment has before the ADD: the container itself may answer for these. `None` if that
    /// cannot be known.
    fn held(&self) -> Option<Vec<IpAddr>> {
        if self.at.location.path().is_some_and(|path| !path.exists()) {
            return Some(Vec::new());
        }
        let (attachment, old_handle) = (self.attachment(), self.old_handle.to_owned());
        let why = match self.by.allocator.check(self.at, Check { attachment, old_handle, addresses: Vec::new() }) {
            Ok(Checked::Compared(found)) => return Some(found.held),
            Ok(Checked::Unknown(why)) => why,
            Err(error) => error.to_string(),
        };
        tracing::warn!(why, "the address is not probed: what the container has is not known");
        None
    }

    /// Probes what is new, and replaces what a device has.
    fn settle(&mut self, mut known: Vec<IpAddr>, mut assigned: Vec<Assigned>) -> Result<Vec<Assigned>> {
        let mut devices = Vec::new();
        for attempt in 1..=TRIES {
            // A prefix is routed to its container: there is no wire on which another device could have it.
            let addresses = assigned.iter().filter(|assigned| assigned.prefix_length.is_none());
            let mut new: Vec<IpAddr> = addresses.map(Assigned::interface_ip).collect();
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
            if attempt < TRIES {
                assigned = self.assign()?;
            }
        }
        let message = format!("devices that no store knows have the addresses {}", devices.join(", "));
        Err(CniError::new(Code::TryAgain, message)
            .with_details("the addresses are in quarantine: margay ipam quarantine list; the next ADD tries others"))
    }

    /// The addresses that devices have, each with the reason for its quarantine. A probe that cannot be made holds up no ADD.
    fn foreign(&self, addresses: &[IpAddr]) -> Vec<(IpAddr, String)> {
        let mut found = Vec::new();
        for (address, probed) in addresses.iter().zip((self.ask)(addresses)) {
            match probed {
                Probed::Silent => {}
                Probed::Unable(reason) => tracing::warn!(%address, reason, "the address is not probed"),
                Probed::Answered(mac) => {
                    let device = mac.map_or_else(|| "a device".to_owned(), |mac| mac.to_string());
                    let reason = format!("{device} answered on {}", self.interface);
                    tracing::warn!(%address, reason, "a device has the address already");
                    found.push((*address, reason));
                }
            }
        }
        found
    }
}

#[cfg(test)]
#[path = "probing_tests.rs"]
mod tests;
