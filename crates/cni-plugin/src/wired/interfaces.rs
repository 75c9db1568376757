//! The interfaces of a container: the kernel makes them, or another program does.

use std::collections::BTreeMap;

use agent::{CniError, Result};
use ipam_core::model::EndpointFacts;
use wiring::Plan;

use super::ongoing::Add;
use crate::dataplane_grpc::Dataplane;
use crate::dataplane_grpc::message::{AddRequest, ContainerSettings, IpConfig, Port, WorkloadIds};
use crate::result::AddResult;

/// Makes the interfaces, and records in the facts the name on the host and the MAC address in the container.
///
/// # Errors
/// The texts of [`wiring::Error`]; those of the other program, which gets no prefix. The container has no interface then.
pub(super) fn make(
    add: &Add<'_, '_>,
    mut plan: Plan,
    assigned: &AddResult,
    annotations: &BTreeMap<String, String>,
    name: &str,
    facts: &mut EndpointFacts,
) -> Result<()> {
    match add.setup.dataplane()? {
        Dataplane::Linux => {
            facts.mac = add.connect(&mut plan)?.mac;
            facts.interface = plan.host_interface;
        }
        Dataplane::Grpc(program) => {
            routes_addresses(&plan)?;
            let request = request(add, &plan, assigned, annotations, name, facts);
            let made = add.run(async |deadline| program.add(request, deadline.remaining()).await);
            // The other program may have made the interfaces all the same.
            let made = made.inspect_err(|_| unmake(add))?;
            facts.interface = made.host_interface;
            facts.mac = made.mac.text;
        }
    }
    Ok(())
}

/// The other program's protocol has no member for prefixes: it would send the first address of each to the container, and
/// nothing else.
fn routes_addresses(plan: &Plan) -> Result<()> {
    let Some(prefix) = plan.prefixes.first() else { return Ok(()) };
    let error = format!("the program of dataplane_options routes single addresses, and {prefix} is a prefix");
    Err(CniError::internal(error).with_details("name pools of addresses in ipam, or leave dataplane_options out"))
}

/// Removes the interfaces of a call that fails. The runtime calls DEL, too, so an error here is only logged.
pub(super) fn unmake(add: &Add<'_, '_>) {
    match add.setup.dataplane() {
        Ok(Dataplane::Grpc(program)) => {
            let setup = add.setup;
            let netns = setup.netns();
            let removed = add.run(async |deadline| {
                program.del(&setup.call.interface, &netns.to_string_lossy(), deadline.remaining()).await
            });
            if let Err(error) = removed {
                tracing::warn!(%error, "an interface of a failed ADD stays until DEL");
            }
        }
        _ => add.disconnect(),
    }
}

fn request(
    add: &Add<'_, '_>,
    plan: &Plan,
    assigned: &AddResult,
    annotations: &BTreeMap<String, String>,
    name: &str,
    facts: &EndpointFacts,
) -> AddRequest {
    let setup = add.setup;
    let port = |port: &ipam_core::model::EndpointPort| Port {
        name: port.name.clone(),
        protocol: port.protocol.clone(),
        port: port.port.into(),
        host_port: port.host_port.into(),
        host_ip: port.host_ip.clone(),
    };
    AddRequest {
        interface_name: setup.call.interface.clone(),
        netns: setup.netns().to_string_lossy().into_owned(),
        desired_host_interface_name: facts.interface.clone(),
        settings: Some(ContainerSettings {
            allow_ip_forwarding: setup.conf.allow_ip_forwarding,
            mtu: i32::try_from(plan.mtu).unwrap_or(i32::MAX),
        }),
        container_ips: assigned.ips.iter().map(|ip| IpConfig::new(ip.address, ip.gateway)).collect(),
        container_routes: plan.routes.iter().map(ToString::to_string).collect(),
        workload: Some(WorkloadIds {
            name: name.to_owned(),
            namespace: setup.workload.namespace.clone(),
            labels: facts.labels.clone(),
            annotations: annotations.clone(),
            endpoint: facts.endpoint.clone(),
            node: facts.node.clone(),
            orchestrator: facts.orchestrator.as_str().to_owned(),
            pod: facts.pod.clone(),
            ports: facts.ports.iter().map(port).collect(),
        }),
        dataplane_options: BTreeMap::new(),
    }
}
