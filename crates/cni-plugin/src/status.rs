//! STATUS: whether this configuration and its store can serve an ADD now. A runtime takes a whole node out of service
//! when STATUS fails, and the node's pods are evicted. So a pool without a free address is no failure.

use agent::{Allocator, CniError, Code, Result};
use ipam_core::assign::Wanted;
use ipam_core::attachment::Attachment;

use crate::bridged::network_of;
use crate::identity::Identity;
use crate::run::Context;
use crate::sticky;

/// No container has this id, since ids begin with a letter or a digit.
const NOBODY: &str = "-status";

/// Sets the one code that STATUS has for every error.
pub(crate) fn unavailable(error: CniError) -> CniError {
    error.with_code(Code::Unavailable)
}

impl Context<'_> {
    pub(crate) fn status(&self, allocator: &dyn Allocator) -> Result<()> {
        let settings = self.bridged_settings()?;
        let network = network_of(settings.as_ref());
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
        let assign = self.assignment(identity, network, Vec::new());
        // Such a network needs no store.
        if assign.wanted != Wanted::default() {
            allocator.status(&self.store, assign.into())?;
        }
        Ok(())
    }
}
