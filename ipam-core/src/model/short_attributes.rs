//! Shortens Margay's attributes of an allocation in a stored block.
//!
//! Every ADD and DEL writes a whole block, and etcd keeps each version of the block until a compaction. In their long
//! form, Margay's attributes for the interface, the boot and the network namespace make a block a third larger than one
//! that Calico writes. Margay stores the attributes for the boot, the network namespace and `eth0` as one, [`SHORT`]: 6
//! characters of base64url (the boot id), a dot, and the namespace's inode. An entry with [`SHORT`] but without an
//! interface has the interface `eth0`.
//!
//! Blocks from earlier versions, which store the attributes in their long form, can also be read. In memory, the
//! attributes always have their long form.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::attachment::{BOOT, INTERFACE, NETNS, NODE};

/// The stored attribute that replaces Margay's attributes for boot, network namespace and the interface `eth0`.
const SHORT: &str = "margay";
/// The interface that [`SHORT`] implies if the stored attributes have no interface.
const IMPLIED_INTERFACE: &str = "eth0";
/// The device number of network namespaces on almost all kernels.
const NETNS_DEVICE: &str = "4:";
/// The first inode number that Linux uses for namespaces (`PROC_DYNAMIC_FIRST`).
const FIRST_INODE: u64 = 0xF000_0000;

/// Returns whether the attributes of an allocation are stored in the short form: on Calico's networks, whose allocations
/// have the attribute `node`. On other networks the attributes stay written out, because there an earlier version of
/// Margay on the same machine must find its containers' addresses, and few of these networks are on etcd.
pub(super) fn is_shortened(attributes: &BTreeMap<String, String>) -> bool {
    attributes.contains_key(NODE) && attributes.contains_key(INTERFACE) && !attributes.contains_key(SHORT)
}

/// Returns the attributes as they are stored, shortened where possible. Only the attributes of an attachment, which
/// have an interface, are shortened. An attribute with an unusual value is not shortened.
pub(super) fn shorten(attributes: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut stored = attributes.clone();
    if !is_shortened(&stored) {
        return stored;
    }
    if stored.get(INTERFACE).is_some_and(|interface| interface == IMPLIED_INTERFACE) {
        stored.remove(INTERFACE);
    }
    let mut short = String::new();
    if let Some(boot) = stored.get(BOOT).and_then(|boot| short_boot(boot)) {
        short.push_str(&boot);
        stored.remove(BOOT);
    }
    if let Some(netns) = stored.get(NETNS).and_then(|netns| short_netns(netns)) {
        short.push('.');
        short.push_str(&netns);
        stored.remove(NETNS);
    }
    stored.insert(SHORT.to_owned(), short);
    stored
}

/// Replaces the attribute [`SHORT`] of a stored allocation by the written-out attributes. A value of [`SHORT`] that
/// [`shorten`] cannot have written is kept as an unknown attribute.
pub(super) fn expand(attributes: &mut BTreeMap<String, String>) {
    let Some((boot, netns)) = attributes.get(SHORT).and_then(|short| parse(short)) else { return };
    attributes.remove(SHORT);
    let written_out = [(BOOT, boot), (NETNS, netns), (INTERFACE, Some(IMPLIED_INTERFACE.to_owned()))];
    for (name, value) in written_out {
        if let Some(value) = value {
            attributes.entry(name.to_owned()).or_insert(value);
        }
    }
}

/// Returns the boot id and the network namespace in a value of [`SHORT`], or `None` for a value in another form.
fn parse(short: &str) -> Option<(Option<String>, Option<String>)> {
    let (boot, netns) = short.split_once('.').map_or((short, None), |(boot, netns)| (boot, Some(netns)));
    let boot = match boot {
        "" => None,
        boot => Some(long_boot(boot)?),
    };
    let netns = match netns {
        None => None,
        Some(netns) => Some(long_netns(netns)?),
    };
    Some((boot, netns))
}

fn short_boot(boot: &str) -> Option<String> {
    let bits = u32::from_str_radix(boot, 16).ok().filter(|bits| format!("{bits:08x}") == boot)?;
    Some(URL_SAFE_NO_PAD.encode(bits.to_be_bytes()))
}

fn long_boot(short: &str) -> Option<String> {
    let bytes: [u8; 4] = URL_SAFE_NO_PAD.decode(short).ok()?.try_into().ok()?;
    Some(format!("{:08x}", u32::from_be_bytes(bytes)))
}

