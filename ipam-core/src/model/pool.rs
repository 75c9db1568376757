//! Defines address pools: CIDRs that are divided into blocks, with rules for their use.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Key, Value};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::codec::{Document, Malformed};
use super::keys::{self, ResourceKind};
use super::pool_spec::{
    ALLOWED_USES, ASSIGNMENT_MODE, BLOCK_SIZE, CIDR, DISABLED, NAMESPACE_SELECTOR, NAT_OUTGOING, NODE_SELECTOR,
    default_block_size,
};
use super::prefixes::{PREFIX_LENGTH_ANNOTATION, block_size_for};
use super::resource::{Labels, Resource};
use crate::net::{Count, Family};
use crate::selector::{Selector, SelectorError};

/// The annotation that names the CNI network whose configuration defines the pool.
pub const NETWORK_ANNOTATION: &str = "margay.io/network";

/// What an address of a pool is for: a container, a tunnel or a load balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PoolUse {
    /// The address is for a container.
    Workload,
    /// The address is for a node's tunnel interface.
    Tunnel,
    /// The address is for a load balancer. A pool for load balancers must not allow any other use.
    LoadBalancer,
}

impl PoolUse {
    /// Returns the name of the pool's use as written in pool documents.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Workload => "Workload",
            Self::Tunnel => "Tunnel",
            Self::LoadBalancer => "LoadBalancer",
        }
    }
}

impl fmt::Display for PoolUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Whether requests must name a pool in order to use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AssignmentMode {
    /// A request may use the pool if it names the pool, or if it names no pools and the pool's selectors match.
    Automatic,
    /// Only requests that name the pool may use the pool.
    Manual,
}

impl AssignmentMode {
    /// Returns the name of the assignment mode as written in pool documents.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Automatic => "Automatic",
            Self::Manual => "Manual",
        }
    }
}

/// The definition of a new pool. The function [`super::check_new_pool`] checks the definition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewPool {
    /// The name of the new pool.
    pub name: String,
    /// The pool's CIDR.
    pub cidr: IpNet,
    /// The prefix length of the pool's blocks.
    pub block_size: u8,
    /// The length of the prefixes in a pool of prefixes; `None` for a pool of addresses.
    pub prefix_length: Option<u8>,
    /// The selector of the nodes that may use the pool; `all()` for all nodes.
    pub node_selector: String,
    /// The selector of the namespaces that may use the pool; empty for all namespaces.
    pub namespace_selector: String,
    /// The purposes for which the pool's addresses may be used.
    pub allowed_uses: Vec<PoolUse>,
    /// The assignment mode, which decides which requests may use the pool.
    pub assignment_mode: AssignmentMode,
}

impl NewPool {
    /// Creates the definition of a pool for all nodes, with blocks of the default size.
    pub fn new(name: impl Into<String>, cidr: IpNet) -> Self {
        Self {
            name: name.into(),
            cidr,
            block_size: default_block_size(Family::of_net(cidr)),
            prefix_length: None,
            node_selector: "all()".to_owned(),
            namespace_selector: String::new(),
            allowed_uses: vec![PoolUse::Workload, PoolUse::Tunnel],
            assignment_mode: AssignmentMode::Automatic,
        }
    }

    /// Sets the prefix length of the pool's blocks.
    #[must_use]
    pub fn with_block_size(mut self, block_size: u8) -> Self {
        self.block_size = block_size;
        self
    }

    /// Makes this a pool of prefixes of the given length, and sets the assignment mode to manual: requests must name
    /// the pool.
    #[must_use]
    pub fn with_prefix_length(mut self, length: u8) -> Self {
        self.prefix_length = Some(length);
        self.assignment_mode = AssignmentMode::Manual;
        self
    }

    /// Sets the selector of nodes that may use the pool.
    #[must_use]
    pub fn with_node_selector(mut self, selector: impl Into<String>) -> Self {
        self.node_selector = selector.into();
        self
    }

    /// Sets the selector of namespaces that may use the pool. A selector that is not empty removes tunnels from the
    /// pool's allowed uses, because Calico refuses a tunnel pool with a namespace selector.
    #[must_use]
    pub fn with_namespace_selector(mut self, selector: impl Into<String>) -> Self {
        self.namespace_selector = selector.into();
        if !self.namespace_selector.is_empty() {
            self.allowed_uses.retain(|used| *used != PoolUse::Tunnel);
        }
        self
    }

