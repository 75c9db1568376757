//! Pools, reservations and the settings that all nodes share: making pools and reservations, deleting reservations, reading and
//! changing the settings.

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

/// Where those take turns that make a pool beside very many others.
const POOLS_LOCK: &str = "/margay/v1/pools";

impl Ipam {
    /// Makes a pool; with a gateway, one that is ready for a bridged network. Affinities that an earlier pool left there
    /// are deleted before, see [`Self::drop_affinities_beside`].
    ///
    /// Guards: no pool came or changed meanwhile.
    ///
    /// # Errors
    /// `Exists`; `Invalid`, with Calico's text, for a pool that must not be; a gateway that is not a host's address of it.
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

    /// Checks a new pool, also against the pools and blocks that there are.
    ///
    /// # Errors
    /// `Invalid`, with Calico's text, for a pool that must not be; those of the store.
    pub async fn check_beside_others(&self, tx: &mut Transaction, new: &NewPool) -> Result<()> {
        let others = self.pools_beside(tx).await?;
        let blocks = tx.snapshot_keys(&Range::Prefix(keys::blocks_prefix(None))).await?;
        let blocks: Vec<IpNet> = blocks.iter().filter_map(keys::parse_block).collect();
        Ok(check_new_pool(new, &others, &blocks)?)
    }

    /// All pools, for a caller that makes another one: the commit fails if one has come or changed by then. Of more
    /// than can be guarded one by one, those that are made come one after the other.
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

    /// Makes a reservation.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for a name that cannot be one.
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
    /// `NotFound`.
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
