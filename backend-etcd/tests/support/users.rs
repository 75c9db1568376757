//! Starts etcd servers with users and permissions.

use std::io::{Error, Result};

use backend_etcd::{Credentials, EtcdStore, Options};
use etcd_client::{Client, Permission, PermissionType};

use super::Etcd;

pub(crate) const PASSWORD: &str = "hidden-password";

/// Enables authentication on an etcd server. The etcd user `root` has all permissions; the user `guest` may read and
/// write keys with the prefix `open/`.
pub(crate) async fn guard(etcd: &Etcd) -> std::result::Result<(), etcd_client::Error> {
    let mut client = Client::connect([etcd.url()], None).await?;
    let open = Permission::new(PermissionType::Readwrite, "open/").with_prefix();
    for (user, permission) in [("root", None), ("guest", Some(open))] {
        client.user_add(user, PASSWORD, None).await?;
        client.role_add(user).await?;
        client.user_grant_role(user, user).await?;
        if let Some(permission) = permission {
            client.role_grant_permission(user, permission).await?;
        }
    }
    client.auth_enable().await.map(|_| ())
}

/// Starts an etcd server with authentication; its login tokens expire after one second without use.
pub(crate) async fn guarded() -> Result<Etcd> {
    let etcd = Etcd::start_with("http", &["--auth-token-ttl=1".to_owned()])?;
    guard(&etcd).await.map_err(Error::other)?;
    Ok(etcd)
}

/// Opens the store on the server `etcd` with a user's name and password.
pub(crate) fn as_user(etcd: &Etcd, user: &str, password: &str) -> kv::Result<EtcdStore> {
    EtcdStore::open(&Options::new([etcd.url()]).with_credentials(Credentials::new(user, password)))
}