    /// Sets the purposes for which the pool's addresses may be used.
    #[must_use]
    pub fn with_allowed_uses(mut self, uses: impl Into<Vec<PoolUse>>) -> Self {
        self.allowed_uses = uses.into();
        self
    }

    /// Sets which requests may use the pool.
    #[must_use]
    pub fn with_assignment_mode(mut self, mode: AssignmentMode) -> Self {
        self.assignment_mode = mode;
        self
    }
}

/// The stored document of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    resource: Resource,
    cidr: IpNet,
    block_size: u8,
    prefix_length: Option<u8>,
}

impl Pool {
    /// Creates the document of a new pool. The argument `uid` must be a random UUID.
    ///
    /// # Errors
    /// [`Malformed`] if the pool's CIDR or block size is impossible. [`super::check_new_pool`] reports an impossible
    /// CIDR or block size with a better error message.
    pub fn new(new: &NewPool, uid: &str, now: OffsetDateTime) -> Result<Self, Malformed> {
        let mut resource = Resource::new(ResourceKind::IpPool, &new.name, uid, now);
        let spec = NewPool { cidr: new.cidr.trunc(), ..new.clone() }.spec();
        resource.set_part("spec", serde_json::Value::Object(spec));
        if let Some(length) = new.prefix_length {
            resource.set_annotation(PREFIX_LENGTH_ANNOTATION, &length.to_string());
        }
        Self::read(&keys::resource(ResourceKind::IpPool, &new.name), resource)
    }

    /// Creates a separate pool from a part of this pool's CIDR. The new pool copies this pool's properties except the
    /// name, the CIDR, the unique id and the creation time. It belongs to no CNI network configuration, even if this
    /// pool does.
    ///
    /// # Errors
    /// [`Self::part`] cannot fail if `cidr` lies inside this pool.
    pub fn part(&self, name: &str, cidr: IpNet, uid: &str, now: OffsetDateTime) -> Result<Self, Malformed> {
        let mut resource = self.resource.reborn(name, uid, now);
        resource.set_spec(CIDR, Some(cidr.to_string().into()));
        resource.remove_annotation(NETWORK_ANNOTATION);
        Self::read(&keys::resource(ResourceKind::IpPool, name), resource)
    }

    fn read(key: &Key, resource: Resource) -> Result<Self, Malformed> {
        let text = resource.text(CIDR);
        let cidr: IpNet =
            text.parse().map_err(|_| Malformed::new(key, format_args!("the pool's CIDR {text:?} is no network")))?;
        let block_size = match resource.spec(BLOCK_SIZE) {
            None => 0,
            Some(size) => size
                .as_u64()
                .and_then(|size| u8::try_from(size).ok())
                .ok_or_else(|| Malformed::new(key, format_args!("the pool's block size {size} is no prefix length")))?,
        };
        let block_size = if block_size == 0 { default_block_size(Family::of_net(cidr)) } else { block_size };
        let mut pool = Self { resource, cidr: cidr.trunc(), block_size, prefix_length: None };
        if let Some(text) = pool.resource.annotation(PREFIX_LENGTH_ANNOTATION) {
            let wrong = |reason: &dyn fmt::Display| {
                Malformed::new(key, format_args!("the annotation {PREFIX_LENGTH_ANNOTATION} is {text:?}: {reason}"))
            };
            let length = text.parse().map_err(|_| wrong(&"a prefix length is a number, for example 64"))?;
            pool.block_size = block_size_for(pool.cidr, length).map_err(|reason| wrong(&reason))?;
            pool.prefix_length = Some(length);
        }
        Ok(pool)
    }

    /// Returns the name of the pool.
    pub fn name(&self) -> &str {
        self.resource.name()
    }

    /// Returns the pool's CIDR.
    pub fn cidr(&self) -> IpNet {
        self.cidr
    }

    /// Returns the address family of the pool.
    pub fn family(&self) -> Family {
        Family::of_net(self.cidr)
    }

    /// Returns the prefix length of the pool's blocks.
    pub fn block_size(&self) -> u8 {
        self.block_size
    }

