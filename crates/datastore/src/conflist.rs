//! Finds the stores that this host's CNI configuration names, and the subnets that the host's container runtimes have
//! configured.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use driver::{ConfigError, Drivers, Location};
use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::netconf::{NetConfStore, for_netconf};
use crate::settings::text_fault;

/// The default folder in which container runtimes keep their CNI configuration.
pub const DEFAULT_CONF_DIR: &str = "/etc/cni/net.d";

/// The stores that the files of a CNI configuration folder name.
#[derive(Debug, Default)]
pub(crate) struct ConflistStores {
    /// The distinct stores that the CNI configuration files name, ordered by file name.
    pub(crate) candidates: Vec<NamedStore>,
    /// The file of the first plugin section that uses Margay but names no valid store, and the error of its settings.
    pub(crate) broken: Option<(PathBuf, ConfigError)>,
    pub(crate) unreadable: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct NamedStore {
    pub(crate) location: Location,
    /// The first configuration file that names the store in `location`.
    pub(crate) file: PathBuf,
}

/// A plugin section of a CNI configuration whose addresses `calico-ipam` assigns.
pub struct CalicoNetwork {
    /// The CNI configuration file that contains the plugin section.
    pub file: PathBuf,
    /// The NetConf that a runtime passes to the plugin: the plugin section, with the name and version of the network
    /// list; it may contain secrets.
    pub conf: Map<String, Value>,
    /// The store that the plugin section names in its own settings. The plugin section's store is derived without the
    /// container runtime's environment variables, which could select another store.
    pub store: Result<Location, ConfigError>,
}

impl fmt::Debug for CalicoNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CalicoNetwork").field("file", &self.file).finish_non_exhaustive()
    }
}

/// Returns the networks in a CNI configuration folder whose `ipam.type` is `calico-ipam`, and a warning for each
/// unreadable file. A missing configuration folder counts as empty.
pub fn calico_networks(drivers: &Drivers, dir: &Path) -> (Vec<CalicoNetwork>, Vec<String>) {
    let mut networks = Vec::new();
    let unreadable = each_plugin(dir, |file, plugin| {
        let Some(conf) = plugin.as_object() else { return };
        if let Some(store) = store_settings(conf).filter(|store| store.called_as_calico_ipam) {
            let store = for_netconf(drivers, &store, &|_| None);
            networks.push(CalicoNetwork { file: file.to_owned(), conf: conf.clone(), store });
        }
    });
    (networks, unreadable)
}

/// A network of the CNI configuration whose addresses Margay assigns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredNetwork {
    /// The name of the network.
    pub name: String,
    /// The store that the network's plugin section names in its own settings. The plugin section's store is derived
    /// without the container runtime's environment variables, which could select another store.
    pub store: Location,
    /// The subnets and ranges in the network's configuration, and the pools that it names by CIDR.
    pub subnets: Vec<String>,
}

/// Returns the networks in a CNI configuration folder that Margay serves from a valid store, and a warning for each
/// unreadable file. A missing configuration folder counts as empty.
pub fn networks(drivers: &Drivers, dir: &Path) -> (Vec<ConfiguredNetwork>, Vec<String>) {
    let mut networks = Vec::new();
    let unreadable = each_plugin(dir, |_, plugin| {
        let Some(conf) = plugin.as_object() else { return };
        if let Some(Ok(store)) = store_settings(conf).map(|store| for_netconf(drivers, &store, &|_| None)) {
            networks.push(ConfiguredNetwork { name: text(conf, "name"), store, subnets: subnets(conf) });
        }
    });
    (networks, unreadable)
}

