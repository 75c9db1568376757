//! Runs the IPAM plugin on a given input, and returns its output instead of printing it.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use agent::{Add, Allocator, CniError, Code, Del, NetworkRules, Result, StoreAccess};
use datastore::{ConfigError, Drivers, Location};
use ipam_core::assign::{AssignRequest, AssignedAddress, Bridge, NamespaceLabels, RepeatPolicy, RequestedAddresses};
use ipam_core::sticky::Sticky;
use ipam_core::vm::PodRole;

use crate::bridged::{
    BridgedNetwork, BridgedSettings, Network, OwnPool, choose_first, definitions, network_of, refuse_on_calico,
};
use crate::env::{self, AddressForm, CniArgs, CniCall, CniVerb, OwnNetns, parse_address};
use crate::gojson::GoJson;
use crate::identity::{ContainerIdentity, Host};
use crate::invocation::{Invocation, LogDestination, PluginName, ProcessOutcome};
use crate::kubernetes::Kubernetes;
use crate::netconf::{NetConf, check_name};
use crate::probing::Assigner;
use crate::result::{self, AddResult, no_addresses};
use crate::sticky::sticky;
use crate::verbs::{self, unavailable};
use crate::{logging, ranges, versions};

/// Maximum number of bytes that are read from standard input. Real network configurations have only a few thousand
/// bytes.
const MAX_STDIN_BYTES: u64 = 4 << 20;

/// The lock file that Calico's plugins use by default.
const DEFAULT_HOST_LOCK_FILE: &str = "/var/run/calico/ipam.lock";

/// Carries out the CNI verb of the plugin call that `invocation` describes. Every error and every panic of the plugin
/// call becomes CNI's error JSON.
pub fn run(invocation: &Invocation, stdin: &mut dyn Read, allocator: &dyn Allocator) -> ProcessOutcome {
    if invocation.environment.get("CNI_COMMAND").is_none() {
        return ProcessOutcome { exit: 0, stdout: String::new(), stderr: about() };
    }
    ProcessOutcome::of(|| carry_out(invocation, stdin, allocator))
}

fn about() -> String {
    format!(
        "Margay CNI IPAM plugin {}\nCNI protocol versions supported: {}\n",
        env!("CARGO_PKG_VERSION"),
        versions::SUPPORTED_VERSIONS.join(", ")
    )
}

fn carry_out(invocation: &Invocation, stdin: &mut dyn Read, allocator: &dyn Allocator) -> Result<String> {
    let call = CniCall::from_environment(&invocation.environment)?;
    if call.verb == CniVerb::Version {
        return Ok(versions::version_reply());
    }
    let json = check_name(&read(stdin)?)?;
    let version = versions::of_call(&call, &json)?;
    let done = match call.verb {
        CniVerb::Status => configured(invocation, call, &json, version, allocator).map_err(unavailable),
        _ => configured(invocation, call, &json, version, allocator),
    };
    match done? {
        Some(result) => result.to_json(version),
        None => Ok(String::new()),
    }
}

fn configured(
    invocation: &Invocation,
    call: CniCall,
    json: &GoJson,
    version: &str,
    allocator: &dyn Allocator,
) -> Result<Option<AddResult>> {
    if call.verb == CniVerb::Gc {
        // GC checks the list of valid attachments before the rest of the configuration.
        verbs::valid_attachments(json)?;
    }
    let conf = NetConf::decode(json)?;
    if invocation.logging == LogDestination::Process {
        logging::install(&conf);
    }
    CniContext::new(invocation, invocation.name, call, conf, &[])?.carry_out(json, version, allocator)
}

pub(crate) fn read(stdin: &mut dyn Read) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    stdin
        .take(MAX_STDIN_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|error| CniError::new(Code::Io, format!("error reading from stdin: {error}")))?;
    if u64::try_from(text.len()).is_ok_and(|length| length > MAX_STDIN_BYTES) {
        let message = format!("error unmarshall network config: it is longer than {MAX_STDIN_BYTES} bytes");
        return Err(CniError::new(Code::Decode, message));
    }
    Ok(text)
}

