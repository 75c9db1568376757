//! STATUS: whether this configuration and its store can serve an ADD now. A runtime takes a whole node out of service
//! when STATUS fails, and the node's pods are evicted. So a pool without a free address is no failure.

use crate::error::{CniError, Code, Result};
use crate::identity::Identity;
use crate::request::{Allocator, Attachment, Network};
use crate::run::Context;
use crate::sticky;

/// No container has this id, since ids begin with a letter or a digit.
const NOBODY: &str = "-status";

/// Sets the one code that STATUS has for every error.
pub(crate) fn unavailable(error: CniError) -> CniError {
    error.with_code(Code::Unavailable)
}

impl Context<'_> {
    pub(crate) fn status(&self, allocator: &dyn Allocator) -> Result<String> {
        let settings = self.bridged_settings()?;
        let network = settings.map_or(Network::Calico, |settings| Network::Bridged(settings.network));
        let attachment = Attachment {
            network: self.conf.name.clone(),
            container: NOBODY.to_owned(),
            interface: "eth0".to_owned(),
            node: self.host.node(&self.conf),
            boot: self.host.boot(),
        };
        let identity = Identity { attachment, pod: None, namespace: "default".to_owned(), netns: None };
        identity.check_node()?;
        sticky::check(&self.conf)?;
        let request = self.add_request(identity, network, Vec::new());
        // Such a network needs no store.
        if request.count_v4 + request.count_v6 > 0 {
            allocator.status(&request)?;
        }
        Ok(String::new())
    }
}
