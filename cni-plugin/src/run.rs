//! The whole program but for process input and output.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use datastore::{ConfigError, Drivers, Location};
use ipam_core::vm::Role;

use crate::args::{AddressForm, Args};
use crate::bridged::{BridgedSettings, refuse_on_calico};
use crate::env::{Call, OwnNetns, Verb};
use crate::error::{CniError, Code, Result};
use crate::gc;
use crate::gojson::Json;
use crate::identity::{Host, Identity};
use crate::invocation::{Invocation, Logging, Name};
use crate::kubernetes::Kubernetes;
use crate::logging;
use crate::netconf::{NetConf, check_name};
use crate::netns;
use crate::panics;
use crate::prev_result;
use crate::request::{AddRequest, Allocator, Bridged, DelRequest, Network, OwnPool, StoreAt};
use crate::result::{AddResult, no_addresses};
use crate::status::unavailable;
use crate::sticky::sticky;
use crate::versions;
use crate::wanted::wanted;
use crate::weights::choose_first;
use crate::whereabouts;

/// The most that is read from standard input, in bytes. Real configurations have a few thousand.
const MAX_STDIN: u64 = 4 << 20;

/// The lock file of Calico's plugins.
const DEFAULT_LOCK_FILE: &str = "/var/run/calico/ipam.lock";

/// The output of the process, and its exit status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The exit status: 0 or 1.
    pub exit: u8,
    /// For standard output: one JSON document, or nothing.
    pub stdout: String,
    /// For standard error.
    pub stderr: String,
}

/// Carries out the verb that the environment names. Every error, a panic included, becomes CNI's error JSON.
pub fn run(invocation: &Invocation, stdin: &mut dyn Read, allocator: &dyn Allocator) -> Outcome {
    if invocation.environment.get("CNI_COMMAND").is_none() {
        return Outcome { exit: 0, stdout: String::new(), stderr: about() };
    }
    // Nothing that was borrowed here is used again after a panic.
    let carried_out = catch_unwind(AssertUnwindSafe(|| carry_out(invocation, stdin, allocator)));
    match carried_out.unwrap_or_else(|payload| Err(panics::error(&*payload))) {
        Ok(stdout) => Outcome { exit: 0, stdout, stderr: String::new() },
        Err(error) => {
            tracing::error!(code = error.code().number(), "{error}");
            Outcome { exit: 1, stdout: error.to_json(), stderr: String::new() }
        }
    }
}

fn about() -> String {
    format!(
        "Margay CNI IPAM plugin {}\nCNI protocol versions supported: {}\n",
        env!("CARGO_PKG_VERSION"),
        versions::SUPPORTED.join(", ")
    )
}

fn carry_out(invocation: &Invocation, stdin: &mut dyn Read, allocator: &dyn Allocator) -> Result<String> {
    let call = Call::from_environment(&invocation.environment)?;
    if call.verb == Verb::Version {
        return Ok(versions::version_reply());
    }
    let json = check_name(&read(stdin)?)?;
    let version = versions::configured(&json);
    match call.verb {
        Verb::Add => {
            let version = version?;
            versions::check_supported(version)?;
            Context::new(invocation, call, &json)?.add(version, allocator)
        }
        Verb::Del => {
            versions::check_supported(version?)?;
            Context::new(invocation, call, &json)?.del(allocator)
        }
        Verb::Check => {
            versions::check_verb("CHECK", "0.4.0", version?)?;
            Context::new(invocation, call, &json)?.check(allocator)
        }
        Verb::Gc => {
            versions::check_verb("GC", "1.1.0", version?)?;
            let valid = gc::valid_attachments(&json)?;
            Context::new(invocation, call, &json)?.gc(valid, allocator)
        }
        Verb::Status => {
            let version = version?;
            versions::check_verb("STATUS", "1.1.0", version)?;
            let status = Context::new(invocation, call, &json).and_then(|context| context.status(allocator));
            status.map_err(unavailable)
        }
        Verb::Unknown | Verb::Version => {
            Err(CniError::new(Code::InvalidEnvironment, format!("unknown CNI_COMMAND: {}", call.command)))
        }
    }
}

