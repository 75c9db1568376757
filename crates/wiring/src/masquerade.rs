//! Masquerades packets from containers. An nftables rule set translates the source addresses of packets that a store's
//! containers send to destinations outside all pools.
//!
//! Packets to an address in any pool keep their source address, so that containers see each other's addresses. Packets
//! from a masqueraded pool to destinations outside all pools get the source address of the outgoing interface. The
//! masquerading rules do not process packets to the host itself.
//!
//! The rules of a store are in the nftables tables `ip margay-NAME` and `ip6 margay-NAME`. Each store has two nftables
//! tables of its own, and this module touches no other table. The kernel translates a packet's address if the rules of
//! any table require the translation. The masquerading rules work beside the rules of Docker, firewalld or iptables,
//! which are in other tables. If a program removes all nftables rules (`nft flush ruleset`), the next call of
//! [`ensure`] restores this module's rules.
//!
//! Each table has one chain of the type `nat`, which processes the packets that are about to leave the host. In each
//! chain, the first rules exempt packets to certain destinations from masquerading. The rules after these masquerade
//! packets by their source address. Each rule has a comment, which `nft` shows. This module finds its rules in the
//! kernel's listing by these nftables comments.
//!
//! The netlink messages are encoded by netlink-packet-netfilter (MIT), from the authors of the other netlink crates
//! that this crate uses. Other Rust crates for nftables are unsuitable, because `nftables` runs the program nft,
//! `nftnl` needs a C library, `rustables` is under the GPL, and `nf_tables` has had only one release.

use std::collections::BTreeSet;

use ipnet::IpNet;
use netlink_packet_core::{DefaultNla, NLM_F_APPEND, NLM_F_CREATE, NetlinkSerializable, NlasIterator};
use netlink_packet_netfilter::nftables::{
    Bitwise, ChainAttribute, ChainMessage, Cmp, DataAttribute, Expressions, Hook, Immediate, InetHookNumber,
    NfTablesMessage, Operator, Payload, Register, RuleAttribute, RuleMessage, TableAttribute, TableMessage, Verdict,
    VerdictAttribute,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily, NetfilterSubsystem,
};
use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::error::{Errno, Error};
use crate::netlink::{NetlinkRequest, NetlinkSocket};

/// Maximum length in bytes of a table name in nftables.
const MAX_TABLE_NAME_BYTES: usize = 255;

/// Returns the name of a store's tables. Characters that nft cannot read are replaced by `_`.
fn table(store: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || "._-".contains(letter) { letter } else { '_' };
    let name = store.chars().map(plain);
    "margay-".chars().chain(name).take(MAX_TABLE_NAME_BYTES).collect()
}

/// Makes a store's rule set on this host match the store's pools, in one transaction. Packets from the pools in
/// `masqueraded` leave the host with the host's address; `pools` are all pools of the store. If no pool of an address
/// family is masqueraded, that family's table is removed.
///
/// The argument `store` is a name, and programs that pass equal names share one rule set. If the wanted rules already
/// exist, the call only sends two read requests to the kernel. The existing and the wanted rules are compared by their
/// comments, so a rule that was edited by hand is kept if its comment is unchanged. Concurrent calls are allowed, and
/// the rules match the pools of the last call.
///
/// The process needs `CAP_NET_ADMIN`, and the kernel needs nf_tables with NAT. Without `CAP_NET_ADMIN` or nf_tables,
/// the call fails only if at least one pool is to be masqueraded.
///
/// # Errors
///
/// The kernel refused the rules, and left the former rules unchanged; the error's message says what to do.
pub fn ensure(store: &str, masqueraded: &[IpNet], pools: &[IpNet]) -> Result<(), Error> {
    let table = table(store);
    let socket = match NetlinkSocket::open(NETLINK_NETFILTER) {
        Ok(socket) => socket,
        Err(_) if masqueraded.is_empty() => return Ok(()),
        Err(errno) => return Err(failed("failed to open a netlink socket to nftables", errno)),
    };
    let mut changes = Vec::new();
    for family in IpFamily::BOTH {
        let wanted = wanted_rules(family, masqueraded, pools);
        let present = match read_rules(&socket, family, &table) {
            Ok(present) => present,
            Err(errno) if wanted.is_empty() && (is_unknown(errno) || errno == Errno::NOT_PERMITTED) => continue,
            Err(errno) => return Err(failed("failed to read the rules of nftables", errno)),
        };
        if present != wanted.iter().map(|rule| rule.user_data()).collect::<Vec<_>>() {
            changes.extend(if wanted.is_empty() {
                remove_table(family, &table)
            } else {
                replace_table(family, &table, &wanted)
            });
        }
    }
    apply(&socket, &changes)
}