    /// Returns the length of the prefixes in a pool of prefixes; `None` for a pool of addresses.
    pub fn prefix_length(&self) -> Option<u8> {
        self.prefix_length
    }

    /// Returns the length of the prefixes that the pool assigns; for a pool of single addresses, 32 (IPv4) or 128
    /// (IPv6).
    pub fn length(&self) -> u8 {
        self.prefix_length.unwrap_or(self.family().bits())
    }

    /// Returns the number of addresses or prefixes in the pool.
    pub fn capacity(&self) -> Count {
        Count::of_parts(self.cidr, self.length())
    }

    /// In a pool of prefixes, returns the assignable prefix that contains an address. In a pool of addresses, returns
    /// the address itself as a /32 or /128 CIDR.
    pub fn unit_of(&self, ip: IpAddr) -> IpNet {
        self.family().network(ip, self.length()).unwrap_or_else(|| ip.into())
    }

    /// Returns the whole resource of the pool.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// Returns the whole resource of the pool, to change its labels and annotations.
    pub fn resource_mut(&mut self) -> &mut Resource {
        &mut self.resource
    }

    /// True if an operator has disabled the pool.
    pub fn is_disabled(&self) -> bool {
        self.resource.switch(DISABLED)
    }

    /// True if outgoing traffic of the pool's containers is translated to the host's address. The translation also
    /// applies to a disabled pool, whose addresses may still be in use.
    pub fn is_nat_outgoing(&self) -> bool {
        self.resource.switch(NAT_OUTGOING)
    }

    /// Turns on the translation of outgoing traffic to the host's address.
    pub fn enable_nat_outgoing(&mut self) {
        self.resource.set_spec(NAT_OUTGOING, Some(true.into()));
    }

    /// Disables the pool, so that no more addresses are assigned from it.
    pub fn disable(&mut self) {
        self.resource.set_spec(DISABLED, Some(true.into()));
    }

    /// Enables the pool again.
    pub fn enable(&mut self) {
        self.resource.set_spec(DISABLED, None);
    }

    /// True if addresses may be assigned from the pool: it is not disabled, not being deleted, and not marked as not
    /// allocatable.
    pub fn is_enabled(&self) -> bool {
        !self.is_disabled() && !self.resource.is_being_deleted() && self.is_allocatable()
    }

    fn is_allocatable(&self) -> bool {
        let conditions = self.resource.status("conditions").and_then(serde_json::Value::as_array);
        !conditions
            .into_iter()
            .flatten()
            .any(|condition| condition["type"] == "Allocatable" && condition["status"] == "False")
    }

    /// Returns which requests may use the pool. An unknown assignment mode counts as manual.
    pub fn assignment_mode(&self) -> AssignmentMode {
        match self.resource.text(ASSIGNMENT_MODE) {
            "" | "Automatic" => AssignmentMode::Automatic,
            _ => AssignmentMode::Manual,
        }
    }

    /// Returns what the pool's addresses may be used for, as stored; by default workloads and tunnels.
    pub fn allowed_uses(&self) -> Vec<&str> {
        let uses: Vec<&str> = self.resource.texts(ALLOWED_USES).collect();
        if uses.is_empty() { vec![PoolUse::Workload.as_str(), PoolUse::Tunnel.as_str()] } else { uses }
    }

    /// True if the pool allows the given use.
    pub fn allows(&self, wanted: PoolUse) -> bool {
        self.allowed_uses().contains(&wanted.as_str())
    }

    /// Returns the stored selector of nodes; empty for all nodes.
    pub fn node_selector(&self) -> &str {
        self.resource.text(NODE_SELECTOR)
    }

    /// Returns the stored selector of namespaces; empty for all namespaces.
    pub fn namespace_selector(&self) -> &str {
        self.resource.text(NAMESPACE_SELECTOR)
    }

    /// True if the pool's node selector matches a node with the given labels.
    ///
    /// # Errors
    /// [`SelectorError`] if the node selector cannot be parsed.
    pub fn selects_node(&self, labels: &Labels) -> Result<bool, SelectorError> {
        Ok(self.node_selector().parse::<Selector>()?.matches(labels))
    }