pub(crate) fn read(stdin: &mut dyn Read) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    stdin
        .take(MAX_STDIN + 1)
        .read_to_end(&mut text)
        .map_err(|error| CniError::new(Code::Io, format!("error reading from stdin: {error}")))?;
    if u64::try_from(text.len()).is_ok_and(|length| length > MAX_STDIN) {
        let message = format!("error unmarshall network config: it is longer than {MAX_STDIN} bytes");
        return Err(CniError::new(Code::Decode, message));
    }
    Ok(text)
}

/// The rules that a network follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rules {
    Calico,
    Bridged,
}

/// A verb's configuration, decoded.
pub(crate) struct Context<'a> {
    pub(crate) host: &'a Host,
    pub(crate) call: Call,
    pub(crate) conf: NetConf,
    pub(crate) rules: Rules,
    pub(crate) store: StoreAt,
    /// Where the Kubernetes API is.
    pub(crate) kubernetes: Kubernetes,
}

impl<'a> Context<'a> {
    fn new(invocation: &'a Invocation, call: Call, json: &Json) -> Result<Self> {
        let mut conf = NetConf::decode(json)?;
        conf.store.called_as_calico_ipam = invocation.name == Name::CalicoIpam;
        if invocation.logging == Logging::Process {
            logging::install(&conf);
        }
        tracing::debug!(
            verb = call.command,
            network = conf.name,
            container = call.container,
            interface = call.interface,
            "called"
        );
        let is_calico = invocation.name == Name::CalicoIpam || is_routed(&conf);
        let rules = if is_calico { Rules::Calico } else { Rules::Bridged };
        let lookup = |name: &str| invocation.environment.lookup(name);
        let location = datastore::for_netconf(&invocation.drivers, &conf.store, &lookup);
        let location = location.map_err(|error| store_error(&error, rules, &invocation.drivers))?;
        let store = store_at(&conf, location)?;
        let kubernetes = Kubernetes::from_conf(&conf, &invocation.environment);
        Ok(Self { host: &invocation.host, call, conf, rules, store, kubernetes })
    }

    /// ADD. The namespace is checked before anything is assigned.
    fn add(&mut self, version: &str, allocator: &dyn Allocator) -> Result<String> {
        if self.is_own_netns() {
            return Err(netns::own_netns_error());
        }
        let (args, identity) = self.identify()?;
        if self.rules == Rules::Calico {
            Args::check_again(&self.call.args)?;
        }
        let begun = Instant::now();
        let vm = self.vm_of_add(&identity)?;
        self.hurry(begun.elapsed());
        let is_target = vm.as_ref().is_some_and(|vm| vm.role == Role::Target);
        let settings = self.bridged_settings()?;
        let network = settings.as_ref().map_or(Network::Calico, |settings| Network::Bridged(settings.network.clone()));
        let wanted = wanted(&self.conf, &args)?;
        let begun = Instant::now();
        let sticky = sticky(&self.conf, &args, identity.pod.as_ref(), &self.kubernetes, self.store.patience)?;
        self.hurry(begun.elapsed());
        let old_handle = identity.old_handle();
        let request = AddRequest { vm, sticky, ..self.add_request(identity, network, wanted) };
        let chosen = request.count_v4 + request.count_v6;
        check_counts(version, &request)?;
        // An ADD without addresses needs no store, as for Calico; a virtual machine may have some.
        let nothing = request.wanted.is_empty() && chosen == 0 && request.vm.is_none();
        let assigned = match settings.as_ref().and_then(|settings| settings.probe.as_ref()) {
            _ if nothing => Vec::new(),
            Some(probe) => probe.add(&request, &old_handle, allocator)?,
            None => allocator.add(&request)?,
        };
        let result = match &settings {
            None if is_target => AddResult::calico(&assigned, &request.wanted)?.without_routes(),
            None => AddResult::calico(&assigned, &request.wanted)?,
            Some(settings) => AddResult::bridged(&assigned, settings)?,
        };
        let addresses: Vec<_> = assigned.iter().map(|assigned| assigned.address).collect();
        tracing::info!(network = self.conf.name, container = self.call.container, ?addresses, "assigned");
        result.to_json(version)
    }

