//! Maps blocks and addresses that Margay's allocator chose to the recorded blocks and addresses. A node's first claim
//! may pick any block, so Margay's block may differ from the recorded one. Once Margay has claimed a block, this block
//! must always correspond to the same recorded block.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

/// Pairs of the block or address that Margay chose and the corresponding recorded block or address.
#[derive(Clone, Debug, Default)]
pub(crate) struct Renamed {
    blocks: Vec<(IpNet, IpNet)>,
    /// Addresses whose ordinal in the block differs from the ordinal of the corresponding recorded address. The
    /// ordinals can differ because Calico's ADD, unlike Margay's ADD, uses up an address even if the ADD fails early.
    addresses: Vec<(IpAddr, IpAddr)>,
}

impl Renamed {
    /// Adds to the map, for each handle in both Margay's and the recorded state, Margay's blocks or addresses with
    /// their recorded counterparts. Within a handle and an address family, the first block corresponds to the first
    /// recorded block, and so on.
    pub(crate) fn learn(&mut self, wanted: &Value, came: &Value) {
        for (handle, blocks) in wanted["etcd"]["ipam"]["handles"].as_object().into_iter().flatten() {
            for v4 in [true, false] {
                let recorded = self.unknown(blocks, v4, |(_, recorded)| *recorded);
                let ours = self.unknown(&came["etcd"]["ipam"]["handles"][handle], v4, |(ours, _)| *ours);
                self.blocks.extend(ours.into_iter().zip(recorded));
            }
        }
        let came = self.applied(came);
        let held = |state: &Value| -> Vec<(String, IpAddr)> {
            let addresses = state["etcd"]["ipam"]["addresses"].as_object().into_iter().flatten();
            let parsed = addresses.filter_map(|(text, held)| Some((held["handle"].to_string(), text.parse().ok()?)));
            parsed.collect()
        };
        let (recorded, ours) = (held(wanted), held(&came));
        let missing: Vec<_> = recorded.iter().filter(|one| !ours.contains(one)).collect();
        for (handle, address) in ours.iter().filter(|one| !recorded.contains(one)) {
            let of_same =
                |(other, wanted): &&&(String, IpAddr)| other == handle && wanted.is_ipv4() == address.is_ipv4();
            if let Some((_, wanted)) = missing.iter().find(of_same)
                && !self.addresses.iter().any(|(from, to)| from == address || to == wanted)
            {
                self.addresses.push((*address, *wanted));
            }
        }
    }

    fn unknown(&self, blocks: &Value, v4: bool, side: impl Fn(&(IpNet, IpNet)) -> IpNet) -> Vec<IpNet> {
        let blocks = blocks.as_object().into_iter().flatten().filter_map(|(block, _)| block.parse::<IpNet>().ok());
        blocks
            .filter(|block| block.addr().is_ipv4() == v4 && !self.blocks.iter().any(|pair| side(pair) == *block))
            .collect()
    }

    /// Replaces Margay's addresses in an outcome with the corresponding recorded addresses.
    pub(crate) fn applied(&self, came: &Value) -> Value {
        match came {
            Value::String(text) => self.text(text).into(),
            Value::Array(items) => items.iter().map(|item| self.applied(item)).collect(),
            Value::Object(fields) => {
                let blocks = Self { blocks: self.blocks.clone(), addresses: Vec::new() };
                let inside = |name: &str| if name == "handles" { &blocks } else { self };
                fields.iter().map(|(name, value)| (self.text(name), inside(name).applied(value))).collect()
            }
            other => other.clone(),
        }
    }

    fn text(&self, text: &str) -> String {
        let is_of_address = |letter: char| letter.is_ascii_hexdigit() || matches!(letter, ':' | '.');
        let (mut done, mut rest) = (String::new(), text);
        while let Some(begin) = rest.find(is_of_address) {
            done.push_str(&rest[..begin]);
            let end = rest[begin..].find(|letter| !is_of_address(letter)).map_or(rest.len(), |length| begin + length);
            done.push_str(&self.token(&rest[begin..end]));
            rest = &rest[end..];
        }
        done + rest
    }

    fn token(&self, token: &str) -> String {
        let address = token.parse::<IpAddr>().ok();
        let of_block = |address: IpAddr| {
            let (ours, recorded) = self.blocks.iter().find(|(ours, _)| ours.contains(&address))?;
            Some(match (address, ours.network(), recorded.network()) {
                (IpAddr::V4(it), IpAddr::V4(from), IpAddr::V4(to)) => {
                    IpAddr::from((u32::from(it) - u32::from(from) + u32::from(to)).to_be_bytes())
                }
                (IpAddr::V6(it), IpAddr::V6(from), IpAddr::V6(to)) => {
                    IpAddr::from((u128::from(it) - u128::from(from) + u128::from(to)).to_be_bytes())
                }
                _ => return None,
            })
        };
        let of_address = |address: IpAddr| {
            let found = self.addresses.iter().find(|(ours, _)| *ours == address);
            found.map_or(address, |(_, recorded)| *recorded)
        };
        let renamed = address.map(|address| (address, of_address(of_block(address).unwrap_or(address))));
        // Replace a string only if it contains a renamed address: a hardware address of eight bytes would also parse as
        // an IPv6 address.
        renamed.filter(|(from, to)| from != to).map_or_else(|| token.to_owned(), |(_, to)| to.to_string())
    }
}
