//! A store that a daemon, `margay serve`, keeps open: where its socket is, and the store behind it.

mod or_alone;
mod store;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use driver::{ClusterAddress, Location, Pem, Place};
use wire::{Hello, Identity, name};

pub(crate) use or_alone::ServedOrAlone;
pub use store::{ServedStore, connect};

/// The socket of the daemon of a store; `None` for a store that no daemon can have.
pub fn socket(location: &Location) -> Option<PathBuf> {
    instance(location).map(|name| name::socket(&name))
}

/// The name of the daemon of a store, which is also the instance of its systemd units.
pub fn instance(location: &Location) -> Option<String> {
    match location.place() {
        Place::Folder(path) => Some(name::of_folder(&canonical(path))),
        Place::Cluster(address) => Some(name::of_cluster(&access(address))),
        _ => None,
    }
}

/// The identity of the cluster at this location; `None` for any other store.
pub fn cluster(location: &Location) -> Option<Identity> {
    Some(Identity::Cluster { access: access(location.cluster()?) })
}

/// The way into a cluster, so that no client is served under the identity of another one.
fn access(address: &ClusterAddress) -> String {
    let ClusterAddress { endpoints, discovery_srv, access, .. } = address.in_order();
    let user = access.login.as_ref().map(|login| &login.user);
    let certificate = match access.identity.as_ref().map(|identity| &identity.certificate) {
        Some(Pem::File(path)) => Some(path.display().to_string()),
        Some(Pem::Inline(text)) => Some(text.clone()),
        None => None,
    };
    // Quoted, so that no two ways read alike.
    format!("{endpoints:?} {discovery_srv:?} {user:?} {certificate:?}")
}

/// A path without symbolic links, as far as it leads somewhere.
fn canonical(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let found = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let Some((above, found)) = found else { return path };
    match path.strip_prefix(above) {
        Ok(rest) if rest.as_os_str().is_empty() => found,
        Ok(rest) => found.join(rest),
        Err(_) => path,
    }
}

/// True if a daemon of this store may run as this user: root, or the store's owner. A store that is not there yet has its
/// owner in this process.
pub fn is_trusted(location: &Location, uid: u32) -> bool {
    let owner = location.path().and_then(|path| fs::metadata(path).ok()).map(|folder| folder.uid());
    uid == 0 || uid == owner.unwrap_or_else(|| nix::unistd::geteuid().as_raw())
}

/// True if a daemon that says this has the store at this location, and speaks our language.
pub fn is_meant(location: &Location, hello: &Hello) -> bool {
    hello.is_same_version()
        && match (location.path(), &hello.store) {
            // Where the files are another engine's, the driver says so.
            (Some(folder), _) => {
                let is_ours = || kv_local::engine_in(folder).is_none_or(|engine| engine == location.facts().name);
                hello.has_store_in(folder) && is_ours()
            }
            (None, store) => cluster(location).as_ref() == Some(store),
        }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use driver::{Access, Login};

    use super::*;

    fn at(url: &str) -> Location {
        stores::at(url).unwrap()
    }

    #[test]
    fn a_link_and_its_target_have_one_socket() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        fs::create_dir(root.join("real")).unwrap();
        std::os::unix::fs::symlink(root.join("real"), root.join("link")).unwrap();
        let name = |path: &str| instance(&at(&format!("sled://{}", root.join(path).display()))).unwrap();
        assert_eq!(name("link"), name("real"));
        assert_eq!(name("link/a/b"), name("real/a/b"), "what is not there yet");
        assert_ne!(name("real/a"), name("real/b"));
        assert_eq!(instance(&at("memory:")), None);
    }

    #[test]
    fn the_default_store_has_the_name_that_systemd_gives_it() {
        let name = instance(&at("sled:///nowhere/margay/ipam.sled"));
        assert_eq!(name.as_deref(), Some("nowhere-margay-ipam.sled"));
    }

    #[test]
    fn each_identity_has_its_own_daemon() {
        let plain = at("etcd://a:1,b:2");
        assert_eq!(instance(&plain), instance(&at("etcd://b:2,a:1")));
        let login = Some(Login { user: "calico".to_owned(), password: "hidden".to_owned() });
        let Ok(named) = plain.clone().with_access(|access| Ok::<_, Infallible>(Access { login, ..access }));
        assert_ne!(instance(&plain), instance(&named));
        assert!(!instance(&named).unwrap().contains("hidden"));
    }
}