/// Returns the CIDRs in a plugin's section: host-local's `subnet` and `ranges`, whereabouts' `range` and `ipRanges`,
/// and the CIDRs in `ipv4_pools` and `ipv6_pools`.
fn subnets(conf: &Map<String, Value>) -> Vec<String> {
    let Some(ipam) = field(conf, "ipam").and_then(Value::as_object) else { return Vec::new() };
    let list = |name| field(ipam, name).and_then(Value::as_array).into_iter().flatten();
    let ranges = list("ranges").filter_map(Value::as_array).flatten().filter_map(Value::as_object);
    let mut subnets: Vec<String> = ranges.map(|range| text(range, "subnet")).collect();
    subnets.push(text(ipam, "subnet"));
    let whereabouts = list("ipRanges").filter_map(Value::as_object).chain([ipam]).map(|range| text(range, "range"));
    // The range of a whereabouts section may have the form FIRST-LAST/LENGTH.
    subnets.extend(whereabouts.map(|range| range.rsplit('-').next().unwrap_or_default().to_owned()));
    let pools = list("ipv4_pools").chain(list("ipv6_pools")).filter_map(Value::as_str);
    subnets.extend(pools.map(str::to_owned));
    subnets.retain(|text| text.contains('/'));
    subnets
}

/// Finds the stores that the files of a CNI configuration folder name. A missing configuration folder counts as empty.
pub(crate) fn scan(drivers: &Drivers, dir: &Path) -> ConflistStores {
    let mut found = ConflistStores::default();
    let unreadable = each_plugin(dir, |file, plugin| found.add(drivers, file, plugin));
    ConflistStores { unreadable, ..found }
}

/// Calls `visit` for each plugin section of every `.conflist`, `.conf` and `.json` file in a folder, ordered by file
/// name. Returns a warning for each configuration file that could not be read.
fn each_plugin(dir: &Path, mut visit: impl FnMut(&Path, &Value)) -> Vec<String> {
    let mut files = match configuration_files(dir) {
        Ok(files) => files,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => return vec![format!("{}: {error}", dir.display())],
    };
    files.sort();
    let mut unreadable = Vec::new();
    for file in files {
        match plugins(&file) {
            Ok(plugins) => plugins.iter().for_each(|plugin| visit(&file, plugin)),
            Err(problem) => unreadable.push(format!("{}: {problem}", file.display())),
        }
    }
    unreadable
}

impl ConflistStores {
    fn add(&mut self, drivers: &Drivers, file: &Path, plugin: &Value) {
        let Some(conf) = plugin.as_object().and_then(store_settings) else {
            return;
        };
        // The environment of an operator's shell differs from the runtime's, so it must not influence which store a CNI
        // configuration file selects.
        match for_netconf(drivers, &conf, &|_| None) {
            Ok(location) => {
                if !self.candidates.iter().any(|known| known.location.is_same_store(&location)) {
                    self.candidates.push(NamedStore { location, file: file.to_owned() });
                }
            }
            Err(error) => {
                self.broken.get_or_insert_with(|| (file.to_owned(), error));
            }
        }
    }
}

fn configuration_files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let known =
            path.extension().is_some_and(|extension| ["conflist", "conf", "json"].iter().any(|e| extension == *e));
        if known && path.is_file() {
            files.push(path);
        }
    }
    Ok(files)
}

fn plugins(file: &Path) -> Result<Vec<Value>, String> {
    let text = fs::read(file).map_err(|error| error.to_string())?;
    let not_json =
        |error| text_fault(&text).map_or_else(|| format!("not valid JSON: {error}"), |fault| fault.to_string());
    plugins_of(serde_json::from_slice(&text).map_err(not_json)?)
}

/// Returns the plugin sections of a network list, each with the list's name and version, or the single section of a
/// `.conf` file. Includes the sections of delegated plugins, as in Multus and flannel configurations.
fn plugins_of(mut conf: Value) -> Result<Vec<Value>, String> {
    let Some(list) = conf.as_object_mut() else { return Ok(vec![conf]) };
    let sections = match list.remove("plugins") {
        Some(Value::Array(mut plugins)) => {
            for plugin in plugins.iter_mut().filter_map(Value::as_object_mut) {
                for name in ["name", "cniVersion"] {
                    if let Some(value) = list.get(name) {
                        plugin.insert(name.to_owned(), value.clone());
                    }
                }
            }
            plugins
        }
        Some(_) => return Err("\"plugins\" is not a list".into()),
        None => vec![conf],
    };
    let mut all = Vec::new();
    for section in sections {
        for delegate in delegates(&section) {
            all.extend(plugins_of(delegate)?);
        }
        all.push(section);
    }
    Ok(all)
}

