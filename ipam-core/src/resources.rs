//! Creates pools and reservations, deletes reservations, and reads and changes the settings that all nodes share.

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

/// The key that serializes the creation of pools when there are too many pools to guard.
const POOLS_LOCK: &str = "/margay/v1/pools";

impl Ipam {
    /// Creates a pool. With a gateway, the pool is prepared for a bridged network. Affinities that an earlier pool left
    /// behind are deleted first; see [`Self::drop_affinities_beside`].
    ///
    /// Guards: no pool was created or changed meanwhile.
    ///
    /// # Errors
    /// `Exists` if the name is taken. `InvalidPool`, with Calico's text, for an invalid pool. `Bridge` if the gateway
    /// is not a host address of the pool. Any store error.
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

    /// Checks a new pool, also against the existing pools and blocks.
    ///
    /// # Errors
    /// `InvalidPool`, with Calico's text, for an invalid pool. Any store error.
    pub async fn check_beside_others(&self, tx: &mut Transaction, new: &NewPool) -> Result<()> {
        let others = self.pools_beside(tx).await?;
        let blocks = tx.snapshot_keys(&Range::Prefix(keys::blocks_prefix(None))).await?;
        let blocks: Vec<IpNet> = blocks.iter().filter_map(keys::parse_block).collect();
        Ok(check_new_pool(new, &others, &blocks)?)
    }

    /// Reads and guards all pools, for a caller that creates another pool. With more pools than can be guarded one by
    /// one, creations run one after the other, guarded by a single key.
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

    /// Creates a reservation.
    ///
    /// # Errors
    /// `Exists` if the name is taken. `Invalid` for an invalid name. Any store error.
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
    /// The settings, or the defaults if none are stored. Does not store anything.
    ///
    /// # Errors
    /// Any store error. `Malformed` for a damaged document.
    pub async fn config(&self, deadline: Deadline) -> Result<IpamConfig> {
        transact!(reading self, deadline, |tx| read_config(tx).await)
    }

    /// Changes the settings, and returns them. `change` gets the stored settings, and is called again if another writer
    /// changes them meanwhile. So no change is lost, whereas Calico overwrites. Unknown fields are kept. If nothing
    /// changes, nothing is written. After the commit, no assignment succeeds that was decided by the old settings.
    /// Existing assignments are kept.
    ///
    /// Guards: the settings.
    ///
    /// # Errors
    /// `Settings`, with Calico's texts, for contradictory settings. Any store error. `Malformed` for a damaged
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
