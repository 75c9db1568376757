//! The subnets that the container runtimes of this machine use, as far as their configuration says.

use std::fs;
use std::path::Path;

use ipnet::IpNet;
use serde_json::Value;

use crate::conflist::{each_plugin, subnets};

/// The folders in which podman keeps its networks.
const PODMAN: [&str; 2] = ["/etc/containers/networks", "/usr/share/containers/networks"];

/// The subnets of the networks in a folder of CNI configuration, whatever assigns their addresses, and of podman's networks;
/// and what could not be read, a sentence each. An absent folder is an empty one.
pub fn runtime_subnets(conf_dir: &Path) -> (Vec<IpNet>, Vec<String>) {
    let mut used = Vec::new();
    let unreadable = each_plugin(conf_dir, |_, plugin| {
        let texts = plugin.as_object().map(subnets).unwrap_or_default();
        used.extend(texts.iter().filter_map(|text| text.parse::<IpNet>().ok()).map(|subnet| subnet.trunc()));
    });
    used.extend(PODMAN.iter().flat_map(|folder| podmans(Path::new(folder))));
    (used, unreadable)
}

/// The subnets of podman's networks, one file each.
fn podmans(folder: &Path) -> Vec<IpNet> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let documents = files.filter_map(|path| serde_json::from_slice::<Value>(&fs::read(path).ok()?).ok());
    documents
        .flat_map(|document| {
            let subnets = document["subnets"].as_array().cloned().unwrap_or_default();
            subnets.into_iter().filter_map(|subnet| subnet["subnet"].as_str()?.parse().ok())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_of_any_ipam_plugin_count() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write(
            "10-pod.conflist",
            r#"{"cniVersion":"1.0.0","name":"pod","plugins":[
                {"type":"bridge","ipam":{"type":"host-local","ranges":[[{"subnet":"10.85.0.0/16"}],[{"subnet":"fd85::/64"}]]}},
                {"type":"portmap"}]}"#,
        );
        write(
            "20-lab.conf",
            r#"{"cniVersion":"1.0.0","name":"lab","type":"macvlan","ipam":{"type":"whereabouts","range":"192.168.7.9/24"}}"#,
        );
        write("30-auto.conf", r#"{"name":"auto","type":"bridge","ipam":{"type":"margay-ipam","subnet":"auto"}}"#);
        write("40-broken.conf", "{");
        let (used, unreadable) = runtime_subnets(folder.path());
        let texts: Vec<String> = used.iter().map(ToString::to_string).collect();
        for subnet in ["10.85.0.0/16", "fd85::/64", "192.168.7.0/24"] {
            assert!(texts.contains(&subnet.to_owned()), "{subnet} {texts:?}");
        }
        assert_eq!(unreadable.len(), 1, "{unreadable:?}");
        assert!(runtime_subnets(Path::new("/no/such/folder")).1.is_empty());
    }

    #[test]
    fn podmans_networks_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write(
            "a.json",
            r#"{"name":"a","subnets":[{"subnet":"10.89.0.0/24","gateway":"10.89.0.1"},{"subnet":"fd89::/64"}]}"#,
        );
        write("b.json", "garbage");
        write("c.json", r#"{"name":"c","subnets":null}"#);
        let found: Vec<String> = podmans(folder.path()).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.89.0.0/24", "fd89::/64"]);
        assert!(podmans(Path::new("/no/such/folder")).is_empty());
    }
}
