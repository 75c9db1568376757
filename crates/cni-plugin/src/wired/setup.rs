//! This module checks a call, in Calico's order, before a verb opens the store.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use agent::{Allocator, Alone, CniError, Code, Result, Rules, Served, Session, StoreAt, explain};
use datastore::Location;
use ipam_core::endpoints::{Before, EndpointQuery, PendingEndpoint, Pools, Ready};
use ipam_core::model::Orchestrator;
use ipnet::IpNet;
use wiring::{Forwarding, NextHop, OldInterface, Plan};

use super::conf::{Conf, Device};
use super::mesos;
use super::names::Workload;
use crate::args::{AddressForm, Args};
use crate::dataplane_grpc::Dataplane;
use crate::env::{Call, OwnNetns, Verb};
use crate::gojson::Json;
use crate::identity::Identity;
use crate::invocation::{Invocation, Logging, Name};
use crate::kubernetes::{DefaultRoutes, HostLocal, Kubernetes, default_routes};
use crate::logging;
use crate::netns;
use crate::run::store_at;

/// A decoded call.
pub(super) struct Setup<'a> {
    pub(super) invocation: &'a Invocation,
    pub(super) call: Call,
    /// The configuration as text.
    pub(super) stdin: Vec<u8>,
    pub(super) json: Json,
    pub(super) conf: Conf,
    pub(super) workload: Workload,
    /// The labels that the configuration itself gives a plain container.
    pub(super) labels: ipam_core::model::Labels,
    /// `CNI_ARGS` as the IPAM plugin gets them.
    pub(super) args: String,
    pub(super) store: StoreAt,
    /// Where the Kubernetes API is.
    pub(super) kubernetes: Kubernetes,
    /// 0 for the kernel's own.
    pub(super) mtu: u32,
    pub(super) device: Device,
    /// The maker of interfaces. An error of the configuration is kept, since DEL does its other work first.
    dataplane: Result<Dataplane>,
}

impl<'a> Setup<'a> {
    /// Reads and checks a call.
    ///
    /// # Errors
    /// Calico's texts, with code 999.
    pub(super) fn new(invocation: &'a Invocation, call: Call, json: Json, stdin: Vec<u8>) -> Result<Self> {
        let mut conf = Conf::decode(&json)?;
        conf.net.store.called_as_calico_ipam = invocation.name == Name::CalicoIpam;
        if invocation.logging == Logging::Process {
            logging::install(&conf.net);
        }
        let lookup = |name: &str| invocation.environment.lookup(name);
        let location = datastore::for_netconf(&invocation.drivers, &conf.net.store, &lookup);
        // On a store of one machine no agent of Calico's runs, so nothing writes that file.
        if location.as_ref().is_ok_and(Location::is_shared) || location.is_err() {
            conf.check_nodename_file(&invocation.host.nodename_file)?;
        }
        let is_add = call.verb == Verb::Add;
        if is_add {
            conf.check_credentials()?;
        }
        let mtu = if is_add || call.verb == Verb::Check { conf.mtu()? } else { 0 };
        let device = if is_add { conf.device()? } else { Device::Veth };
        let args = match call.args.as_str() {
            "" => "IgnoreUnknown=1".to_owned(),
            args => format!("IgnoreUnknown=1;{args}"),
        };
        let parsed = Args::parse(&args, AddressForm::Bare)?;
        let identity = Identity::new(&conf.net, &call, &parsed, &invocation.host);
        let location = location.map_err(|error| {
            let prefix = if is_add { "error creating calico client: " } else { "" };
            CniError::internal(format!("{prefix}{error}"))
        })?;
        let store = store_at(&conf.net, location)?;
        let (labels, namespace) = mesos::labels(&conf.mesos_labels);
        let workload = match &identity.pod {
            Some((namespace, pod)) => Workload {
                node: identity.attachment.node.clone(),
                orchestrator: Orchestrator::K8s,
                namespace: namespace.clone(),
                id: pod.clone(),
            },
            None => Workload {
                node: identity.attachment.node.clone(),
                orchestrator: Orchestrator::Cni,
                namespace: namespace.unwrap_or_else(|| identity.namespace.clone()),
                id: call.container.clone(),
            },
        };
        let dataplane = Dataplane::choose(json.member("dataplane_options"));
        let kubernetes = Kubernetes::from_conf(&conf.net, &invocation.environment);
        Ok(Self {
            invocation,
            call,
            stdin,
            json,
            conf,
            workload,
            labels,
            args,
            store,
            kubernetes,
            mtu,
            device,
            dataplane,
        })
    }

