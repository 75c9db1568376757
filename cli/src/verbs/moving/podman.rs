//! Reading what podman knows of its containers' addresses: what `podman inspect` has printed, or its own file.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::bolt::is_bolt;
use super::ipam_db;
use super::take_over::{Lease, Leases, LeftOut};
use crate::error::{Failure, Result};
use crate::output::printable;
use crate::store;

/// The interface of a container that is in one network.
const INTERFACE: &str = "eth0";
/// Longer than what podman says of all the containers that a machine can have.
const LONGEST: u64 = 256 << 20;
/// How often to look whether podman has closed its file; it has it open for some milliseconds.
const PAUSE: Duration = Duration::from_millis(5);
const HINT: &str = "give what `podman inspect` prints about containers, or podman's own file, ipam.db";

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
    let bytes = content(file)?;
    if !is_bolt(&bytes) {
        return inspected(&bytes, network)
            .map_err(|error| Failure::new(format!("{} is no list of containers: {error}", file.display())).hint(HINT));
    }
    let networks = ipam_db::read(&bytes).map_err(|what| {
        Failure::new(format!("{} is damaged: {what}", file.display()))
            .hint("give what `podman inspect` prints about containers")
    })?;
    ipam_db::of_network(&networks, network).ok_or_else(|| {
        let names: Vec<_> = networks.keys().map(|name| printable(name)).collect();
        Failure::new(format!("{} has no network {}", file.display(), printable(network)))
            .hint(format!("a network is in it from its first container on; these are: {}", names.join(", ")))
    })
}

fn content(path: &Path) -> Result<Vec<u8>> {
    let failed = |error: io::Error| Failure::new(format!("cannot read {}: {error}", path.display())).hint(HINT);
    let mut bytes = Vec::new();
    let read = match path == Path::new("-") {
        true => io::stdin().take(LONGEST + 1).read_to_end(&mut bytes),
        false => {
            let file = File::open(path).map_err(failed)?;
            wait_for_podman(&file, path)?;
            file.take(LONGEST + 1).read_to_end(&mut bytes)
        }
    };
    read.map_err(failed)?;
    match bytes.len() as u64 > LONGEST {
        true => Err(Failure::new(format!("{} has more than {} MiB", path.display(), LONGEST >> 20)).hint(HINT)),
        false => Ok(bytes),
    }
}

/// podman locks its file while it has it open. What cannot be locked, such as a pipe, it has not open either.
fn wait_for_podman(file: &File, path: &Path) -> Result<()> {
    let begun = Instant::now();
    while let Err(TryLockError::WouldBlock) = file.try_lock_shared() {
        if begun.elapsed() >= store::wait() {
            let busy = format!("{} is in use by podman: waited {:?} for it", path.display(), store::wait());
            return Err(Failure::new(busy).hint(
                "end the podman that hangs, or try again, longer with --lock-timeout 5m; or give what `podman inspect` prints",
            ));
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn inspected(json: &[u8], network: &str) -> serde_json::Result<Leases> {
    let containers: Vec<Container> = serde_json::from_slice(json)?;
    let mut found = Leases::default();
    for container in containers {
        let networks = container.network_settings.networks.unwrap_or_default();
        let Some(of) = networks.get(network) else { continue };
        let addresses: Vec<IpAddr> = [&of.v4, &of.v6].into_iter().filter_map(|text| text.parse().ok()).collect();
        if networks.len() > 1 {
            found.left_out.push(in_several(&container.id));
        } else if !addresses.is_empty() {
            found.leases.push(lease(container.id, addresses));
        }
    }
    Ok(found)
}

pub(super) fn lease(container: String, addresses: Vec<IpAddr>) -> Lease {
    Lease { container, interface: INTERFACE.to_owned(), addresses, given_at: None }
}

pub(super) fn in_several(container: &str) -> LeftOut {
    left_out(container, "it is in several networks, and its interfaces are not told")
}

pub(super) fn left_out(container: &str, why: &str) -> LeftOut {
    LeftOut::new(format!("container {}", printable(container)), why)
}
