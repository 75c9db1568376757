//! Reading `ipam.db`, the file in which podman notes which addresses it has given for netavark: a bbolt file.
//!
//! A network is a bucket. In it each subnet is a bucket of addresses (4 or 16 bytes) with the container's id, and of `lastIP`;
//! and the bucket `ids` has each container's addresses as JSON. Both are written at once, so what they disagree on is damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::bolt::{Bolt, Bucket, Value};
use super::podman::{in_several, lease, left_out};
use super::take_over::Leases;
use crate::output::printable;

const IDS: &[u8] = b"ids";

/// By name.
pub(super) type Networks = BTreeMap<String, Containers>;
/// By id.
type Containers = BTreeMap<String, Noted>;

/// What a container has in a network, as is noted in both places.
#[derive(Debug, Default)]
pub(super) struct Noted {
    by_subnet: BTreeSet<IpAddr>,
    by_id: BTreeSet<IpAddr>,
}

/// Reads a file; the error is what is wrong with it.
pub(super) fn read(bytes: &[u8]) -> Result<Networks, String> {
    let mut file = Bolt::new(bytes)?;
    let root = file.root();
    let networks = buckets(&mut file, root)?;
    networks.into_iter().map(|(name, network)| Ok((text(name), containers(&mut file, network)?))).collect()
}

fn containers<'a>(file: &mut Bolt<'a>, network: Bucket<'a>) -> Result<Containers, String> {
    let mut containers = Containers::new();
    for (name, bucket) in buckets(file, network)? {
        for (key, value) in file.entries(bucket)? {
            let Value::Bytes(value) = value else { return Err(format!("{} is a bucket", printable(&text(key)))) };
            if name == IDS {
                let addresses: Vec<IpAddr> = serde_json::from_slice(value).unwrap_or_default();
                containers.entry(text(key)).or_default().by_id.extend(addresses);
            } else if let Some(address) = address(key) {
                containers.entry(text(value)).or_default().by_subnet.insert(address);
            }
        }
    }
    Ok(containers)
}

fn buckets<'a>(file: &mut Bolt<'a>, bucket: Bucket<'a>) -> Result<Vec<(&'a [u8], Bucket<'a>)>, String> {
    let bucket_of = |(name, value)| match value {
        Value::Bucket(bucket) => Ok((name, bucket)),
        Value::Bytes(_) => Err(format!("{} is no bucket", printable(&text(name)))),
    };
    file.entries(bucket)?.into_iter().map(bucket_of).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `None` for `lastIP`.
fn address(key: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(key).map(IpAddr::from);
    // Go may keep an IPv4 address in 16 bytes, too.
    v4.or_else(|_| <[u8; 16]>::try_from(key).map(|bytes| IpAddr::from(bytes).to_canonical())).ok()
}

/// What the containers of a network have, if there is one of this name.
pub(super) fn of_network(networks: &Networks, name: &str) -> Option<Leases> {
    let mut found = Leases::default();
    let is_elsewhere = |id| networks.iter().any(|(other, containers)| other != name && containers.contains_key(id));
    for (id, noted) in networks.get(name)? {
        if is_elsewhere(id) {
            found.left_out.push(in_several(id));
        } else if noted.by_subnet != noted.by_id {
            found.left_out.push(left_out(id, "the file's two lists of its addresses differ"));
        } else {
            found.leases.push(lease(id.clone(), noted.by_id.iter().copied().collect()));
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// What podman 4.3 has written, see `fixtures/README.md`.
    fn real() -> Vec<u8> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/podman/ipam.db.gz");
        let unpacked = Command::new("gzip").args(["-dc", path]).output().unwrap();
        assert!(unpacked.status.success(), "{unpacked:?}");
        unpacked.stdout
    }

    /// Each address of a network with its container's id, and how much is left out.
    fn given(bytes: &[u8], network: &str) -> Option<(BTreeSet<(IpAddr, String)>, usize)> {
        let found = of_network(&read(bytes).ok()?, network)?;
        let all = found.leases.iter().flat_map(|lease| lease.addresses.iter().map(|ip| (*ip, lease.container.clone())));
        Some((all.collect(), found.left_out.len()))
    }

    #[test]
    fn a_real_file_has_what_podman_says_of_its_containers() {
        let inspected: serde_json::Value =
            serde_json::from_str(include_str!("../../../../fixtures/podman/inspect.json")).unwrap();
        for (network, addresses, left_out) in [("lab", 47, 1), ("dual", 2, 1), ("ranged", 2, 0)] {
            let mut said = BTreeSet::new();
            for container in inspected.as_array().unwrap() {
                let of = &container["NetworkSettings"]["Networks"];
                if of.as_object().unwrap().len() == 1 {
                    let address = |name| of[network][name].as_str().and_then(|text| text.parse::<IpAddr>().ok());
                    let both = [address("IPAddress"), address("GlobalIPv6Address")].into_iter().flatten();
                    said.extend(both.map(|address| (address, container["Id"].as_str().unwrap().to_owned())));
                }
            }
            assert_eq!(said.len(), addresses, "{network}");
            assert_eq!(given(&real(), network).unwrap(), (said, left_out), "{network}");
        }
        assert_eq!(given(&real(), "la"), None);
    }

    #[test]
    fn the_state_before_holds_while_the_last_one_is_not_whole() {
        let mut file = real();
        let (last, _) = given(&file, "lab").unwrap();
        // The checksum of page 0, which is the later one.
        file[16 + 56] ^= 1;
        let (before, _) = given(&file, "lab").unwrap();
        assert_eq!((before.len(), before.difference(&last).count()), (last.len() + 1, 1), "one was removed at last");
        file[4096 + 16 + 56] ^= 1;
        assert_eq!(read(&file).unwrap_err(), "neither page 0 nor page 1 is whole");
    }

    #[test]
    fn a_damaged_file_is_never_taken_for_another() {
        let file = real();
        let mut before = file.clone();
        before[16] ^= 1;
        let states = [&file, &before].map(|file| given(file, "lab").unwrap().0);
        let sound = |file: &[u8]| match given(file, "lab") {
            Some((given, _)) => states.iter().any(|state| given.is_subset(state)),
            None => true,
        };
        // What is behind has never been written to.
        let written = 20 * 4096;
        let mut random = fastrand::Rng::with_seed(1);
        let mut changed = file.clone();
        let mut refused = 0;
        for at in (0..written).step_by(9) {
            let bit = 1 << random.u8(..8);
            changed[at] ^= bit;
            assert!(sound(&changed), "byte {at}, bit {bit}");
            refused += usize::from(given(&changed, "lab").is_none());
            changed[at] ^= bit;
        }
        assert!(refused > 100, "{refused}");
        for length in (0..written).step_by(331) {
            assert!(sound(&file[..length]), "{length} bytes");
        }
        // Much is wrong: there is an answer or an error.
        for _ in 0..2000 {
            let mut changed = file.clone();
            for _ in 0..random.usize(2..200) {
                let place = random.usize(..written);
                let from = random.usize(..written);
                match random.u8(..3) {
                    0 => changed[place] = random.u8(..),
                    1 => changed.copy_within(from..(from + 16).min(written), place),
                    _ => changed[place..(place + 4).min(written)].fill(0xff),
                }
            }
            // Without the checksum of the first two pages, which would refuse nearly all.
            changed[..2 * 4096].copy_from_slice(&file[..2 * 4096]);
            _ = given(&changed, "lab");
        }
    }
}
