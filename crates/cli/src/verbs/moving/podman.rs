//! Reading the addresses of podman's containers from the output of `podman inspect`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use datastore::text_fault;
use serde::Deserialize;

use super::take_over::{Lease, Leases, LeftOut, TakingOver, Terms};
use crate::command::{Call, Standalone};
use crate::error::{Failure, Result};
use crate::output::printable;

pub(crate) const HELP: &str = "\
Examples:
  podman inspect $(podman ps -q) | margay import podman - --network lab

For podman with netavark, which keeps no files for host-local. A container in
several networks is left out: podman does not say which interface is in which.
With CNI podman uses host-local: margay import host-local.";

#[derive(Debug, Args)]
pub(crate) struct FromPodman {
    /// The output of `podman inspect`; - for stdin
    pub(crate) file: PathBuf,

    #[command(flatten)]
    pub(crate) terms: Terms,
}

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
    network_settings: Option<NetworkSettings>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct NetworkSettings {
    networks: Option<BTreeMap<String, Option<Network>>>,
}

#[derive(Deserialize)]
struct Network {
    #[serde(rename = "IPAddress")]
    v4: Option<String>,
    #[serde(rename = "GlobalIPv6Address")]
    v6: Option<String>,
}

impl Standalone for FromPodman {
    fn run(&self, call: &mut Call<'_>) -> Result<u8> {
        let found = read(&self.file, &self.terms.network)?;
        call.on_store(&TakingOver::new(found, &self.terms))
    }
}

/// Reads a file, or stdin, and takes the containers of one network.
fn read(file: &Path, network: &str) -> Result<Leases> {
    let bytes = content(file, HINT)?;
    if bytes.get(BOLT.0..).is_some_and(|rest| rest.starts_with(&BOLT.1)) {
        return Err(Failure::new(format!("{} is podman's own file, which margay does not read", file.display())).hint(
            format!(
                "give what podman says: podman inspect $(podman ps -q) | margay import podman - --network {network}"
            ),
        ));
    }
    let containers: Vec<Container> = serde_json::from_slice(&bytes).map_err(|error| {
        let fault = text_fault(&bytes).map_or_else(|| error.to_string(), |fault| fault.to_string());
        Failure::new(format!("{} is no list of containers: {fault}", file.display())).hint(HINT)
    })?;
    require_network(&containers, network).map_err(|why| {
        Failure::new(format!("{}: {why}", file.display())).hint("see the names with: podman network ls")
    })?;
    Ok(leases(containers, network))
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

impl Container {
    fn networks(&self) -> impl Iterator<Item = (&String, &Option<Network>)> {
        self.network_settings.iter().filter_map(|settings| settings.networks.as_ref()).flatten()
    }
}

/// Refuses a list whose containers are all in other networks: the name is wrong.
fn require_network(containers: &[Container], network: &str) -> std::result::Result<(), String> {
    let names: BTreeSet<&str> =
        containers.iter().flat_map(Container::networks).map(|(name, _)| name.as_str()).collect();
    if names.is_empty() || names.contains(network) {
        return Ok(());
    }
    let names: Vec<String> = names.into_iter().map(printable).collect();
    Err(format!("none of its containers is in network {}; they are in {}", printable(network), names.join(", ")))
}

/// The leases of the containers in a network. A container that does not run has no address.
fn leases(containers: Vec<Container>, network: &str) -> Leases {
    let mut found = Leases::default();
    for container in containers {
        let Some((_, Some(of))) = container.networks().find(|(name, _)| *name == network) else { continue };
        let texts = [&of.v4, &of.v6].into_iter().flatten().filter(|text| !text.is_empty());
        let addresses = texts.map(|text| text.parse::<IpAddr>().map_err(|_| text)).collect::<Result<Vec<_>, _>>();
        let mut leave_out =
            |why: String| found.left_out.push(LeftOut::new(format!("container {}", printable(&container.id)), why));
        match addresses {
            _ if container.networks().count() > 1 => {
                leave_out(
                    "it is in several networks, and the file does not say which interface is in which".to_owned(),
                );
            }
            Err(text) => leave_out(format!("{:?} is no address", printable(text))),
            Ok(addresses) if addresses.is_empty() => {}
            Ok(addresses) => found.leases.push(Lease {
                container: container.id,
                interface: INTERFACE.to_owned(),
                addresses,
                ..Lease::default()
            }),
        }
    }
    found
}