fn short_netns(netns: &str) -> Option<String> {
    let inode: u64 = netns.strip_prefix(NETNS_DEVICE)?.parse().ok()?;
    let short = format!("{:x}", inode.checked_sub(FIRST_INODE)?);
    long_netns(&short).is_some_and(|long| long == netns).then_some(short)
}

fn long_netns(short: &str) -> Option<String> {
    let offset = u32::from_str_radix(short, 16).ok().filter(|offset| format!("{offset:x}") == short)?;
    Some(format!("{NETNS_DEVICE}{}", FIRST_INODE + u64::from(offset)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(attributes: &[(&str, &str)]) -> BTreeMap<String, String> {
        attributes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn stored(attributes: &[(&str, &str)]) -> Vec<(String, String)> {
        shorten(&map(attributes)).into_iter().collect()
    }

    fn pairs(attributes: &[(&str, &str)]) -> Vec<(String, String)> {
        map(attributes).into_iter().collect()
    }

    #[test]
    fn short_attributes_are_these_bytes() {
        let pod = [("node", "a"), ("pod", "web"), (BOOT, "191b29e2"), (INTERFACE, "eth0"), (NETNS, "4:4026532265")];
        assert_eq!(stored(&pod), pairs(&[("node", "a"), ("pod", "web"), (SHORT, "GRsp4g.1a9")]));
        assert_eq!(stored(&[("node", "a"), (INTERFACE, "eth0")]), pairs(&[("node", "a"), (SHORT, "")]));
        let of_bridge = [("margay.io/node", "a"), (INTERFACE, "eth0"), (BOOT, "191b29e2")];
        assert_eq!(stored(&of_bridge), pairs(&of_bridge));
        assert_eq!(
            stored(&[("node", "a"), (INTERFACE, "net1"), (BOOT, "00000000")]),
            pairs(&[("node", "a"), (INTERFACE, "net1"), (SHORT, "AAAAAA")])
        );
        let unusual = [("node", "a"), (INTERFACE, "eth0"), (BOOT, "191B29E2"), (NETNS, "5:4026532265")];
        assert_eq!(stored(&unusual), pairs(&[("node", "a"), (SHORT, ""), (BOOT, "191B29E2"), (NETNS, "5:4026532265")]));
        let of_calico = [("pod", "web"), ("node", "a")];
        assert_eq!(stored(&of_calico), pairs(&of_calico));
    }

    #[test]
    fn short_attributes_of_other_forms_are_kept() {
        for value in ["GRsp4", "GRsp4g.", "GRsp4g.01", "GRsp4g.1A9", "GRsp4g.100000000", "GRsp4h.1", "x", "GRsp4g.1.2"]
        {
            let mut attributes = map(&[(SHORT, value), ("pod", "web")]);
            expand(&mut attributes);
            assert_eq!(attributes, map(&[(SHORT, value), ("pod", "web")]), "{value}");
            let with_interface = [(SHORT, value), (INTERFACE, "eth0")];
            assert_eq!(stored(&with_interface), pairs(&with_interface), "an unknown value is not overwritten");
        }
    }

    #[test]
    fn short_attributes_do_not_replace_written_out_ones() {
        let mut attributes = map(&[(SHORT, "GRsp4g.1a9"), (INTERFACE, "net1"), (BOOT, "b")]);
        expand(&mut attributes);
        assert_eq!(attributes, map(&[(INTERFACE, "net1"), (BOOT, "b"), (NETNS, "4:4026532265")]));
    }

    proptest! {
        #[test]
        fn short_attributes_expand_to_the_given_ones(
            interface in prop::option::of("eth0|net1|"),
            boot in prop::option::of("[0-9a-f]{8}|[0-9A-F+]{0,9}"),
            netns in prop::option::of("4:40265[0-9]{5}|4:[0-9]{1,20}|[0-9:/]{0,12}"),
            other in prop::option::of("[a-z]{0,3}"),
        ) {
            let given: BTreeMap<String, String> = [(INTERFACE, interface), (BOOT, boot), (NETNS, netns), ("node", other)]
                .into_iter()
                .filter_map(|(name, value)| Some((name.to_owned(), value?)))
                .collect();
            let mut read = shorten(&given);
            expand(&mut read);
            prop_assert_eq!(read, given);
        }
    }
}
