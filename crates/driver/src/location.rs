//! A place where a store is, in the care of its driver.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::access::Access;
use crate::cluster::ClusterAddress;
use crate::contract::{Driver, Facts, Scope};
use crate::drivers::Drivers;
use crate::place::Place;

/// Where a store is: a place, and the driver that opens it. It prints as a store URL; [`Drivers::parse`] reads one.
#[derive(Clone)]
pub struct Location {
    drivers: Drivers,
    driver: &'static dyn Driver,
    place: Place,
}

impl Location {
    /// A place in the care of a driver, in a program with these drivers.
    pub(crate) fn new(drivers: Drivers, driver: &'static dyn Driver, place: Place) -> Self {
        Self { drivers, driver, place }
    }

    /// The driver.
    pub fn driver(&self) -> &'static dyn Driver {
        self.driver
    }

    /// All drivers of the program.
    pub fn drivers(&self) -> &Drivers {
        &self.drivers
    }

    /// The facts about the driver's stores.
    pub fn facts(&self) -> Facts {
        self.driver.facts()
    }

    /// The place.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The folder of a store of one machine; `None` for the others.
    pub fn path(&self) -> Option<&Path> {
        match &self.place {
            Place::Folder(path) => Some(path),
            Place::Memory | Place::Cluster(_) => None,
        }
    }

    /// The address of a cluster; `None` for the others.
    pub fn cluster(&self) -> Option<&ClusterAddress> {
        match &self.place {
            Place::Cluster(address) => Some(address),
            Place::Memory | Place::Folder(_) => None,
        }
    }

    /// True if many machines share the store: see [`Scope::Cluster`].
    pub fn is_shared(&self) -> bool {
        self.facts().scope == Scope::Cluster
    }

    /// Another folder in the care of the same driver.
    #[must_use]
    pub fn moved_to(&self, path: impl Into<PathBuf>) -> Self {
        Self { place: Place::Folder(path.into()), ..self.clone() }
    }

    /// The location with the credentials of its cluster replaced by what `change` makes of them. A location that is no cluster
    /// stays as it is.
    ///
    /// # Errors
    /// The error of `change`.
    pub fn with_access<E>(self, change: impl FnOnce(Access) -> Result<Access, E>) -> Result<Self, E> {
        let place = match self.place {
            Place::Cluster(ClusterAddress { access, endpoints, discovery_srv }) => {
                Place::Cluster(ClusterAddress { endpoints, discovery_srv, access: change(access)? })
            }
            place => place,
        };
        Ok(Self { place, ..self })
    }

    /// Its address, the same in whatever order the members of a cluster are named: a key for files about the store.
    pub fn in_order(&self) -> String {
        match &self.place {
            Place::Cluster(address) => self.driver.url(&Place::Cluster(address.in_order())),
            place => self.driver.url(place),
        }
    }

    /// True if both are the same store, however it is reached.
    pub fn is_same_store(&self, other: &Self) -> bool {
        match (&self.place, &other.place) {
            (Place::Cluster(one), Place::Cluster(two)) => {
                let is_same_driver = self.facts().name == other.facts().name;
                is_same_driver && one.endpoints == two.endpoints && one.discovery_srv == two.discovery_srv
            }
            _ => self == other,
        }
    }
}

impl PartialEq for Location {
    fn eq(&self, other: &Self) -> bool {
        self.facts().name == other.facts().name && self.place == other.place
    }
}

impl Eq for Location {}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple(self.facts().name).field(&self.place).finish()
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.driver.url(&self.place))
    }
}
