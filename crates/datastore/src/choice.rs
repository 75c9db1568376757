//! The rules that lead from settings, wherever they came from, to a store.

use driver::{ConfigError, Driver, Drivers, Location, Result, Scope, Settings};

/// Calico's `datastore_type` of a cluster's etcd, which is meant wherever an endpoint is set and no type.
const ETCD: &str = "etcdv3";
/// Calico's `datastore_type` of the Kubernetes API.
pub(crate) const KUBERNETES: &str = "kubernetes";

/// True if something here says which store is meant.
pub(crate) fn names_a_store(settings: &Settings) -> bool {
    !settings.datastore_type.is_empty() || !settings.path.is_empty() || settings.has_cluster_setting()
}

/// True if there is any etcd or Kubernetes setting, the type included.
pub(crate) fn means_cluster(drivers: &Drivers, settings: &Settings) -> bool {
    let is_calicos = matches!(settings.datastore_type.as_str(), ETCD | KUBERNETES);
    settings.has_cluster_setting() || is_calicos || scope(drivers, settings) == Some(Scope::Cluster)
}

/// True if the type is one of a store in a folder.
pub(crate) fn names_embedded(drivers: &Drivers, settings: &Settings) -> bool {
    scope(drivers, settings) == Some(Scope::Machine)
}

fn scope(drivers: &Drivers, settings: &Settings) -> Option<Scope> {
    drivers.of_type(&settings.datastore_type).map(|driver| driver.facts().scope)
}

/// The location. Without a type it is an embedded store only if nothing points to a cluster.
pub(crate) fn location(drivers: &Drivers, settings: &Settings) -> Result<Location> {
    drivers.of_settings(driver(drivers, settings)?, settings)
}

fn driver(drivers: &Drivers, settings: &Settings) -> Result<&'static dyn Driver> {
    let named = match settings.datastore_type.as_str() {
        KUBERNETES => return Err(ConfigError::Kubernetes),
        "" if settings.has_cluster_setting() => ETCD,
        "" => return drivers.default_driver(),
        named => named,
    };
    drivers.of_type(named).ok_or_else(|| ConfigError::UnknownType(named.to_owned()))
}