/// A call of the IPAM plugin with its decoded network configuration.
pub(crate) struct CniContext<'a> {
    pub(crate) host: &'a Host,
    pub(crate) call: CniCall,
    pub(crate) conf: NetConf,
    pub(crate) rules: NetworkRules,
    pub(crate) store: StoreAccess,
    pub(crate) kubernetes: Kubernetes,
}

impl<'a> CniContext<'a> {
    /// Decodes a call of the IPAM plugin that was started under the given name. The values in the argument `variables`
    /// override the environment variables of the plugin call.
    ///
    /// # Errors
    /// Any error of decoding the network configuration.
    pub(crate) fn new(
        invocation: &'a Invocation,
        name: PluginName,
        call: CniCall,
        mut conf: NetConf,
        variables: &[(&'static str, String)],
    ) -> Result<Self> {
        conf.store.called_as_calico_ipam = name == PluginName::CalicoIpam;
        tracing::debug!(
            verb = call.command,
            network = conf.name,
            container = call.container,
            interface = call.interface,
            "received a CNI call"
        );
        let is_calico = name == PluginName::CalicoIpam || is_routed(&conf);
        let rules = if is_calico { NetworkRules::Calico } else { NetworkRules::Bridged };
        let set = |name: &str| variables.iter().find(|(set, _)| *set == name).map(|(_, value)| value.clone());
        let lookup = |name: &str| set(name).or_else(|| invocation.environment.lookup(name));
        let location = datastore::for_netconf(&invocation.drivers, &conf.store, &lookup);
        let location = location.map_err(|error| store_error(&error, rules, &invocation.drivers))?;
        let store = store_at(&conf, location)?;
        let kubernetes = Kubernetes::from_conf(&conf, &invocation.environment);
        Ok(Self { host: &invocation.host, call, conf, rules, store, kubernetes })
    }

    /// Carries out the CNI verb of the plugin call, if the CNI version `version` has that verb. Only the verb ADD
    /// returns a CNI result; other verbs return nothing.
    ///
    /// # Errors
    /// Any error of the CNI verb.
    pub(crate) fn carry_out(
        mut self,
        json: &GoJson,
        version: &str,
        allocator: &dyn Allocator,
    ) -> Result<Option<AddResult>> {
        match self.call.verb {
            CniVerb::Add => return self.add(version, allocator).map(Some),
            CniVerb::Del => self.del(allocator),
            CniVerb::Check => self.check(allocator),
            CniVerb::Gc => self.gc(verbs::valid_attachments(json)?, allocator),
            CniVerb::Status => self.status(allocator),
            CniVerb::Unknown | CniVerb::Version => Err(self.call.unknown()),
        }?;
        Ok(None)
    }

    /// Carries out ADD. The network namespace of the container is checked before any address is assigned.
    fn add(&mut self, version: &str, allocator: &dyn Allocator) -> Result<AddResult> {
        if self.is_own_netns() {
            return Err(env::own_netns_error());
        }
        let (args, identity) = self.identify()?;
        if self.rules == NetworkRules::Calico {
            CniArgs::check_again(&self.call.args)?;
        }
        let vm = self.vm_of_add(&identity)?;
        let is_target = vm.as_ref().is_some_and(|vm| vm.role == PodRole::Target);
        let settings = self.bridged_settings()?;
        let network = network_of(settings.as_ref());
        let wanted = wanted_addresses(&self.conf, &args)?;
        let sticky = self.sticky(&args, &identity)?;
        let (old_handle, namespace) = (identity.old_handle(), identity.namespace.clone());
        let mut request = self.assignment(identity, network, wanted);
        request.sticky = sticky;
        check_counts(version, &request.wanted)?;
        let these = request.wanted.these.clone();
        // As in Calico, an ADD that requests no address needs no store. A virtual machine's pod may keep the VM's
        // addresses even if the network configuration requests no address.
        let asks_for_nothing = request.wanted == RequestedAddresses::default() && vm.is_none();
        let add = Add { request, vm };
        let assigner = Assigner { allocator, kubernetes: &self.kubernetes, namespace: &namespace };
        let assigned = match settings.as_ref().and_then(|settings| settings.probe.as_ref()) {
            _ if asks_for_nothing => Vec::new(),
            Some(probe) => probe.add(&self.store, add, &old_handle, &assigner)?,
            None => assigner.assign(&self.store, &mut { add })?,
        };
        let addresses: Vec<_> = assigned.iter().map(AssignedAddress::interface_ip).collect();
        tracing::info!(network = self.conf.name, container = self.call.container, ?addresses, "assigned addresses");
        match &settings {
            Some(settings) => AddResult::bridged(&assigned, settings),
            None if is_target => Ok(AddResult::calico(&assigned, &these)?.without_routes()),
            None => AddResult::calico(&assigned, &these),
        }
    }

    /// Returns the sticky name of the workload, for which the addresses of this ADD will be kept.
    ///
    /// # Errors
    /// Any error of [`sticky`].
    fn sticky(&mut self, args: &CniArgs, identity: &ContainerIdentity) -> Result<Option<Sticky>> {
        let begun = Instant::now();
        let sticky = sticky(&self.conf, args, identity.pod.as_ref(), &self.kubernetes, self.store.patience)?;
        self.shorten_timeout(begun.elapsed());
        Ok(sticky)
    }

    /// Builds the request to the allocator for the addresses of an ADD.
    pub(crate) fn assignment(
        &self,
        identity: ContainerIdentity,
        mut network: Network,
        wanted: Vec<IpAddr>,
    ) -> AssignRequest {
        let (any_v4, any_v6) = self.counts(&network, &wanted);
        let attributes = identity.attributes(self.host.now);
        let wanted = RequestedAddresses { these: wanted, any_v4, any_v6 };
        let mut assign = AssignRequest::new(identity.attachment, wanted);
        assign.attributes = attributes;
        assign.v4_pools.clone_from(&self.conf.ipam.ipv4_pools);
        assign.v6_pools.clone_from(&self.conf.ipam.ipv6_pools);
        assign.max_blocks = u32::from(self.conf.single_block);
        if Kubernetes::are_looked_up(&self.conf) {
            assign.namespace = NamespaceLabels::NotYetRead;
        }
        match &mut network {
            Network::Calico => assign.repeated = RepeatPolicy::Refused,
            Network::Bridged(BridgedNetwork { gateway_v4, gateway_v6, gateways, own_pools, weights }) => {
                let container = &assign.attachment.container;
                for pools in [&mut assign.v4_pools, &mut assign.v6_pools] {
                    choose_first(weights, container, pools, Clone::clone);
                }
                for set in own_pools.chunk_by_mut(|one, other| one.set == other.set) {
                    choose_first(weights, container, set, OwnPool::text);
                }
                assign.bridge = Some(Bridge { v4: *gateway_v4, v6: *gateway_v6 });
                assign.gateways.clone_from(gateways);
                assign.define = definitions(&assign.attachment.network, own_pools);
            }
        }
        assign
    }

    /// Carries out DEL. If `CNI_NETNS` seems to name the plugin's own network namespace, DEL still releases the
    /// container's addresses, and then returns an error. DEL fails only after the release: the process id in
    /// `CNI_NETNS` may have been reused by a host process, and a repeated DEL would fail again with the same path. If
    /// the Kubernetes API cannot tell whether the pod runs a virtual machine, DEL also releases the addresses under the
    /// container's own handle.
    fn del(&mut self, allocator: &dyn Allocator) -> Result<()> {
        let own_netns = self.is_own_netns();
        let (_, identity) = self.identify()?;
        let (vm, unknown) = match self.vm_of_del(&identity) {
            Ok(vm) => (vm, None),
            Err(error) => (None, Some(error)),
        };
        let old_handle = identity.old_handle();
        // DEL must succeed even if the runtime passes an unreadable `prevResult`.
        let addresses = result::previous_addresses(self.conf.prev_result.as_ref()).unwrap_or_default();
        let attachment = identity.attachment;
        let namespace = identity.pod.map(|(namespace, _)| namespace);
        let del = Del { attachment, old_handle, addresses, endpoint: None, namespace, vm };
        let done = allocator.del(&self.store, del);
        if let Some(error) = unknown {
            return Err(error);
        }
        done?;
        tracing::info!(network = self.conf.name, container = self.call.container, "finished DEL");
        if own_netns { Err(env::own_netns_error()) } else { Ok(()) }
    }

    fn is_own_netns(&self) -> bool {
        let netns = self.call.netns.as_deref().filter(|_| self.call.own_netns == OwnNetns::Refused);
        netns.is_some_and(|netns| env::is_own_netns(netns, &self.host.own_netns))
    }

    pub(crate) fn identify(&self) -> Result<(CniArgs, ContainerIdentity)> {
        let form = match self.rules {
            NetworkRules::Calico => AddressForm::Bare,
            NetworkRules::Bridged => AddressForm::BareOrCidr,
        };
        let args = CniArgs::parse(&self.call.args, form)?;
        let identity = ContainerIdentity::new(&self.conf, &self.call, &args, self.host);
        match self.rules {
            NetworkRules::Calico => identity.check_endpoint_name()?,
            NetworkRules::Bridged => identity.check_node()?,
        }
        Ok((args, identity))
    }

    /// Returns the settings of a secondary network; returns `None` for a Calico network.
    pub(crate) fn bridged_settings(&self) -> Result<Option<BridgedSettings>> {
        if self.rules == NetworkRules::Calico {
            if is_routed(&self.conf) {
                refuse_on_calico(&self.conf)?;
            }
            return Ok(None);
        }
        let settings = BridgedSettings::from_conf(&self.conf)?;
        // A range in host-local's notation belongs to one node; a range in whereabouts' notation belongs to the whole
        // cluster.
        let is_of_node = settings.network.own_pools.iter().any(|pool| !pool.is_auto)
            && !ranges::is_whereabouts(&self.conf.ipam.whereabouts);
        if is_of_node && self.store.location.is_shared() {
            return Err(CniError::config("ipam defines a pool of its own, but the store is a cluster's").with_details(
                "make the pool with: margay pool create, and name it in ipv4_pools or ipv6_pools; or write range, \
                     which is one for all nodes, instead of subnet",
            ));
        }
        Ok(Some(settings))
    }

    /// Returns how many IPv4 addresses and how many IPv6 addresses the allocator must choose. If the configuration
    /// defines pools, the allocator chooses addresses only in the address families of the configured pools. On a
    /// secondary network, the allocator chooses no further address from a set of ranges if the ADD requests a specific
    /// address in this set. On a Calico network, the allocator chooses no address if any address is requested.
    pub(crate) fn counts(&self, network: &Network, wanted: &[IpAddr]) -> (usize, usize) {
        let ipam = &self.conf.ipam;
        let own_pools = match network {
            Network::Calico if !wanted.is_empty() => return (0, 0),
            Network::Calico => &[],
            Network::Bridged(bridged) => bridged.own_pools.as_slice(),
        };
        let of = |v4: bool| own_pools.iter().filter(move |pool| pool.is_v4() == v4);
        let is_wanted = |v4: bool| wanted.iter().any(|address| address.is_ipv4() == v4);
        // If an address family has several sets of ranges, the allocator chooses one address from every set in which
        // the ADD requests no specific address.
        let count = |v4: bool| {
            let sets: BTreeSet<usize> = of(v4).map(|pool| pool.set).collect();
            let has_wanted =
                |set: &usize| of(v4).any(|pool| pool.set == *set && wanted.iter().any(|address| pool.has(*address)));
            match sets.len() {
                0 | 1 => usize::from(!is_wanted(v4)),
                _ => sets.iter().filter(|set| !has_wanted(set)).count(),
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

/// True if the network's main plugin is `calico` or its equivalent `margay-cni`.
fn is_routed(conf: &NetConf) -> bool {
    matches!(conf.plugin.as_str(), "calico" | "margay-cni")
}

/// Returns the location of the configured store, with its lock file and its time limit.
///
/// # Errors
/// CNI error code 7 for an invalid `datastore_timeout`.
pub(crate) fn store_at(conf: &NetConf, location: Location) -> Result<StoreAccess> {
    let lock_file = if conf.lock_file.is_empty() { DEFAULT_HOST_LOCK_FILE } else { &conf.lock_file };
    Ok(StoreAccess { location, lock_file: lock_file.into(), patience: conf.patience()?, spent: Duration::ZERO })
}

/// Refuses a request for addresses that a CNI result before version 0.3.0 cannot express. The requested addresses are
/// checked before any address is assigned.
fn check_counts(version: &str, wanted: &RequestedAddresses) -> Result<()> {
    if !versions::is_before(version, "0.3.0") {
        return Ok(());
    }
    let of_family = |v4: bool| wanted.these.iter().filter(|address| address.is_ipv4() == v4).count();
    let (v4, v6) = (of_family(true) + wanted.any_v4, of_family(false) + wanted.any_v6);
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

/// Converts an error about the configuration of the store to a CNI error. On a Calico network, the error has Calico's
/// exact message if Calico has an error for the same problem.
fn store_error(error: &ConfigError, rules: NetworkRules, drivers: &Drivers) -> CniError {
    match rules {
        NetworkRules::Calico if *error == ConfigError::Kubernetes => {
            CniError::internal(error.to_string()).with_details(drivers.advice(error))
        }
        NetworkRules::Calico => CniError::internal(error.to_string()),
        NetworkRules::Bridged => CniError::config(error.to_string()).with_details(drivers.advice(error)),
    }
}

/// Returns the requested addresses, which come from `IP` in `CNI_ARGS`, from `args.cni.ips` and from
/// `runtimeConfig.ips`, in this order. Addresses from `CNI_ARGS`, `args.cni.ips` and `runtimeConfig.ips` are all
/// requested, because the CNI specification does not rank them. Duplicates are dropped.
///
/// # Errors
/// CNI error code 7 if a requested address is not an IP address.
pub(crate) fn wanted_addresses(conf: &NetConf, args: &CniArgs) -> Result<Vec<IpAddr>> {
    let mut wanted: Vec<IpAddr> = args.ip.into_iter().collect();
    for (setting, value) in [("args.cni.ips", &conf.args_ips), ("runtimeConfig.ips", &conf.runtime_ips)] {
        let elements = value.as_ref().map(GoJson::one_or_many).unwrap_or_default();
        for element in elements {
            let text =
                element.as_str().ok_or_else(|| CniError::config(format!("{setting} must be a list of addresses")))?;
            let address = parse_address(text, AddressForm::BareOrCidr)
                .map_err(|error| CniError::config(error).with_details(format!("in {setting}")))?;
            if !wanted.contains(&address) {
                wanted.push(address);
            }
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted_by(json: &str, ip: &str) -> Result<Vec<String>> {
        let conf = NetConf::decode(&GoJson::parse(json.as_bytes()).unwrap()).unwrap();
        let args = CniArgs { ip: ip.parse().ok(), ..CniArgs::default() };
        Ok(wanted_addresses(&conf, &args)?.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn wanted_addresses_add_up_from_all_sources() {
        let json = r#"{"args":{"cni":{"ips":["10.0.0.2/24","fd00::1"]}},"runtimeConfig":{"ips":["10.0.0.3","10.0.0.1","FD00::1/64"]}}"#;
        assert_eq!(wanted_by(json, "10.0.0.1").unwrap(), ["10.0.0.1", "10.0.0.2", "fd00::1", "10.0.0.3"]);
        assert_eq!(wanted_by(json, "").unwrap(), ["10.0.0.2", "fd00::1", "10.0.0.3", "10.0.0.1"]);
        assert!(wanted_by("{}", "").unwrap().is_empty());
        assert_eq!(wanted_by(r#"{"runtimeConfig":{"ips":"10.0.0.3"}}"#, "").unwrap(), ["10.0.0.3"]);
    }

    #[test]
    fn wanted_addresses_are_refused_when_malformed() {
        let error = wanted_by(r#"{"runtimeConfig":{"ips":["10.0.0"]}}"#, "").unwrap_err();
        assert_eq!((error.code().number(), error.message()), (7, "invalid IP address: 10.0.0"));
        assert_eq!(error.details(), "in runtimeConfig.ips");
        for json in [r#"{"args":{"cni":{"ips":[1]}}}"#, r#"{"args":{"cni":{"ips":{}}}}"#] {
            assert_eq!(wanted_by(json, "").unwrap_err().message(), "args.cni.ips must be a list of addresses");
        }
    }
}