/// Returns the nested plugin configurations in a plugin section. Multus lists nested plugins in `delegates`; flannel
/// has one `delegate`, which inherits the section's name, version and `ipam`.
fn delegates(plugin: &Value) -> Vec<Value> {
    let Some(conf) = plugin.as_object() else { return Vec::new() };
    let mut found = field(conf, "delegates").and_then(Value::as_array).cloned().unwrap_or_default();
    if let Some(delegate) = field(conf, "delegate").and_then(Value::as_object) {
        let mut delegate = delegate.clone();
        for name in ["name", "cniVersion", "ipam"] {
            if let Some(value) = field(conf, name) {
                delegate.insert(name.to_owned(), value.clone());
            }
        }
        found.push(delegate.into());
    }
    found
}

/// Returns the store settings of a plugin section, or `None` if Margay does not assign the plugin's addresses.
fn store_settings(plugin: &Map<String, Value>) -> Option<NetConfStore> {
    let ipam = field(plugin, "ipam").and_then(Value::as_object).map(|ipam| text(ipam, "type")).unwrap_or_default();
    let kind = text(plugin, "type");
    let is_ours = matches!(ipam.as_str(), "margay-ipam" | "calico-ipam") || kind.starts_with("margay");
    // A flannel section only configures the plugin to which flannel delegates.
    if !is_ours || kind == "flannel" {
        return None;
    }
    let kubernetes = |name| {
        field(plugin, "kubernetes").and_then(Value::as_object).map(|section| text(section, name)).unwrap_or_default()
    };
    Some(NetConfStore {
        datastore_type: text(plugin, "datastore_type"),
        datastore_path: text(plugin, "datastore_path"),
        etcd_endpoints: text(plugin, "etcd_endpoints"),
        has_endpoints: ["etcd_endpoints", "etcd_discovery_srv"]
            .iter()
            .any(|name| field(plugin, name).is_some_and(|value| *value != Value::Null)),
        etcd_discovery_srv: text(plugin, "etcd_discovery_srv"),
        etcd_key_file: text(plugin, "etcd_key_file"),
        etcd_cert_file: text(plugin, "etcd_cert_file"),
        etcd_ca_cert_file: text(plugin, "etcd_ca_cert_file"),
        kubeconfig: kubernetes("kubeconfig"),
        k8s_api_root: kubernetes("k8s_api_root"),
        called_as_calico_ipam: ipam == "calico-ipam",
    })
}

/// Looks up a field of a JSON object by its name, whose letter case does not matter, as in Go's JSON decoder.
fn field<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    object.get(name).or_else(|| object.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value))
}