    /// The request of an ADD.
    pub(crate) fn add_request(&self, identity: Identity, mut network: Network, wanted: Vec<IpAddr>) -> AddRequest {
        let (count_v4, count_v6) = self.counts(&network, &wanted);
        let (mut pools_v4, mut pools_v6) = (self.conf.ipam.ipv4_pools.clone(), self.conf.ipam.ipv6_pools.clone());
        if let Network::Bridged(Bridged { weights, own_pools, .. }) = &mut network {
            let container = &identity.attachment.container;
            for pools in [&mut pools_v4, &mut pools_v6] {
                choose_first(weights, container, pools, Clone::clone);
            }
            for set in own_pools.chunk_by_mut(|one, other| one.set == other.set) {
                choose_first(weights, container, set, OwnPool::text);
            }
        }
        AddRequest {
            store: self.store.clone(),
            attributes: identity.attributes(self.host.now),
            attachment: identity.attachment,
            namespace: identity.namespace,
            namespaces: Kubernetes::are_looked_up(&self.conf).then(|| self.kubernetes.clone()),
            wanted,
            count_v4,
            count_v6,
            pools_v4,
            pools_v6,
            max_blocks: self.conf.single_block.then_some(1),
            network,
            vm: None,
            sticky: None,
        }
    }

    /// DEL. The container's addresses are released also if its namespace is said to be our own, and the error comes
    /// after: a process id in such a path may belong to a process of the host by now, and without the release the
    /// address would never come back, however often the runtime calls. The container's own addresses are also released
    /// if it cannot be known whether the address is a virtual machine's.
    fn del(&mut self, allocator: &dyn Allocator) -> Result<String> {
        let own_netns = self.is_own_netns();
        let (_, identity) = self.identify()?;
        let begun = Instant::now();
        let (vm, unknown) = match self.vm_of_del(&identity) {
            Ok(vm) => (vm, None),
            Err(error) => (None, Some(error)),
        };
        self.hurry(begun.elapsed());
        let old_handle = identity.old_handle();
        // DEL has to do its work whatever the runtime has kept.
        let addresses = prev_result::addresses(self.conf.prev_result.as_ref()).unwrap_or_default();
        let attachment = identity.attachment;
        let store = self.store.clone();
        let namespace = identity.pod.map(|(namespace, _)| namespace);
        let done =
            allocator.del(&DelRequest { store, attachment, old_handle, addresses, vm, endpoint: None, namespace });
        if let Some(error) = unknown {
            return Err(error);
        }
        done?;
        tracing::info!(network = self.conf.name, container = self.call.container, "DEL is done");
        if own_netns { Err(netns::own_netns_error()) } else { Ok(String::new()) }
    }

    fn is_own_netns(&self) -> bool {
        let netns = self.call.netns.as_deref().filter(|_| self.call.own_netns == OwnNetns::Refused);
        netns.is_some_and(|netns| netns::is_own(netns, &self.host.own_netns))
    }

    pub(crate) fn identify(&self) -> Result<(Args, Identity)> {
        let form = match self.rules {
            Rules::Calico => AddressForm::Bare,
            Rules::Bridged => AddressForm::BareOrCidr,
        };
        let args = Args::parse(&self.call.args, form)?;
        let identity = Identity::new(&self.conf, &self.call, &args, self.host);
        match self.rules {
            Rules::Calico => identity.check_endpoint_name()?,
            Rules::Bridged => identity.check_node()?,
        }
        Ok((args, identity))
    }

    /// The settings of a secondary network; `None` on one of Calico's.
    pub(crate) fn bridged_settings(&self) -> Result<Option<BridgedSettings>> {
        if self.rules == Rules::Calico {
            if is_routed(&self.conf) {
                refuse_on_calico(&self.conf)?;
            }
            return Ok(None);
        }
        let settings = BridgedSettings::from_conf(&self.conf)?;
        // Host-local's ranges are those of one node; whereabouts' are the whole cluster's.
        let is_of_node = settings.network.own_pools.iter().any(|pool| !pool.is_auto)
            && !whereabouts::is_used(&self.conf.ipam.whereabouts);
        if is_of_node && self.store.location.is_shared() {
            return Err(CniError::config("ipam defines a pool of its own, but the store is a cluster's").with_details(
                "make the pool with: margay pool create, and name it in ipv4_pools or ipv6_pools; or write range, \
                     which is one for all nodes, instead of subnet",
            ));
        }
        Ok(Some(settings))
    }