    /// The path of the container's network namespace; empty if there is none.
    pub(super) fn netns(&self) -> PathBuf {
        self.call.netns.clone().unwrap_or_default()
    }

    /// True if the container's network namespace is the plugin's own, and that is not wanted.
    pub(super) fn is_own_netns(&self) -> bool {
        let netns = self.call.netns.as_deref().filter(|_| self.call.own_netns == OwnNetns::Refused);
        netns.is_some_and(|netns| netns::is_own(netns, &self.invocation.host.own_netns))
    }

    /// The maker of interfaces.
    ///
    /// # Errors
    /// Calico's texts for an unknown data plane.
    pub(super) fn dataplane(&self) -> Result<&Dataplane> {
        self.dataplane.as_ref().map_err(Clone::clone)
    }

    /// The routes in the container: the default ones, or for a pod those of host-local's configuration.
    ///
    /// # Errors
    /// Calico's texts for routes of the wrong shape.
    pub(super) fn routes(&self) -> Result<Vec<IpNet>> {
        if self.workload.orchestrator == Orchestrator::Cni || self.conf.ipam_type != "host-local" {
            return Ok(default_routes());
        }
        let default = if self.conf.include_default_routes { DefaultRoutes::Kept } else { DefaultRoutes::Replaced };
        HostLocal::new(&self.json)?.routes(default)
    }

    /// The wiring of the container, with the default routes.
    pub(super) fn plan(&self, host_interface: String, addresses: &[IpAddr]) -> Plan {
        let old_interface = match self.workload.orchestrator {
            Orchestrator::Cni => OldInterface::KeptIfInUse,
            Orchestrator::K8s => OldInterface::Removed,
        };
        Plan {
            host_interface,
            old_interface,
            interface: self.call.interface.clone(),
            mtu: self.mtu,
            queues: self.conf.queues(),
            device: self.device,
            mac: None,
            addresses: addresses.to_vec(),
            prefixes: Vec::new(),
            routes: default_routes(),
            forwarding: if self.conf.allow_ip_forwarding { Forwarding::On } else { Forwarding::Off },
            next_hop: if self.is_alone() { NextHop::Known } else { NextHop::Asked },
        }
    }

    /// The allocator for an IPAM plugin that is this program. A store that other programs must wait for has no daemon.
    pub(super) fn allocator(session: &Arc<Session>) -> Box<dyn Allocator> {
        match session.is_exclusive() {
            true => Box::new(Alone::within(Arc::clone(session))),
            false => Box::new(Served::within(Arc::clone(session))),
        }
    }

    /// True if the store is one machine's: no agent of Calico's runs beside.
    pub(super) fn is_alone(&self) -> bool {
        !self.store.location.is_shared()
    }

    /// Checks that plugins may work, without a read of any endpoint.
    ///
    /// # Errors
    /// Those of [`begin`](Self::begin).
    pub(super) fn check_ready(&self, session: &Session) -> Result<()> {
        let nothing = EndpointQuery { namespace: String::new(), prefix: None, profile: None, pools: Pools::Skipped };
        self.begin(session, nothing).map(drop)
    }

    /// Reads from the store, and checks that plugins may work.
    ///
    /// # Errors
    /// Calico's texts for a store that does not answer or is not ready.
    pub(super) fn begin(&self, session: &Session, query: EndpointQuery) -> Result<(PendingEndpoint, Before)> {
        let read = session.run(session.ipam().begin_endpoint(query, session.deadline()));
        let (pending, before) = read.map_err(|error| {
            let error = CniError::from(explain(error, Rules::Calico));
            let message = format!("error getting ClusterInformation: {}", error.message());
            CniError::new(error.code(), message).with_details(error.details())
        })?;
        match before.ready {
            Some(Ready::Yes) => {}
            Some(Ready::No) => return Err(CniError::internal("Calico is currently not ready to process requests")),
            None if self.store.location.is_shared() => return Err(no_cluster_information()),
            None => {}
        }
        Ok((pending, before))
    }
}

/// The error for a cluster's store that Calico has not been installed on.
fn no_cluster_information() -> CniError {
    let text =
        "error getting ClusterInformation: resource does not exist: ClusterInformation(default) with error: <nil>";
    CniError::new(Code::Internal, text)
}