/// Calls [`ensure`] if this host already has a rule set of this store, and otherwise changes nothing. Use this function
/// in programs that change pools, but cannot determine whether containers of the store run on this host.
///
/// # Errors
///
/// Any error of [`ensure`].
pub fn refresh(store: &str, masqueraded: &[IpNet], pools: &[IpNet]) -> Result<(), Error> {
    if has_tables(&table(store))? { ensure(store, masqueraded, pools) } else { Ok(()) }
}

/// Returns whether this host has an nftables table of this name. Returns `false` if the kernel has no nf_tables.
fn has_tables(table: &str) -> Result<bool, Error> {
    let failed = |errno| failed("failed to read the tables of nftables", errno);
    let socket = match NetlinkSocket::open(NETLINK_NETFILTER) {
        Ok(socket) => socket,
        Err(Errno::NO_PROTOCOL) => return Ok(false),
        Err(errno) => return Err(failed(errno)),
    };
    for family in IpFamily::BOTH {
        match has_table(&socket, family, table) {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(errno) if is_unknown(errno) => {}
            Err(errno) => return Err(failed(errno)),
        }
    }
    Ok(false)
}

fn apply(socket: &NetlinkSocket, changes: &[NetlinkRequest]) -> Result<(), Error> {
    if changes.is_empty() {
        return Ok(());
    }
    apply_batch(socket, changes).map_err(|(what, errno)| failed(&what, errno))
}

/// Returns the rules that an address family should have, or no rules if none of the family's pools is masqueraded. For
/// the same networks, the order of the rules is always the same.
fn wanted_rules(family: IpFamily, masqueraded: &[IpNet], pools: &[IpNet]) -> Vec<ChainRule> {
    let of_family = |networks: &mut dyn Iterator<Item = &IpNet>| -> BTreeSet<IpNet> {
        networks.filter(|network| IpFamily::of(network) == family).map(IpNet::trunc).collect()
    };
    let from = of_family(&mut masqueraded.iter());
    if from.is_empty() {
        return Vec::new();
    }
    let to = of_family(&mut pools.iter().chain(masqueraded));
    to.into_iter().map(ChainRule::Keep).chain(from.into_iter().map(ChainRule::Masquerade)).collect()
}

/// Returns whether an error means that the kernel lacks nf_tables or the address family.
fn is_unknown(errno: Errno) -> bool {
    [Errno::WRONG, Errno::NOT_SUPPORTED, Errno::NO_PROTOCOL, Errno::NO_FAMILY].contains(&errno)
}

fn failed(what: &str, errno: Errno) -> Error {
    let advice = match errno {
        Errno::NOT_PERMITTED => "; it takes root, or CAP_NET_ADMIN in the host's network namespace",
        // The kernel reports "not found" if a module of nf_tables is missing.
        errno if is_unknown(errno) || errno == Errno::NOT_FOUND => {
            "; the kernel needs nf_tables with NAT (modules nf_tables, nft_chain_nat and nft_masq), or no pool may have \
             natOutgoing"
        }
        _ => "",
    };
    Error::failed(what, format_args!("{errno}{advice}"))
}

const CHAIN: &str = "outgoing";
/// The chain priority for source address translation (`NF_IP_PRI_NAT_SRC`, in nft `srcnat`).
const PRIORITY: u32 = 100;

/// The attribute number for the flags of the expression `masq`, and the flag for a random port. Without a random port,
/// two connections that start at the same time may get the same port, and the second connection then fails.
const MASQ_FLAGS: u16 = 1;
const RANDOM_FULLY: u32 = 1 << 4;
/// The constant that makes a payload expression's offset relative to the network header (`NFT_PAYLOAD_NETWORK_HEADER`).
const NETWORK_HEADER: u32 = 1;
/// The numbers of the attributes that this module reads from the kernel's replies.
const TABLE_NAME: u16 = 1;
const RULE_USERDATA: u16 = 7;
/// The type number with which nft marks a comment in the user data of a rule.
const COMMENT: u8 = 0;

/// An address family. Each address family has a separate table, because a kernel without IPv6 has no IPv6 tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IpFamily {
    Ipv4,
    Ipv6,
}

