//! The messages by which nftables is changed and read: tables `margay` of `ip` and `ip6`, each with one chain.
//!
//! The chain is of the type `nat` and sees packets that are about to leave. Its rules say first where packets go as they are,
//! and then whose packets leave under the host's address. nft shows each rule with a comment, which is how a rule set is
//! recognized, too.

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

use crate::error::Errno;
use crate::netlink::{Request, Socket};

const CHAIN: &str = "outgoing";
/// Where source addresses are translated (`NF_IP_PRI_NAT_SRC`, in nft `srcnat`).
const PRIORITY: u32 = 100;

/// The attributes of an expression `masq`, and the flag for a port of the kernel's choice: else two connections that begin at
/// once may be given the same one, and the second fails.
const MASQ_FLAGS: u16 = 1;
const RANDOM_FULLY: u32 = 1 << 4;
/// Where a packet's network header begins (`NFT_PAYLOAD_NETWORK_HEADER`).
const NETWORK_HEADER: u32 = 1;
/// The attributes that are read.
const TABLE_NAME: u16 = 1;
const RULE_USERDATA: u16 = 7;
/// The type of a comment in the user data of a rule, as nft writes it.
const COMMENT: u8 = 0;

/// A family of addresses, each with a table of its own: a kernel without IPv6 has none for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    pub(crate) const BOTH: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    pub(crate) fn of(network: &IpNet) -> Self {
        if network.addr().is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    fn protocol(self) -> NetfilterProtoFamily {
        match self {
            Self::Ipv4 => NetfilterProtoFamily::IPv4,
            Self::Ipv6 => NetfilterProtoFamily::IPv6,
        }
    }

    /// A table's name in texts, as nft takes it.
    fn spelled(self, table: &str) -> String {
        match self {
            Self::Ipv4 => format!("ip {table}"),
            Self::Ipv6 => format!("ip6 {table}"),
        }
    }

    /// Where source and destination are in a packet's header, in bytes.
    fn offsets(self) -> (u32, u32) {
        match self {
            Self::Ipv4 => (12, 16),
            Self::Ipv6 => (8, 24),
        }
    }
}

/// A rule of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Packets to this network leave as they are.
    Keep(IpNet),
    /// Packets from this network leave under the host's address.
    Masquerade(IpNet),
}

impl Rule {
    /// The text that nft shows beside the rule. Two rules with the same text are the same.
    fn comment(self) -> String {
        match self {
            Self::Keep(network) => format!("margay: keep what goes to {network}"),
            Self::Masquerade(network) => format!("margay: masquerade what comes from {network}"),
        }
    }

    /// The comment in the form in which the kernel keeps it.
    pub(crate) fn user_data(self) -> Vec<u8> {
        let mut text = self.comment().into_bytes();
        text.push(0);
        // A network and a few words are less than the 128 bytes that nft reads.
        let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
        [vec![COMMENT, length], text].concat()
    }

