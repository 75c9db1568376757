//! Masquerading: one rule set of nftables translates the addresses of packets that the containers of a store send to the world.
//!
//! Packets to any pool leave as they are, so that containers see each other's addresses. All else that comes from a pool that
//! is masqueraded gets the address of the interface by which it leaves. Packets to the host itself never pass here.
//!
//! The rules of a store are in the tables `ip margay-NAME` and `ip6 margay-NAME`, which are that store's alone: no other table is
//! read or changed. The kernel translates addresses where any table says so, so this goes beside the rules of Docker, firewalld or
//! iptables. A program that empties all of nftables (`nft flush ruleset`) takes these rules away, too; the next
//! [`ensure`] makes them again.
//!
//! The messages are made by netlink-packet-netfilter (MIT), of the same project as the crates for interfaces and routes.
//! Other crates are unsuitable: the crate nftables runs the program nft, nftnl needs a C library, rustables is under the GPL, and
//! nf_tables has had one release.

use std::collections::BTreeSet;

use ipnet::IpNet;
use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::error::{Errno, Error};
use crate::netlink::{Request, Socket};
use crate::nftables::{self, Family, Rule};

/// The longest name of a table that the kernel takes, in bytes.
const MOST: usize = 255;

/// The name of the tables of a store, in characters that nft reads.
fn table(store: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || "._-".contains(letter) { letter } else { '_' };
    let name = store.chars().map(plain);
    "margay-".chars().chain(name).take(MOST).collect()
}

/// Makes the rule set of a store on this host equal to these pools, all at once: `masqueraded` are those whose packets leave under the
/// host's address, and `pools` are all. Where no pool of a family is masqueraded, the family's table goes.
///
/// `store` names the store: programs that name it alike have one rule set. It costs two requests that read if nothing is to change. A rule is known by its comment, so one that was changed by hand
/// and kept its comment stays. Any number of callers may do this at once; the last one's pools count.
///
/// The caller needs `CAP_NET_ADMIN`, and the kernel nf_tables with NAT. Without those it is an error only if there is
/// anything to be masqueraded.
///
/// # Errors
///
/// The refusal of the kernel, and the advice about it. Nothing has changed then.
pub fn ensure(store: &str, masqueraded: &[IpNet], pools: &[IpNet]) -> Result<(), Error> {
    let table = table(store);
    let socket = match Socket::open(NETLINK_NETFILTER) {
        Ok(socket) => socket,
        Err(_) if masqueraded.is_empty() => return Ok(()),
        Err(errno) => return Err(failed("failed to open a netlink socket to nftables", errno)),
    };
    let mut changes = Vec::new();
    for family in Family::BOTH {
        let wanted = rules(family, masqueraded, pools);
        let present = match nftables::rules(&socket, family, &table) {
            Ok(present) => present,
            Err(errno) if wanted.is_empty() && (is_unknown(errno) || errno == Errno::NOT_PERMITTED) => continue,
            Err(errno) => return Err(failed("failed to read the rules of nftables", errno)),
        };
        if present != wanted.iter().map(|rule| rule.user_data()).collect::<Vec<_>>() {
            changes.extend(if wanted.is_empty() {
                nftables::remove(family, &table)
            } else {
                nftables::replace(family, &table, &wanted)
            });
        }
    }
    change(&socket, &changes)
}

/// As [`ensure`], on a host that has a rule set of the store already; on another, nothing changes. It is for programs that change pools
/// and do not know whether containers run on this host.
///
/// # Errors
///
/// Those of [`ensure`].
pub fn refresh(store: &str, masqueraded: &[IpNet], pools: &[IpNet]) -> Result<(), Error> {
    if has_tables(&table(store))? { ensure(store, masqueraded, pools) } else { Ok(()) }
}

/// Whether there is a table of this name. A kernel without nf_tables has none.
fn has_tables(table: &str) -> Result<bool, Error> {
    let failed = |errno| failed("failed to read the tables of nftables", errno);
    let socket = match Socket::open(NETLINK_NETFILTER) {
        Ok(socket) => socket,
        Err(Errno::NO_PROTOCOL) => return Ok(false),
        Err(errno) => return Err(failed(errno)),
    };
    for family in Family::BOTH {
        match nftables::has_table(&socket, family, table) {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(errno) if is_unknown(errno) => {}
            Err(errno) => return Err(failed(errno)),
        }
    }
    Ok(false)
}

fn change(socket: &Socket, changes: &[Request]) -> Result<(), Error> {
    if changes.is_empty() {
        return Ok(());
    }
    nftables::change_all(socket, changes).map_err(|(what, errno)| failed(&what, errno))
}

/// The rules of a family, in an order that depends on the networks alone; none if nothing is masqueraded.
fn rules(family: Family, masqueraded: &[IpNet], pools: &[IpNet]) -> Vec<Rule> {
    let of_family = |networks: &mut dyn Iterator<Item = &IpNet>| -> BTreeSet<IpNet> {
        networks.filter(|network| Family::of(network) == family).map(IpNet::trunc).collect()
    };
    let from = of_family(&mut masqueraded.iter());
    if from.is_empty() {
        return Vec::new();
    }
    let to = of_family(&mut pools.iter().chain(masqueraded));
    to.into_iter().map(Rule::Keep).chain(from.into_iter().map(Rule::Masquerade)).collect()
}

/// True for how a kernel without nf_tables, or without a family of it, answers.
fn is_unknown(errno: Errno) -> bool {
    [Errno::WRONG, Errno::NOT_SUPPORTED, Errno::NO_PROTOCOL, Errno::NO_FAMILY].contains(&errno)
}

fn failed(what: &str, errno: Errno) -> Error {
    let advice = match errno {
        Errno::NOT_PERMITTED => "; it takes root, or CAP_NET_ADMIN in the host's network namespace",
        // A part of nf_tables that is missing is one that cannot be found.
        errno if is_unknown(errno) || errno == Errno::NOT_FOUND => {
            "; the kernel needs nf_tables with NAT (modules nf_tables, nft_chain_nat and nft_masq), or no pool may have \
             natOutgoing"
        }
        _ => "",
    };
    Error::failed(what, format_args!("{errno}{advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn rules_depend_on_the_networks_alone() {
        let expected = ["10.65.0.0/16", "10.66.0.0/16"].map(|text| Rule::Keep(text.parse().unwrap()));
        let expected = [&expected[..], &[Rule::Masquerade("10.66.0.0/16".parse().unwrap())]].concat();
        let masqueraded = nets(&["10.66.0.0/16"]);
        for pools in [
            nets(&["10.65.0.0/16", "10.66.0.0/16", "fd80::/64"]),
            nets(&["fd80::/64", "10.66.0.0/16", "10.65.0.0/16", "10.65.0.0/16"]),
            nets(&["10.65.7.0/16"]),
        ] {
            assert_eq!(rules(Family::Ipv4, &masqueraded, &pools), expected, "{pools:?}");
            assert_eq!(rules(Family::Ipv6, &masqueraded, &pools), []);
        }
    }

    #[test]
    fn errors_say_what_to_do() {
        let said = |errno| failed("failed to x", errno).to_string();
        assert!(
            said(Errno::NOT_PERMITTED)
                .ends_with("operation not permitted; it takes root, or CAP_NET_ADMIN in the host's network namespace")
        );
        assert!(said(Errno::NOT_FOUND).contains("no such file or directory; the kernel needs nf_tables with NAT"));
        assert_eq!(said(Errno::EXISTS), "failed to x: file exists");
    }
}