impl IpFamily {
    const BOTH: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    pub(crate) fn of(network: &IpNet) -> Self {
        if network.addr().is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    fn protocol(self) -> NetfilterProtoFamily {
        match self {
            Self::Ipv4 => NetfilterProtoFamily::IPv4,
            Self::Ipv6 => NetfilterProtoFamily::IPv6,
        }
    }

    /// Returns a table's address family and name in nft's spelling.
    fn spelled(self, table: &str) -> String {
        match self {
            Self::Ipv4 => format!("ip {table}"),
            Self::Ipv6 => format!("ip6 {table}"),
        }
    }

    /// Returns the byte offsets of the source and the destination address in a packet's IP header.
    fn offsets(self) -> (u32, u32) {
        match self {
            Self::Ipv4 => (12, 16),
            Self::Ipv6 => (8, 24),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChainRule {
    /// A destination network; packets to it keep their source address.
    Keep(IpNet),
    /// A pool's network; packets from it leave with the host's address.
    Masquerade(IpNet),
}

impl ChainRule {
    /// Returns the comment that nft prints beside the rule. When rule sets are compared, an nftables rule is identified
    /// by this comment.
    fn comment(self) -> String {
        match self {
            Self::Keep(network) => format!("margay: keep what goes to {network}"),
            Self::Masquerade(network) => format!("margay: masquerade what comes from {network}"),
        }
    }

    /// Returns the rule's comment, encoded as the user data that the kernel stores with the rule.
    fn user_data(self) -> Vec<u8> {
        let mut text = self.comment().into_bytes();
        text.push(0);
        // `try_from` cannot fail, because a comment (a CIDR and a few words) is always shorter than nft's limit of 128
        // bytes.
        let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
        [vec![COMMENT, length], text].concat()
    }

    fn expressions(self, family: IpFamily) -> Vec<Expressions> {
        let (source, destination) = family.offsets();
        let (network, offset, then) = match self {
            Self::Keep(network) => (network, destination, leave_chain()),
            Self::Masquerade(network) => (network, source, translate_source()),
        };
        let (address, mask) = match network.trunc() {
            IpNet::V4(network) => (network.addr().octets().to_vec(), network.netmask().octets().to_vec()),
            IpNet::V6(network) => (network.addr().octets().to_vec(), network.netmask().octets().to_vec()),
        };
        let length = if address.len() == 4 { 4 } else { 16 };
        let zero = vec![0; address.len()];
        vec![
            Expressions::Payload(vec![
                Payload::DestinationRegister(Register::Reg1),
                Payload::Base(NETWORK_HEADER),
                Payload::Offset(offset),
                Payload::Len(length),
            ]),
            Expressions::Bitwise(vec![
                Bitwise::SourceRegister(Register::Reg1),
                Bitwise::DestinationRegister(Register::Reg1),
                Bitwise::Length(length),
                Bitwise::Mask(DataAttribute::Value(mask)),
                Bitwise::Xor(DataAttribute::Value(zero)),
            ]),
            Expressions::Cmp(vec![
                Cmp::SourceRegister(Register::Reg1),
                Cmp::Op(Operator::Equal),
                Cmp::Data(DataAttribute::Value(address)),
            ]),
            then,
        ]
    }
}

/// Returns the nftables expressions for the verdict `return`, which ends the chain for a packet.
fn leave_chain() -> Expressions {
    let verdict = DataAttribute::Verdict(vec![VerdictAttribute::Code(Verdict::Return)]);
    Expressions::Immediate(vec![Immediate::DestinationRegister(Register::Verdict), Immediate::Data(verdict)])
}

/// Returns the nftables expressions that replace a packet's source address by the address of the interface by which the
/// packet leaves.
fn translate_source() -> Expressions {
    let flags = DefaultNla::new(MASQ_FLAGS, RANDOM_FULLY.to_be_bytes().to_vec());
    Expressions::Other { expression_type: "masq".to_owned(), attributes: vec![flags] }
}

/// Returns the requests that replace all rules of an nftables table by the given rules.
fn replace_table(family: IpFamily, table: &str, rules: &[ChainRule]) -> Vec<NetlinkRequest> {
    let spelled = family.spelled(table);
    let chain = ChainMessage {
        attributes: vec![
            ChainAttribute::Table(table.to_owned()),
            ChainAttribute::Name(CHAIN.to_owned()),
            ChainAttribute::Type("nat".to_owned()),
            ChainAttribute::Hook(vec![Hook::Number(InetHookNumber::PostRouting.into()), Hook::Priority(PRIORITY)]),
        ],
    };
    let mut requests = vec![
        make_table(family, table),
        table_request(family, NLM_F_CREATE, NfTablesMessage::NewChain(chain))
            .with_failure(format!("failed to make the chain {CHAIN} of the nftables table {spelled}")),
        table_request(family, 0, NfTablesMessage::DeleteRule(RuleMessage { attributes: of_chain(table) }))
            .with_failure(format!("failed to empty the chain {CHAIN} of the nftables table {spelled}")),
    ];
    requests.extend(rules.iter().map(|rule| {
        let mut attributes = of_chain(table);
        let expressions = rule.expressions(family).into_iter().map(Into::into).collect();
        attributes.extend([RuleAttribute::Expressions(expressions), RuleAttribute::UserData(rule.user_data())]);
        let message = NfTablesMessage::NewRule(RuleMessage { attributes });
        let failure = format!("failed to add a rule to the nftables table {spelled} ({})", rule.comment());
        table_request(family, NLM_F_CREATE | NLM_F_APPEND, message).with_failure(failure)
    }));
    requests
}

/// Returns the requests that remove an nftables table. The table is created first, because the kernel refuses to remove
/// a missing table.
fn remove_table(family: IpFamily, table: &str) -> Vec<NetlinkRequest> {
    let message = NfTablesMessage::DeleteTable(TableMessage { attributes: named(table) });
    let failure = format!("failed to remove the nftables table {}", family.spelled(table));
    vec![make_table(family, table), table_request(family, 0, message).with_failure(failure)]
}

fn make_table(family: IpFamily, table: &str) -> NetlinkRequest {
    let message = NfTablesMessage::NewTable(TableMessage { attributes: named(table) });
    let failure = format!("failed to make the nftables table {}", family.spelled(table));
    table_request(family, NLM_F_CREATE, message).with_failure(failure)
}

/// Sends requests to nftables as one transaction: either all requests are carried out, or no request.
fn apply_batch(socket: &NetlinkSocket, requests: &[NetlinkRequest]) -> Result<(), (String, Errno)> {
    let control = |message| {
        let subsystem = NetfilterSubsystem::NfTables;
        nft_request(NetfilterProtoFamily::Unspec, u16::from(u8::from(subsystem)), 0, message)
    };
    let begin = control(ControlMessage::BatchBegin.into()).with_failure("failed to change nftables".to_owned());
    socket.batch(&begin, requests, &control(ControlMessage::BatchEnd.into()))
}

/// Returns the user data of each rule in a table's chain, in the order of the rules.
fn read_rules(socket: &NetlinkSocket, family: IpFamily, table: &str) -> Result<Vec<Vec<u8>>, Errno> {
    let message = NfTablesMessage::GetRule(RuleMessage { attributes: of_chain(table) });
    let listed = socket.list(&table_request(family, 0, message))?;
    listed.iter().map(|payload| Ok(attribute(payload, RULE_USERDATA)?.unwrap_or_default())).collect()
}

/// Returns whether an address family has an nftables table with this name.
fn has_table(socket: &NetlinkSocket, family: IpFamily, table: &str) -> Result<bool, Errno> {
    let message = NfTablesMessage::GetTable(TableMessage { attributes: Vec::new() });
    let ours = [table.as_bytes(), b"\0"].concat();
    for payload in socket.list(&table_request(family, 0, message))? {
        if attribute(&payload, TABLE_NAME)?.is_some_and(|name| name == ours) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the value of an attribute in an nftables message.
fn attribute(payload: &[u8], kind: u16) -> Result<Option<Vec<u8>>, Errno> {
    // The attributes of an nftables message follow a header of four bytes: the family, the version, and two unused
    // bytes.
    let attributes = payload.get(4..).ok_or(Errno::GARBLED)?;
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.map_err(|_| Errno::GARBLED)?;
        if attribute.kind() == kind {
            return Ok(Some(attribute.value().to_vec()));
        }
    }
    Ok(None)
}

fn named(table: &str) -> Vec<TableAttribute> {
    vec![TableAttribute::Name(table.to_owned())]
}

fn of_chain(table: &str) -> Vec<RuleAttribute> {
    vec![RuleAttribute::Table(table.to_owned()), RuleAttribute::Chain(CHAIN.to_owned())]
}

fn table_request(family: IpFamily, flags: u16, message: NfTablesMessage) -> NetlinkRequest {
    nft_request(family.protocol(), 0, flags, message.into())
}

fn nft_request(family: NetfilterProtoFamily, about: u16, flags: u16, message: NetfilterMessageInner) -> NetlinkRequest {
    let message = NetfilterMessage::new(NetfilterHeader::new(family, 0, about), message);
    NetlinkRequest::change(message.message_type(), flags, &message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn rules_depend_on_networks_alone() {
        let expected = ["10.65.0.0/16", "10.66.0.0/16"].map(|text| ChainRule::Keep(text.parse().unwrap()));
        let expected = [&expected[..], &[ChainRule::Masquerade("10.66.0.0/16".parse().unwrap())]].concat();
        let masqueraded = nets(&["10.66.0.0/16"]);
        for pools in [
            nets(&["10.65.0.0/16", "10.66.0.0/16", "fd80::/64"]),
            nets(&["fd80::/64", "10.66.0.0/16", "10.65.0.0/16", "10.65.0.0/16"]),
            nets(&["10.65.7.0/16"]),
        ] {
            assert_eq!(wanted_rules(IpFamily::Ipv4, &masqueraded, &pools), expected, "{pools:?}");
            assert_eq!(wanted_rules(IpFamily::Ipv6, &masqueraded, &pools), []);
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
