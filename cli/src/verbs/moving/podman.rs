//! Reading what `podman inspect` has printed about containers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::Path;

use serde::Deserialize;

use super::take_over::{Lease, Leases, LeftOut};
use crate::error::{Failure, Result};
use crate::output::printable;

/// The interface of a container that is in one network.
const INTERFACE: &str = "eth0";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    id: String,
    #[serde(default)]
    network_settings: NetworkSettings,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct NetworkSettings {
    networks: Option<BTreeMap<String, Network>>,
}

#[derive(Deserialize)]
struct Network {
    #[serde(rename = "IPAddress", default)]
    v4: String,
    #[serde(rename = "GlobalIPv6Address", default)]
    v6: String,
}

/// Reads a file, or stdin, and takes the containers of one network.
pub(super) fn read(file: &Path, network: &str) -> Result<Leases> {
    let mut text = String::new();
    let read = match file == Path::new("-") {
        true => io::stdin().read_to_string(&mut text),
        false => File::open(file).and_then(|mut file| file.read_to_string(&mut text)),
    };
    let hint = "give what `podman inspect` prints about containers";
    read.map_err(|error| Failure::new(format!("cannot read {}: {error}", file.display())).hint(hint))?;
    let containers: Vec<Container> = serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("{} is no list of containers: {error}", file.display())).hint(hint))?;
    let mut found = Leases::default();
    for container in containers {
        let networks = container.network_settings.networks.unwrap_or_default();
        let Some(of) = networks.get(network) else { continue };
        let addresses: Vec<IpAddr> = [&of.v4, &of.v6].into_iter().filter_map(|text| text.parse().ok()).collect();
        if networks.len() > 1 {
            let which = format!("container {}", printable(&container.id));
            found.left_out.push(LeftOut::new(which, "it is in several networks, and its interfaces are not told"));
        } else if !addresses.is_empty() {
            let (container, interface) = (container.id, INTERFACE.to_owned());
            found.leases.push(Lease { container, interface, addresses, given_at: None });
        }
    }
    Ok(found)
}
