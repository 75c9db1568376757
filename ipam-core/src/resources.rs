//! Creates pools and reservations, deletes reservations, and reads and changes the IPAM settings that all nodes share.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, ErrorKind, Range, Transaction};

use crate::assign::{Gateway, bridge};
use crate::assign_context::{decode_all, read_config};
use crate::boxed_future;
use crate::error::{Error, ErrorSubject, Result};
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Document, IpReservation, IpamConfig, NewPool, Pool, check_name, check_new_pool};
use crate::write_set::WriteSet;

/// The key that commits guard instead of all pools, in stores with too many pools to guard each of them. In a store
/// with more pools than one commit can guard, every creation of a pool guards and writes the key [`POOLS_LOCK`], so
/// that concurrent creations of pools conflict.
const POOLS_LOCK: &str = "/margay/v1/pools";

impl Ipam {
    /// Creates a pool. If `gateway` is given, the pool is for a bridged network, and the gateway is reserved in the
    /// pool. Before the pool is created, stale affinities of a deleted pool are deleted; see
    /// [`Self::drop_affinities_beside`].
    ///
    /// The commit fails if another writer has created or changed any pool since the existing pools were read.
    ///
    /// # Errors
    /// `Exists` if a pool of this name exists. `InvalidPool`, with Calico's error message, for an invalid pool.
    /// `Bridge` if the gateway is not a host address of the pool. Any store error.
    #[boxed_future]
    pub async fn create_pool(&self, new: &NewPool, gateway: Option<IpAddr>, deadline: Deadline) -> Result<Pool> {
        let key = keys::resource(ResourceKind::IpPool, &new.name);
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        self.drop_affinities_beside(new, deadline).await?;
        transact!(self, deadline, |tx| {
            tx.prefetch(vec![key.clone()], vec![pools.clone().into()]).await?;
            if tx.get(&key).await?.is_some() {
                return Err(Error::Exists { kind: ErrorSubject::Pool, name: new.name.clone() });
            }
            self.check_beside_others(tx, new).await?;
            let pool = Pool::new(new, &self.uid(), self.now())?;
            tx.put(&key, pool.encode()?)?;
            if let Some(gateway) = gateway {
                let mut work = WriteSet::new(tx, self.now(), 0);
                bridge::prepare(self, &mut work, &pool, Gateway::At(gateway)).await?;
                work.write().await?;
            }
            Ok(pool)
        })
    }

    /// Checks the definition of a new pool, and that the pool does not conflict with existing pools and blocks.
    ///
    /// # Errors
    /// `InvalidPool`, with Calico's error message, for an invalid pool. Any store error.
    pub async fn check_beside_others(&self, tx: &mut Transaction, new: &NewPool) -> Result<()> {
        let others = self.pools_beside(tx).await?;
        let blocks = tx.snapshot_keys(&Range::Prefix(keys::blocks_prefix(None))).await?;
        let blocks: Vec<IpNet> = blocks.iter().filter_map(keys::parse_block).collect();
        Ok(check_new_pool(new, &others, &blocks)?)
    }

    /// Reads and guards all stored pools, for a caller that is about to create a pool. If there are too many pools to
    /// guard each of them, the function guards and writes a single key instead, so that concurrent creations of pools
    /// conflict.
    pub(crate) async fn pools_beside(&self, tx: &mut Transaction) -> Result<Vec<Pool>> {
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        match tx.list(&pools).await {
            Ok(listed) => Ok(decode_all(&listed)),
            Err(error) if matches!(error.kind(), ErrorKind::ReadSetTooLarge { .. }) => {
                let lock = POOLS_LOCK.into();
                tx.get(&lock).await?;
                tx.put(&lock, self.uid())?;
                Ok(decode_all(&tx.snapshot_list(&pools).await?))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Creates a reservation for the given CIDRs.
    ///
    /// # Errors
    /// `Exists` if a reservation of this name exists. `Invalid` for an invalid name. Any store error.
    #[boxed_future]
    pub async fn create_reservation(&self, name: &str, networks: &[IpNet], deadline: Deadline) -> Result<()> {
        check_name(name).map_err(|reason| Error::Invalid(format!("reservation {name}: {reason}")))?;
        let key = keys::resource(ResourceKind::IpReservation, name);
        transact!(self, deadline, |tx| {
            if tx.get(&key).await?.is_some() {
                return Err(Error::Exists { kind: ErrorSubject::Reservation, name: name.to_owned() });
            }
            Ok(tx.put(&key, IpReservation::new(name, networks, &self.uid(), self.now()).encode()?)?)
        })?;
        Ok(())
    }

    /// Deletes a reservation.
    ///
    /// # Errors
    /// `NotFound` if the reservation does not exist. Any store error.
    #[boxed_future]
    pub async fn delete_reservation(&self, name: &str, deadline: Deadline) -> Result<()> {
        let key = keys::resource(ResourceKind::IpReservation, name);
        transact!(self, deadline, |tx| {
            if tx.get(&key).await?.is_none() {
                return Err(ErrorSubject::Reservation.not_found(name));
            }
            Ok(tx.delete(&key)?)
        })?;
        Ok(())
    }
}

impl Ipam {
    /// Returns the IPAM settings, or the defaults if no settings are stored, without a write.
    ///
    /// # Errors
    /// Any store error. `Malformed` for a damaged document.
    pub async fn config(&self, deadline: Deadline) -> Result<IpamConfig> {
        transact!(reading self, deadline, |tx| read_config(tx).await)
    }

    /// Changes the IPAM settings, and returns the new settings. `change` gets the stored settings, and is called again
    /// if another writer changed the settings before the commit; so no change is lost, whereas Calico overwrites
    /// concurrent changes. Unknown fields of the stored settings are kept. If `change` changes nothing, nothing is
    /// written. Concurrent assignments that have read the previous settings fail to commit, and are retried. A change
    /// of the settings affects no existing allocation.
    ///
    /// The commit that changes the settings guards their key.
    ///
    /// # Errors
    /// `Settings`, with Calico's error messages, for contradictory settings. Any store error. `Malformed` for a damaged
    /// document.
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
