//! The settings of the allocator that all nodes share.

use kv::Deadline;

use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::{Document, IpamConfig, keys};
use crate::surroundings::read_config;

impl Ipam {
    /// The settings; the defaults where none are stored. Reading them stores nothing.
    ///
    /// # Errors
    /// Those of the store; a damaged document.
    pub async fn config(&self, deadline: Deadline) -> Result<IpamConfig> {
        transact!(reading self, deadline, |tx| read_config(tx).await)
    }

    /// Changes the settings, and returns them. `change` is given what is stored now, and may be called again if somebody
    /// else changes the settings meanwhile: no change of anybody gets lost, where Calico overwrites. Fields that this version
    /// does not know stay as they are. A change that changes nothing writes nothing. From then on no assignment goes through
    /// that was decided by the old settings; what was assigned before stays.
    ///
    /// Guards: the settings.
    ///
    /// # Errors
    /// `Settings`, with Calico's texts, for settings that contradict each other; those of the store; a damaged document.
    pub async fn change_config(
        &self,
        change: impl Fn(IpamConfig) -> IpamConfig,
        deadline: Deadline,
    ) -> Result<IpamConfig> {
        let key = keys::config();
        transact!(self, deadline, |tx| {
            let stored = read_config(tx).await?;
            let wanted = change(stored.clone());
            if wanted != stored {
                wanted.check()?;
                tx.put(&key, wanted.encode()?)?;
            }
            Ok(wanted)
        })
    }
}
