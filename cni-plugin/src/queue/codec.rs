//! The bytes of requests and answers: how long the rest is, a CRC-32 over it, and the rest, an encoding by bincode of the types
//! below.
//!
//! They are read by processes of the same version only, since it is a part of what a queue is [for](super::Queue::new).

use std::collections::BTreeMap;
use std::net::IpAddr;

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bincode::{Decode, Encode};
use ipam_core::assign::{AssignRequest, Assigned, Bridge, Gateway, NamespaceLabels, Wanted};
use ipam_core::attachment::Attachment;
use ipam_core::model::PoolUse;
use ipnet::IpNet;

use super::MAX_BYTES;
use crate::whole_file::CRC_32;

const BINCODE: Configuration<LittleEndian, Varint, Limit<{ MAX_BYTES }>> =
    bincode::config::standard().with_limit::<{ MAX_BYTES }>();

/// Bytes that say where they end, and that they are whole.
pub(super) fn frame<T: Encode>(what: T) -> Option<Vec<u8>> {
    let rest = bincode::encode_to_vec(what, BINCODE).ok()?;
    let mut bytes = u32::try_from(rest.len()).ok()?.to_le_bytes().to_vec();
    bytes.extend(CRC_32.checksum(&rest).to_le_bytes());
    bytes.extend(rest);
    Some(bytes)
}

/// What is in a frame, and what is behind it.
pub(super) fn unframe<T: Decode<()>>(bytes: &[u8]) -> Option<(T, &[u8])> {
    let (length, bytes) = bytes.split_first_chunk()?;
    let (sum, bytes) = bytes.split_first_chunk()?;
    let (rest, behind) = bytes.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    if CRC_32.checksum(rest) != u32::from_le_bytes(*sum) {
        return None;
    }
    let (what, read) = bincode::decode_from_slice(rest, BINCODE).ok()?;
    (read == rest.len()).then_some((what, behind))
}

/// A request, and what the queue is for.
#[derive(Encode, Decode)]
pub(super) struct FormRequest {
    pub(super) queue: String,
    /// Network, container, interface and node.
    names: [String; 4],
    boot: Option<String>,
    attributes: BTreeMap<String, String>,
    any: [u8; 2],
    pools: [Vec<String>; 2],
    max_blocks: u32,
    /// The gateways of a bridged network.
    bridge: Option<[FormGateway; 2]>,
}

#[derive(Encode, Decode)]
enum FormGateway {
    Recorded,
    First,
    At(IpAddr),
}

/// True if a request asks for nothing that others cannot do as well: any addresses, of pools that are there.
pub(super) fn is_plain(request: &AssignRequest) -> bool {
    request.wanted.these.is_empty()
        && request.usage == PoolUse::Workload
        && request.define.is_empty()
        && request.namespace == NamespaceLabels::Known
        && request.namespace_labels.is_empty()
        && request.host_reserved.is_none()
}

impl FormRequest {
    /// A plain request; `None` if it wants more addresses than this form can say.
    pub(super) fn of(queue: &str, request: &AssignRequest) -> Option<Self> {
        let Attachment { network, container, interface, node, boot } = request.attachment.clone();
        Some(Self {
            queue: queue.to_owned(),
            names: [network, container, interface, node],
            boot,
            attributes: request.attributes.clone(),
            any: [request.wanted.any_v4.try_into().ok()?, request.wanted.any_v6.try_into().ok()?],
            pools: [request.v4_pools.clone(), request.v6_pools.clone()],
            max_blocks: request.max_blocks,
            bridge: request.bridge.map(|Bridge { v4, v6 }| [v4.into(), v6.into()]),
        })
    }

    pub(super) fn into_request(self) -> AssignRequest {
        let [network, container, interface, node] = self.names;
        let attachment = Attachment { network, container, interface, node, boot: self.boot };
        let [v4, v6] = self.any;
        let mut request = AssignRequest::new(attachment, Wanted::any(v4.into(), v6.into()));
        request.attributes = self.attributes;
        [request.v4_pools, request.v6_pools] = self.pools;
        request.max_blocks = self.max_blocks;
        request.bridge = self.bridge.map(|[v4, v6]| Bridge { v4: v4.into(), v6: v6.into() });
        request
    }
}

impl From<Gateway> for FormGateway {
    fn from(gateway: Gateway) -> Self {
        match gateway {
            Gateway::Recorded => Self::Recorded,
            Gateway::First => Self::First,
            Gateway::At(ip) => Self::At(ip),
        }
    }
}

impl From<FormGateway> for Gateway {
    fn from(form: FormGateway) -> Self {
        match form {
            FormGateway::Recorded => Self::Recorded,
            FormGateway::First => Self::First,
            FormGateway::At(ip) => Self::At(ip),
        }
    }
}

/// Address, block, pool and gateway, the networks as address and prefix length.
type FormAssigned = (IpAddr, (IpAddr, u8), (IpAddr, u8), Option<IpAddr>);

/// An answer; `None` tells who asks to go on alone.
#[derive(Encode, Decode)]
pub(super) struct FormAnswer(Option<Vec<FormAssigned>>);

impl FormAnswer {
    pub(super) fn of(answer: Option<&[Assigned]>) -> Self {
        let net = |net: IpNet| (net.addr(), net.prefix_len());
        let form = |one: &Assigned| (one.ip, net(one.block), net(one.pool), one.gateway);
        Self(answer.map(|answer| answer.iter().map(form).collect()))
    }

    pub(super) fn into_answer(self) -> Option<Vec<Assigned>> {
        let net = |(ip, length)| IpNet::new(ip, length).ok();
        let assigned =
            |(ip, block, pool, gateway)| Some(Assigned { ip, block: net(block)?, pool: net(pool)?, gateway });
        self.0?.into_iter().map(assigned).collect()
    }
}