/// Returns a string field of a JSON object, or an empty string if the field is missing or not a string. Fields of a
/// wrong type are ignored here, because the plugin itself refuses them.
fn text(object: &Map<String, Value>, name: &str) -> String {
    field(object, name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The folders in which podman keeps one configuration file per network.
const PODMAN_FOLDERS: [&str; 2] = ["/etc/containers/networks", "/usr/share/containers/networks"];

/// Returns the subnets of podman's networks and of all networks in a CNI configuration folder, whichever IPAM plugin
/// they use. Also returns a warning for each configuration file that could not be read. A missing configuration folder
/// counts as empty.
pub fn runtime_subnets(conf_dir: &Path) -> (Vec<IpNet>, Vec<String>) {
    let mut used = Vec::new();
    let unreadable = each_plugin(conf_dir, |_, plugin| {
        let texts = plugin.as_object().map(subnets).unwrap_or_default();
        used.extend(texts.iter().filter_map(|text| text.parse::<IpNet>().ok()).map(|subnet| subnet.trunc()));
    });
    used.extend(PODMAN_FOLDERS.iter().flat_map(|folder| podmans(Path::new(folder))));
    (used, unreadable)
}

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

    fn at(url: &str) -> Location {
        stores::at(url).unwrap()
    }

    #[test]
    fn conflist_networks_have_their_stores_and_subnets() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            (
                "1.conflist",
                r#"{"name":"a","plugins":[{"type":"bridge","datastore_type":"sled","datastore_path":"/a",
                "ipam":{"type":"margay-ipam","ranges":[[{"subnet":"10.0.0.0/24"}],[{"Subnet":"fd00::/64"}]]}},{"type":"x"}]}"#,
            ),
            (
                "2.conf",
                r#"{"name":"b","type":"ptp","datastore_type":"redb","ipam":{"type":"margay-ipam","subnet":"10.1.0.0/24",
                "ipv4_pools":["main","10.2.0.0/16"]}}"#,
            ),
            (
                "2b.conf",
                r#"{"name":"w","type":"macvlan","datastore_type":"redb","ipam":{"type":"margay-ipam",
                "range":"10.3.0.9-10.3.0.20/24","ipRanges":[{"range":"fd03::/64"}]}}"#,
            ),
            (
                "2c.conf",
                r#"{"name":"multus","type":"multus","delegates":[{"name":"d","plugins":[{"type":"macvlan","datastore_path":"/d",
                "ipam":{"type":"margay-ipam","subnet":"10.4.0.0/24"}}]},{"name":"e","type":"ptp","datastore_path":"/e",
                "ipam":{"type":"margay-ipam"}},7]}"#,
            ),
            (
                "2d.conflist",
                r#"{"name":"cbr0","plugins":[{"type":"flannel","ipam":{"type":"margay-ipam"},
                "delegate":{"isDefaultGateway":true,"datastore_path":"/f"}},{"type":"portmap"}]}"#,
            ),
            ("2e.conf", r#"{"name":"x","type":"multus","delegates":"x","delegate":[]}"#),
            ("3.conf", r#"{"name":"c","type":"bridge","ipam":{"type":"host-local","subnet":"10.0.0.0/24"}}"#),
            ("4.conf", "{"),
            ("5.conf", "\u{feff}{}"),
        ];
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let (found, unreadable) = networks(&stores::drivers(), dir.path());
        let expected = [
            ("a", at("sled:///a"), &["10.0.0.0/24", "fd00::/64"][..]),
            ("b", at("redb:///var/lib/margay/ipam.redb"), &["10.1.0.0/24", "10.2.0.0/16"]),
            ("w", at("redb:///var/lib/margay/ipam.redb"), &["fd03::/64", "10.3.0.20/24"]),
            ("d", at("sled:///d"), &["10.4.0.0/24"]),
            ("e", at("sled:///e"), &[]),
            ("cbr0", at("sled:///f"), &[]),
        ];
        let expected = expected.map(|(name, store, subnets)| ConfiguredNetwork {
            name: name.into(),
            store,
            subnets: subnets.iter().map(|text| (*text).to_owned()).collect(),
        });
        assert_eq!(found, expected);
        assert!(unreadable.len() == 2 && unreadable[1].contains("begins with a byte order mark"), "{unreadable:?}");
    }

    #[test]
    fn conflist_stores_are_one_when_endpoint_order_differs() {
        let folder = tempfile::tempdir().unwrap();
        for (file, endpoints) in [("a.conf", "http://a:2379,http://b:2379"), ("b.conf", "http://b:2379, http://a:2379")]
        {
            let conf = format!(
                r#"{{"name":"n","type":"calico","etcd_endpoints":"{endpoints}","datastore_type":"etcdv3",
                "ipam":{{"type":"calico-ipam"}}}}"#
            );
            fs::write(folder.path().join(file), conf).unwrap();
        }
        let found = scan(&stores::drivers(), folder.path());
        assert!(found.broken.is_none(), "{:?}", found.broken);
        assert_eq!(found.candidates.len(), 1, "{:?}", found.candidates);
    }

    #[test]
    fn conflist_networks_of_any_ipam_plugin_count() {
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
    fn conflist_networks_of_podman_are_read() {
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