    /// How many addresses of each family to choose. Where the configuration defines pools, their families are meant. On
    /// a secondary network a wanted address takes the place of a chosen one; on Calico's they take the place of all.
    pub(crate) fn counts(&self, network: &Network, wanted: &[IpAddr]) -> (u32, u32) {
        let ipam = &self.conf.ipam;
        let own_pools = match network {
            Network::Calico if !wanted.is_empty() => return (0, 0),
            Network::Calico => &[],
            Network::Bridged(bridged) => bridged.own_pools.as_slice(),
        };
        let of = |v4: bool| own_pools.iter().filter(move |pool| pool.is_v4() == v4);
        let is_wanted = |v4: bool| wanted.iter().any(|address| address.is_ipv4() == v4);
        // Of several sets of a family, each has a chosen address unless a wanted one is of its ranges.
        let count = |v4: bool| {
            let sets: BTreeSet<usize> = of(v4).map(|pool| pool.set).collect();
            let has_wanted =
                |set: &usize| of(v4).any(|pool| pool.set == *set && wanted.iter().any(|address| pool.has(*address)));
            match sets.len() {
                0 | 1 => u32::from(!is_wanted(v4)),
                _ => u32::try_from(sets.iter().filter(|set| !has_wanted(set)).count()).unwrap_or(u32::MAX),
            }
        };
        let off = |setting: &Option<String>| setting.as_deref() == Some("false");
        let v4 = (own_pools.is_empty() || of(true).next().is_some()) && !off(&ipam.assign_ipv4);
        let v6 = if own_pools.is_empty() {
            ipam.assign_ipv6.as_deref() == Some("true")
        } else {
            of(false).next().is_some() && !off(&ipam.assign_ipv6)
        };
        (if v4 { count(true) } else { 0 }, if v6 { count(false) } else { 0 })
    }
}

/// True if the network's main plugin is Calico's or ours, which does the same.
fn is_routed(conf: &NetConf) -> bool {
    matches!(conf.plugin.as_str(), "calico" | "margay-cni")
}

/// The store of a configuration, with its lock file and its time.
///
/// # Errors
/// Code 7 for a deadline that is none.
pub(crate) fn store_at(conf: &NetConf, location: Location) -> Result<StoreAt> {
    let lock_file = if conf.lock_file.is_empty() { DEFAULT_LOCK_FILE } else { &conf.lock_file };
    Ok(StoreAt { location, lock_file: lock_file.into(), patience: conf.patience()?, spent: Duration::ZERO })
}

/// Refuses addresses that a result before 0.3.0 cannot express, before anything is assigned.
fn check_counts(version: &str, request: &AddRequest) -> Result<()> {
    if !versions::is_before(version, "0.3.0") {
        return Ok(());
    }
    let of_family = |v4: bool| request.wanted.iter().filter(|address| address.is_ipv4() == v4).count();
    let v4 = of_family(true) + request.count_v4 as usize;
    let v6 = of_family(false) + request.count_v6 as usize;
    if v4 + v6 == 0 {
        return Err(no_addresses());
    }
    if v4 > 1 || v6 > 1 {
        return Err(CniError::config(format!(
            "CNI {version} has results of one address per family, several are wanted"
        ))
        .with_details("set cniVersion to 0.3.0 or later"));
    }
    Ok(())
}

/// On Calico's networks errors that Calico has as well are Calico's to the letter.
fn store_error(error: &ConfigError, rules: Rules, drivers: &Drivers) -> CniError {
    match rules {
        Rules::Calico if *error == ConfigError::Kubernetes => {
            CniError::internal(error.to_string()).with_details(drivers.advice(error))
        }
        Rules::Calico => CniError::internal(error.to_string()),
        Rules::Bridged => CniError::config(error.to_string()).with_details(drivers.advice(error)),
    }
}