    /// True if the pool's namespace selector matches a namespace with the given labels.
    ///
    /// # Errors
    /// [`SelectorError`] if the namespace selector cannot be parsed.
    pub fn selects_namespace(&self, labels: &Labels) -> Result<bool, SelectorError> {
        Ok(self.namespace_selector().parse::<Selector>()?.matches(labels))
    }
}

impl Document for Pool {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        Self::read(key, Resource::decode(ResourceKind::IpPool, key, value)?)
    }

    fn encode(&self) -> Result<Value, Malformed> {
        self.resource.encode()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use time::macros::datetime;

    use super::*;

    fn decode(spec: &str) -> Result<Pool, Malformed> {
        Pool::decode(&keys::resource(ResourceKind::IpPool, "p"), format!("{{\"spec\":{spec}}}").as_bytes())
    }

    #[test]
    fn pool_defaults_apply_on_reading_only() {
        let pool = decode(r#"{"cidr":"10.0.0.0/16","allowedUses":[],"blockSize":0,"nodeSelector":null}"#).unwrap();
        assert_eq!((pool.block_size(), pool.assignment_mode()), (26, AssignmentMode::Automatic));
        assert_eq!(pool.allowed_uses(), ["Workload", "Tunnel"]);
        assert!(pool.selects_node(&Labels::new()).unwrap() && pool.selects_namespace(&Labels::new()).unwrap());
        assert!(pool.is_enabled());
        let text = String::from_utf8(pool.encode().unwrap().as_bytes().to_vec()).unwrap();
        assert!(text.contains(r#""blockSize":0"#), "{text}");
        assert_eq!(decode(r#"{"cidr":"fd80::/64"}"#).unwrap().block_size(), 122);
        assert!(!pool.is_nat_outgoing());
        assert!(decode(r#"{"cidr":"10.0.0.0/16","natOutgoing":true,"disabled":true}"#).unwrap().is_nat_outgoing());
    }

    #[test]
    fn pool_can_be_off_in_three_ways() {
        let key = keys::resource(ResourceKind::IpPool, "p");
        for (rest, enabled) in [
            ("", true),
            (
                r#","status":{"conditions":[{"type":"Allocatable","status":"True"},{"type":"X","status":"False"}]}"#,
                true,
            ),
            (r#","status":{"conditions":[{"type":"Allocatable","status":"False"}]}"#, false),
            (r#","metadata":{"deletionTimestamp":"2026-11-21T00:00:00Z"}"#, false),
            (r#","status":{"conditions":7}"#, true),
        ] {
            let text = format!(r#"{{"spec":{{"cidr":"10.0.0.0/16"}}{rest}}}"#);
            assert_eq!(Pool::decode(&key, text.as_bytes()).unwrap().is_enabled(), enabled, "{text}");
        }
        let mut pool = decode(r#"{"cidr":"10.0.0.0/16"}"#).unwrap();
        pool.disable();
        assert!(!pool.is_enabled());
        pool.enable();
        assert!(pool.is_enabled());
    }

    #[test]
    fn pool_is_error_when_damaged() {
        for spec in [
            "{}",
            r#"{"cidr":"x"}"#,
            r#"{"cidr":"10.0.0.0/16","blockSize":-1}"#,
            r#"{"cidr":"10.0.0.0/16","blockSize":"a"}"#,
            "[]",
            "null",
        ] {
            assert!(decode(spec).is_err(), "{spec}");
        }
    }

    #[test]
    fn pool_when_new_is_what_calico_writes() {
        let new = NewPool::new("pool4", "10.65.0.0/16".parse().unwrap());
        let pool = Pool::new(&new, "00000000-0000-4000-8000-000000000001", datetime!(2026-11-01 10:00 UTC)).unwrap();
        let written: serde_json::Value = serde_json::from_slice(pool.encode().unwrap().as_bytes()).unwrap();
        assert_eq!(
            written,
            json!({"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":"pool4",
                "uid":"00000000-0000-4000-8000-000000000001","creationTimestamp":"2026-11-01T10:00:00Z"},
                "spec":{"cidr":"10.65.0.0/16","vxlanMode":"Never","ipipMode":"Never","blockSize":26,
                "nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}})
        );
    }
}
