//! A node of the cluster. The allocator reads only its labels.

use kv::{Key, Value};
use time::OffsetDateTime;

use super::codec::{Document, Malformed};
use super::keys::ResourceKind;
use super::resource::{Labels, Resource};

/// The document under a node's key.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    resource: Resource,
    labels: Labels,
}

impl Node {
    /// A new node with these labels.
    pub fn new(name: &str, labels: Labels, uid: &str, now: OffsetDateTime) -> Self {
        let mut resource = Resource::new(ResourceKind::Node, name, uid, now);
        resource.set_part("status", serde_json::json!({}));
        if !labels.is_empty() {
            resource.set_labels(&labels);
        }
        Self { resource, labels }
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.resource.name()
    }

    /// The labels.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// The whole resource.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }
}

impl Document for Node {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        let resource = Resource::decode(ResourceKind::Node, key, value)?;
        let labels = resource.labels();
        Ok(Self { resource, labels })
    }

    fn encode(&self) -> Result<Value, Malformed> {
        self.resource.encode()
    }
}