    fn expressions(self, family: Family) -> Vec<Expressions> {
        let (source, destination) = family.offsets();
        let (network, offset, then) = match self {
            Self::Keep(network) => (network, destination, leave()),
            Self::Masquerade(network) => (network, source, masquerade()),
        };
        let (address, mask) = match network.trunc() {
            IpNet::V4(network) => (network.addr().octets().to_vec(), network.netmask().octets().to_vec()),
            IpNet::V6(network) => (network.addr().octets().to_vec(), network.netmask().octets().to_vec()),
        };
        // 4 or 16.
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

/// Ends the chain for a packet.
fn leave() -> Expressions {
    let verdict = DataAttribute::Verdict(vec![VerdictAttribute::Code(Verdict::Return)]);
    Expressions::Immediate(vec![Immediate::DestinationRegister(Register::Verdict), Immediate::Data(verdict)])
}

/// Gives a packet the address of the interface by which it leaves.
fn masquerade() -> Expressions {
    let flags = DefaultNla::new(MASQ_FLAGS, RANDOM_FULLY.to_be_bytes().to_vec());
    Expressions::Other { expression_type: "masq".to_owned(), attributes: vec![flags] }
}

/// The requests that change a table to have exactly these rules, whatever it had.
pub(crate) fn replace(family: Family, table: &str, rules: &[Rule]) -> Vec<Request> {
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
        change(family, NLM_F_CREATE, NfTablesMessage::NewChain(chain))
            .or(format!("failed to make the chain {CHAIN} of the nftables table {spelled}")),
        change(family, 0, NfTablesMessage::DeleteRule(RuleMessage { attributes: of_chain(table) }))
            .or(format!("failed to empty the chain {CHAIN} of the nftables table {spelled}")),
    ];
    requests.extend(rules.iter().map(|rule| {
        let mut attributes = of_chain(table);
        let expressions = rule.expressions(family).into_iter().map(Into::into).collect();
        attributes.extend([RuleAttribute::Expressions(expressions), RuleAttribute::UserData(rule.user_data())]);
        let message = NfTablesMessage::NewRule(RuleMessage { attributes });
        let failure = format!("failed to add a rule to the nftables table {spelled} ({})", rule.comment());
        change(family, NLM_F_CREATE | NLM_F_APPEND, message).or(failure)
    }));
    requests
}

/// The requests that remove a table. The table is made first: the removal of one that is just gone would fail.
pub(crate) fn remove(family: Family, table: &str) -> Vec<Request> {
    let message = NfTablesMessage::DeleteTable(TableMessage { attributes: named(table) });
    let failure = format!("failed to remove the nftables table {}", family.spelled(table));
    vec![make_table(family, table), change(family, 0, message).or(failure)]
}

fn make_table(family: Family, table: &str) -> Request {
    let message = NfTablesMessage::NewTable(TableMessage { attributes: named(table) });
    let failure = format!("failed to make the nftables table {}", family.spelled(table));
    change(family, NLM_F_CREATE, message).or(failure)
}

/// Makes changes all together or not at all.
pub(crate) fn change_all(socket: &Socket, requests: &[Request]) -> Result<(), (String, Errno)> {
    let control = |message| {
        let subsystem = NetfilterSubsystem::NfTables;
        request(NetfilterProtoFamily::Unspec, u16::from(u8::from(subsystem)), 0, message)
    };
    let begin = control(ControlMessage::BatchBegin.into()).or("failed to change nftables".to_owned());
    socket.batch(&begin, requests, &control(ControlMessage::BatchEnd.into()))
}

/// The user data of the rules of a table's chain, in their order.
pub(crate) fn rules(socket: &Socket, family: Family, table: &str) -> Result<Vec<Vec<u8>>, Errno> {
    let message = NfTablesMessage::GetRule(RuleMessage { attributes: of_chain(table) });
    let listed = socket.list(&change(family, 0, message))?;
    listed.iter().map(|payload| Ok(attribute(payload, RULE_USERDATA)?.unwrap_or_default())).collect()
}

/// True if there is this table.
pub(crate) fn has_table(socket: &Socket, family: Family, table: &str) -> Result<bool, Errno> {
    let message = NfTablesMessage::GetTable(TableMessage { attributes: Vec::new() });
    let ours = [table.as_bytes(), b"\0"].concat();
    for payload in socket.list(&change(family, 0, message))? {
        if attribute(&payload, TABLE_NAME)?.is_some_and(|name| name == ours) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The value of an attribute in a message of nftables.
fn attribute(payload: &[u8], kind: u16) -> Result<Option<Vec<u8>>, Errno> {
    // The family, the version, and two bytes that are not used.
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

fn change(family: Family, flags: u16, message: NfTablesMessage) -> Request {
    request(family.protocol(), 0, flags, message.into())
}

fn request(family: NetfilterProtoFamily, about: u16, flags: u16, message: NetfilterMessageInner) -> Request {
    let message = NetfilterMessage::new(NetfilterHeader::new(family, 0, about), message);
    Request::change(message.message_type(), flags, &message)
}
