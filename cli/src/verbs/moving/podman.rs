//! Reading the addresses of podman's containers from the output of `podman inspect`.

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
/// A length that the output about all containers of a machine does not reach.
const LONGEST: u64 = 256 << 20;
const HINT: &str = "give what `podman inspect` prints about containers";
/// The offset and the value of the magic number of bbolt's files. Podman's own file, `ipam.db`, is one.
const BOLT: (usize, [u8; 4]) = (16, 0xED0C_DAED_u32.to_le_bytes());

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
    let bytes = content(file, HINT)?;
    if bytes.get(BOLT.0..).is_some_and(|rest| rest.starts_with(&BOLT.1)) {
        return Err(Failure::new(format!("{} is podman's own file, which margay does not read", file.display())).hint(
            format!(
                "give what podman says: podman inspect $(podman ps -q) | margay import podman - --network {network}"
            ),
        ));
    }
    inspected(&bytes, network)
        .map_err(|error| Failure::new(format!("{} is no list of containers: {error}", file.display())).hint(HINT))
}

/// The content of a file, or of stdin.
pub(super) fn content(path: &Path, hint: &str) -> Result<Vec<u8>> {
    let failed = |error: io::Error| Failure::new(format!("cannot read {}: {error}", path.display())).hint(hint);
    let mut bytes = Vec::new();
    let read = match path == Path::new("-") {
        true => io::stdin().take(LONGEST + 1).read_to_end(&mut bytes),
        false => File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes)),
    };
    read.map_err(failed)?;
    match bytes.len() as u64 > LONGEST {
        true => Err(Failure::new(format!("{} has more than {} MiB", path.display(), LONGEST >> 20)).hint(hint)),
        false => Ok(bytes),
    }
}

fn inspected(json: &[u8], network: &str) -> serde_json::Result<Leases> {
    let containers: Vec<Container> = serde_json::from_slice(json)?;
    let mut found = Leases::default();
    for container in containers {
        let networks = container.network_settings.networks.unwrap_or_default();
        let Some(of) = networks.get(network) else { continue };
        let addresses: Vec<IpAddr> = [&of.v4, &of.v6].into_iter().filter_map(|text| text.parse().ok()).collect();
        if networks.len() > 1 {
            let why = "it is in several networks, and the file does not say which interface is in which";
            found.left_out.push(LeftOut::new(format!("container {}", printable(&container.id)), why));
        } else if !addresses.is_empty() {
            let lease =
                Lease { container: container.id, interface: INTERFACE.to_owned(), addresses, ..Lease::default() };
            found.leases.push(lease);
        }
    }
    Ok(found)
}
