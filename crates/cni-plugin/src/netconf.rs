//! Decodes the network configuration from standard input as Go's `encoding/json` does.

use std::fmt;
use std::time::Duration;

use agent::{CniError, Code, Result};
use datastore::NetConfStore;

use crate::env::is_valid_name;
use crate::gojson::GoJson;

/// Default time limit of a plugin call whose store is a cluster.
const DEFAULT_STORE_TIMEOUT: Duration = Duration::from_secs(10);

/// The fields of a network configuration that the main plugin and the IPAM plugin both read. If the configuration lacks
/// a field, the struct's field is empty.
///
/// [`NetConf`] is decoded by the rules of Go's JSON library, which Calico uses for the configuration. The names of
/// configuration fields are case-insensitive, unknown fields are ignored, and null counts as absent. Of several
/// configuration fields with one name, the last counts. If several values have a wrong type, the error names the first
/// of them. Only ADD decodes the settings of secondary networks, because a DEL must never fail on an invalid setting.
#[derive(Clone, Debug, Default)]
pub(crate) struct NetConf {
    pub(crate) name: String,
    pub(crate) plugin: String,
    pub(crate) nodename: String,
    pub(crate) nodename_file: String,
    pub(crate) hostname: String,
    pub(crate) lock_file: String,
    pub(crate) log_level: String,
    pub(crate) log_file: String,
    /// The limits of log files: size (`log_file_max_size`, in megabytes), age (`log_file_max_age`, in days) and number
    /// (`log_file_max_count`). A log file limit of 0 means the default limit.
    pub(crate) log_max_size: i64,
    pub(crate) log_max_age: i64,
    pub(crate) log_max_count: i64,
    pub(crate) store: NetConfStore,
    /// The value of `datastore_timeout`, in seconds.
    timeout: Option<i64>,
    /// True if all addresses of a request must be in one block (`windows_use_single_network`).
    pub(crate) single_block: bool,
    /// The values of `bridge` and `master`, which are settings of other main plugins. A probe is sent on the network
    /// interface that `bridge` or `master` names.
    pub(crate) bridge: Option<GoJson>,
    pub(crate) master: Option<GoJson>,
    pub(crate) is_gateway: bool,
    pub(crate) is_default_gateway: bool,
    pub(crate) ipam: IpamConf,
    pub(crate) policy: PolicyConf,
    /// The value of `args.cni.ips`.
    pub(crate) args_ips: Option<GoJson>,
    /// The value of `args.cni.labels`.
    pub(crate) args_labels: Option<GoJson>,
    /// The value of `runtimeConfig.ips`.
    pub(crate) runtime_ips: Option<GoJson>,
    /// The value of `runtimeConfig.ipRanges`.
    pub(crate) runtime_ranges: Option<GoJson>,
    /// The value of `runtimeConfig["io.kubernetes.cri.pod-annotations"]`.
    pub(crate) runtime_annotations: Option<GoJson>,
    pub(crate) prev_result: Option<GoJson>,
}

/// The `ipam` object of a network configuration.
#[derive(Clone, Debug, Default)]
pub(crate) struct IpamConf {
    /// The value of `assign_ipv4`. With the string `false`, the network assigns no IPv4 addresses; all other values of
    /// `assign_ipv4` have no effect.
    pub(crate) assign_ipv4: Option<String>,
    /// The value of `assign_ipv6`. With the string `true`, the network assigns IPv6 addresses. With the string `false`,
    /// the network assigns no IPv6 addresses, even if its configuration defines IPv6 pools.
    pub(crate) assign_ipv6: Option<String>,
    pub(crate) ipv4_pools: Vec<String>,
    pub(crate) ipv6_pools: Vec<String>,
    pub(crate) weights: Option<GoJson>,
    pub(crate) mask: Option<GoJson>,
    pub(crate) gateway: Option<GoJson>,
    pub(crate) routes: Option<GoJson>,
    pub(crate) probe: Option<GoJson>,
    pub(crate) subnet: Option<GoJson>,
    pub(crate) range_start: Option<GoJson>,
    pub(crate) range_end: Option<GoJson>,
    pub(crate) ranges: Option<GoJson>,
    pub(crate) sticky: Option<GoJson>,
    pub(crate) whereabouts: WhereaboutsConf,
}

/// The keys of `ipam` that define a network's addresses in whereabouts' notation.
#[derive(Clone, Debug, Default)]
pub(crate) struct WhereaboutsConf {
    pub(crate) range: Option<GoJson>,
    pub(crate) range_start: Option<GoJson>,
    pub(crate) range_end: Option<GoJson>,
    pub(crate) exclude: Option<GoJson>,
    /// The value of `ipRanges`: a list of objects with the keys `range`, `range_start`, `range_end` and `exclude`.
    pub(crate) ip_ranges: Option<GoJson>,
    pub(crate) network_name: Option<GoJson>,
}

/// Parses the JSON of a network configuration. As the CNI library does, this function checks the network's name before
/// all other values of the configuration.
///
/// # Errors
/// CNI error code 6 if the text is not a JSON object, or if the network's name is not a string. CNI error code 7 if the
/// network's name is missing or invalid.
pub(crate) fn check_name(text: &[u8]) -> Result<GoJson> {
    let decode = |reason: String| CniError::new(Code::Decode, format!("error unmarshall network config: {reason}"));
    let conf = GoJson::parse(text).map_err(decode)?;
    if !matches!(conf, GoJson::Object(_) | GoJson::Null) {
        let kind = conf.kind();
        return Err(decode(format!(
            "json: cannot unmarshal {kind} into Go value of type struct {{ Name string \"json:\\\"name\\\"\" }}"
        )));
    }
    let wrong = |kind| decode(format!("json: cannot unmarshal {kind} into Go struct field .name of type string"));
    let name = conf.text_member("name").map_err(wrong)?;
    if name.is_empty() {
        return Err(CniError::config("missing network name"));
    }
    if !is_valid_name(name) {
        return Err(CniError::config("invalid characters found in network name").with_details(name));
    }
    Ok(conf)
}

impl NetConf {
    /// Decodes the fields of the network configuration that the plugin uses.
    ///
    /// # Errors
    /// CNI error code 999 with Go's message for the first value of a wrong type.
    pub(crate) fn decode(json: &GoJson) -> Result<Self> {
        let mut conf = Self::default();
        let mut decoder = Decoder::default();
        decoder.members(json, "", "types.NetConf", |decoder, name, value| conf.member(decoder, name, value));
        decoder.finish()?;
        Ok(conf)
    }

    /// Returns the time limit of a plugin call whose store is a cluster.
    ///
    /// # Errors
    /// CNI error code 7 unless `datastore_timeout` is between 1 and 90 seconds. The maximum of `datastore_timeout` is
    /// also 90 seconds in Calico's plugin.
    pub(crate) fn patience(&self) -> Result<Duration> {
        match self.timeout.map(u64::try_from) {
            None => Ok(DEFAULT_STORE_TIMEOUT),
            Some(Ok(seconds @ 1..=90)) => Ok(Duration::from_secs(seconds)),
            Some(_) => Err(CniError::config("datastore_timeout is not between 1 and 90")
                .with_details("it is the number of seconds that a call on a cluster's store may take")),
        }
    }

    pub(crate) fn member(&mut self, d: &mut Decoder, name: &str, value: &GoJson) {
        match name {
            "name" => d.string(&mut self.name, value, "name"),
            "type" => d.string(&mut self.plugin, value, "type"),
            "nodename" => d.string(&mut self.nodename, value, "nodename"),
            "nodename_file" => d.string(&mut self.nodename_file, value, "nodename_file"),
            "hostname" => d.string(&mut self.hostname, value, "hostname"),
            "ipam_lock_file" => d.string(&mut self.lock_file, value, "ipam_lock_file"),
            "log_level" => d.string(&mut self.log_level, value, "log_level"),
            "log_file_path" => d.string(&mut self.log_file, value, "log_file_path"),
            "windows_use_single_network" => d.bool(&mut self.single_block, value, "windows_use_single_network"),
            "bridge" => keep_if(true, &mut self.bridge, value),
            "master" => keep_if(true, &mut self.master, value),
            "isgateway" => d.bool(&mut self.is_gateway, value, "isGateway"),
            "isdefaultgateway" => d.bool(&mut self.is_default_gateway, value, "isDefaultGateway"),
            "ipam" => d.members(value, "ipam", "struct", |d, name, value| self.ipam.member(d, name, value)),
            "kubernetes" => {
                d.members(value, "kubernetes", "types.Kubernetes", |d, name, value| self.kubernetes(d, name, value));
            }
            "args" => d.members(value, "args", "types.Args", |d, name, value| {
                if name == "cni" {
                    d.members(value, "args.cni", "struct", |_, name, value| {
                        keep_if(name == "ips", &mut self.args_ips, value);
                        keep_if(name == "labels", &mut self.args_labels, value);
                    });
                }
            }),
            "runtimeconfig" => d.members(value, "runtimeConfig", "types.RuntimeConfig", |_, name, value| {
                keep_if(name == "ips", &mut self.runtime_ips, value);
                keep_if(name == "ipranges", &mut self.runtime_ranges, value);
                keep_if(name == "io.kubernetes.cri.pod-annotations", &mut self.runtime_annotations, value);
            }),
            "prevresult" => keep_if(true, &mut self.prev_result, value),
            _ => self.datastore(d, name, value),
        }
    }

    fn datastore(&mut self, d: &mut Decoder, name: &str, value: &GoJson) {
        let store = &mut self.store;
        store.has_endpoints |= matches!(name, "etcd_endpoints" | "etcd_discovery_srv") && *value != GoJson::Null;
        match name {
            "datastore_type" => d.string(&mut store.datastore_type, value, "datastore_type"),
            "datastore_path" => d.string(&mut store.datastore_path, value, "datastore_path"),
            "etcd_endpoints" => d.string(&mut store.etcd_endpoints, value, "etcd_endpoints"),
            "etcd_discovery_srv" => d.string(&mut store.etcd_discovery_srv, value, "etcd_discovery_srv"),
            "etcd_key_file" => d.string(&mut store.etcd_key_file, value, "etcd_key_file"),
            "etcd_cert_file" => d.string(&mut store.etcd_cert_file, value, "etcd_cert_file"),
            "etcd_ca_cert_file" => d.string(&mut store.etcd_ca_cert_file, value, "etcd_ca_cert_file"),
            // The plugin ignores the values of some configuration fields, for example `etcd_scheme`. As in Calico, a
            // value of the wrong type is an error even in an ignored configuration field.
            "etcd_authority" | "etcd_scheme" | "calico_api_group" => d.string(&mut String::new(), value, name),
            "datastore_timeout" => self.timeout = d.int(value, name),
            "log_file_max_size" => d.keep_int(&mut self.log_max_size, value, name),
            "log_file_max_age" => d.keep_int(&mut self.log_max_age, value, name),
            "log_file_max_count" => d.keep_int(&mut self.log_max_count, value, name),
            "qps" | "burst" => drop(d.int(value, name)),
            "policy" => {
                d.members(value, "policy", "types.Policy", |d, name, value| self.policy.member(d, name, value));
            }
            _ => {}
        }
    }

    fn kubernetes(&mut self, d: &mut Decoder, name: &str, value: &GoJson) {
        match name {
            "kubeconfig" => d.string(&mut self.store.kubeconfig, value, "kubernetes.kubeconfig"),
            "k8s_api_root" => d.string(&mut self.store.k8s_api_root, value, "kubernetes.k8s_api_root"),
            "node_name" => d.string(&mut String::new(), value, "kubernetes.node_name"),
            _ => {}
        }
    }
}

/// The fields of the configuration's object `policy` that concern the Kubernetes API.
#[derive(Clone, Default)]
pub(crate) struct PolicyConf {
    pub(crate) kind: String,
    pub(crate) api_root: String,
    pub(crate) token: String,
    pub(crate) authority: String,
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl fmt::Debug for PolicyConf {
    /// Shows only the `type` of the policy, because the other fields may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyConf").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl PolicyConf {
    fn member(&mut self, d: &mut Decoder, name: &str, value: &GoJson) {
        match name {
            "type" => d.string(&mut self.kind, value, "policy.type"),
            "k8s_api_root" => d.string(&mut self.api_root, value, "policy.k8s_api_root"),
            "k8s_auth_token" => d.string(&mut self.token, value, "policy.k8s_auth_token"),
            "k8s_certificate_authority" => d.string(&mut self.authority, value, "policy.k8s_certificate_authority"),
            "k8s_client_certificate" => d.string(&mut self.certificate, value, "policy.k8s_client_certificate"),
            "k8s_client_key" => d.string(&mut self.key, value, "policy.k8s_client_key"),
            _ => {}
        }
    }
}

impl IpamConf {
    fn member(&mut self, d: &mut Decoder, name: &str, value: &GoJson) {
        match name {
            "type" => d.string(&mut String::new(), value, "ipam.type"),
            "assign_ipv4" => d.optional(&mut self.assign_ipv4, value, "ipam.assign_ipv4"),
            "assign_ipv6" => d.optional(&mut self.assign_ipv6, value, "ipam.assign_ipv6"),
            "ipv4_pools" => d.strings(&mut self.ipv4_pools, value, "ipam.ipv4_pools"),
            "ipv6_pools" => d.strings(&mut self.ipv6_pools, value, "ipam.ipv6_pools"),
            "weights" => keep_if(true, &mut self.weights, value),
            "mask" => keep_if(true, &mut self.mask, value),
            "gateway" => keep_if(true, &mut self.gateway, value),
            "routes" => keep_if(true, &mut self.routes, value),
            "probe" => keep_if(true, &mut self.probe, value),
            "subnet" => keep_if(true, &mut self.subnet, value),
            "rangestart" => keep_if(true, &mut self.range_start, value),
            "rangeend" => keep_if(true, &mut self.range_end, value),
            "ranges" => keep_if(true, &mut self.ranges, value),
            "sticky" => keep_if(true, &mut self.sticky, value),
            "range" => keep_if(true, &mut self.whereabouts.range, value),
            "range_start" => keep_if(true, &mut self.whereabouts.range_start, value),
            "range_end" => keep_if(true, &mut self.whereabouts.range_end, value),
            "exclude" => keep_if(true, &mut self.whereabouts.exclude, value),
            "ipranges" => keep_if(true, &mut self.whereabouts.ip_ranges, value),
            "network_name" => keep_if(true, &mut self.whereabouts.network_name, value),
            _ => {}
        }
    }
}

fn keep_if(wanted: bool, target: &mut Option<GoJson>, value: &GoJson) {
    if wanted && *value != GoJson::Null {
        *target = Some(value.clone());
    }
}

/// Decodes the values of a network configuration, and keeps the first error about a value of a wrong type. In the
/// methods of the decoder, the argument `path` is the position of the decoded value in the configuration, as printed in
/// Go's error messages.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    error: Option<String>,
}

impl Decoder {
    /// Calls the closure `each` with the lower-case name and the value of each field of a JSON object.
    pub(crate) fn members(
        &mut self,
        value: &GoJson,
        path: &str,
        kind: &str,
        mut each: impl FnMut(&mut Self, &str, &GoJson),
    ) {
        match value {
            GoJson::Object(members) => {
                for (name, value) in members {
                    each(self, &name.to_ascii_lowercase(), value);
                }
            }
            GoJson::Null => {}
            other => self.wrong(other, path, kind),
        }
    }

    pub(crate) fn string(&mut self, target: &mut String, value: &GoJson, path: &str) {
        match value {
            GoJson::String(text) => target.clone_from(text),
            GoJson::Null => {}
            other => self.wrong(other, path, "string"),
        }
    }

    pub(crate) fn optional(&mut self, target: &mut Option<String>, value: &GoJson, path: &str) {
        let mut text = String::new();
        self.string(&mut text, value, path);
        *target = (*value != GoJson::Null).then_some(text);
    }

    pub(crate) fn strings(&mut self, target: &mut Vec<String>, value: &GoJson, path: &str) {
        target.clear();
        match value {
            GoJson::Array(elements) => {
                for element in elements {
                    let mut text = String::new();
                    self.string(&mut text, element, path);
                    target.push(text);
                }
            }
            GoJson::Null => {}
            other => self.wrong(other, path, "[]string"),
        }
    }

    pub(crate) fn bool(&mut self, target: &mut bool, value: &GoJson, path: &str) {
        match value {
            GoJson::Bool(flag) => *target = *flag,
            GoJson::Null => {}
            other => self.wrong(other, path, "bool"),
        }
    }

    pub(crate) fn int(&mut self, value: &GoJson, path: &str) -> Option<i64> {
        match value {
            GoJson::Number(number) if number.is_i64() => return number.as_i64(),
            GoJson::Null => {}
            other => self.wrong(other, path, "int"),
        }
        None
    }

    pub(crate) fn keep_int(&mut self, target: &mut i64, value: &GoJson, path: &str) {
        *target = self.int(value, path).unwrap_or(*target);
    }

    pub(crate) fn wrong(&mut self, value: &GoJson, path: &str, kind: &str) {
        self.error.get_or_insert_with(|| {
            let found = match value {
                // Go's error message quotes a number that does not fit in an integer.
                GoJson::Number(number) if kind == "int" => format!("number {number}"),
                other => other.kind().to_owned(),
            };
            format!("json: cannot unmarshal {found} into Go struct field NetConf.{path} of type {kind}")
        });
    }

    /// Returns the first error that the decoder has kept, if any.
    ///
    /// # Errors
    /// CNI error code 999 for the first configuration value of a wrong type.
    pub(crate) fn finish(self) -> Result<()> {
        self.error.map_or(Ok(()), |error| Err(CniError::internal(format!("failed to load netconf: {error}"))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str) -> Result<NetConf> {
        NetConf::decode(&GoJson::parse(text.as_bytes()).unwrap())
    }

    fn wrong(text: &str) -> String {
        let error = decode(text).unwrap_err();
        assert_eq!(error.code().number(), 999);
        let start = "failed to load netconf: json: cannot unmarshal ";
        error.message().strip_prefix(start).unwrap().replacen("into Go struct field NetConf.", "", 1)
    }

    #[test]
    fn netconf_is_read_as_go_does() {
        let conf = decode(
        r#"{"NAME":"a","name":null,"Type":"bridge","nodename":"x","nodename":"y","unknown":[1],"IPAM":{"Assign_IPv4":"false",
               "ipv4_pools":["p",null],"ipv6_pools":null},"ipam":{"assign_ipv6":"true"},"etcd_endpoints":"http://a:1",
           "kubernetes":{"kubeconfig":"/k"},"isDefaultGateway":true,"qps":5,"log_file_max_age":3,"ipam_lock_file":"/l"}"#,
    )
    .unwrap();
        assert_eq!((conf.name.as_str(), conf.plugin.as_str(), conf.nodename.as_str()), ("a", "bridge", "y"));
        assert_eq!(conf.ipam.assign_ipv4.as_deref(), Some("false"));
        assert_eq!(conf.ipam.assign_ipv6.as_deref(), Some("true"));
        assert_eq!(conf.ipam.ipv4_pools, ["p", ""]);
        assert!(conf.ipam.ipv6_pools.is_empty());
        assert_eq!((conf.store.etcd_endpoints.as_str(), conf.store.kubeconfig.as_str()), ("http://a:1", "/k"));
        assert!(conf.is_default_gateway && !conf.is_gateway);
        assert_eq!((conf.lock_file.as_str(), conf.log_max_age), ("/l", 3));
    }

    #[test]
    fn netconf_null_is_absent() {
        let conf = decode(
            r#"{"name":"a","ipam":null,"kubernetes":null,"args":null,"runtimeConfig":null,"prevResult":null,
            "isGateway":null,"qps":null,"burst":null,"policy":null,"datastore_type":null}"#,
        )
        .unwrap();
        assert!(conf.prev_result.is_none());
        let conf =
            decode(r#"{"ipam":{"assign_ipv4":"x","mask":null,"routes":null},"runtimeConfig":{"ips":null}}"#).unwrap();
        assert!(conf.ipam.mask.is_none() && conf.ipam.routes.is_none() && conf.runtime_ips.is_none());
        assert_eq!(decode(r#"{"ipam":{"assign_ipv4":"x","assign_ipv4":null}}"#).unwrap().ipam.assign_ipv4, None);
    }

    #[test]
    fn netconf_texts_must_be_texts() {
        let top = [
            "type",
            "nodename",
            "nodename_file",
            "hostname",
            "ipam_lock_file",
            "datastore_type",
            "datastore_path",
            "etcd_endpoints",
            "etcd_discovery_srv",
            "etcd_key_file",
            "etcd_cert_file",
            "etcd_ca_cert_file",
            "etcd_authority",
            "etcd_scheme",
            "log_level",
            "log_file_path",
            "calico_api_group",
        ];
        for name in top {
            assert_eq!(wrong(&format!(r#"{{"{name}":1}}"#)), format!("number {name} of type string"));
        }
        for (outer, name) in [
            ("ipam", "type"),
            ("ipam", "assign_ipv4"),
            ("ipam", "assign_ipv6"),
            ("kubernetes", "kubeconfig"),
            ("policy", "type"),
        ] {
            assert_eq!(
                wrong(&format!(r#"{{"{outer}":{{"{name}":true}}}}"#)),
                format!("bool {outer}.{name} of type string")
            );
        }
    }

    #[test]
    fn netconf_wrong_types_are_refused_in_go_words() {
        let cases = [
            (r#"{"ipam":{"ipv4_pools":"x"}}"#, "string ipam.ipv4_pools of type []string"),
            (r#"{"ipam":{"ipv6_pools":[1]}}"#, "number ipam.ipv6_pools of type string"),
            (r#"{"ipam":[]}"#, "array ipam of type struct"),
            (r#"{"kubernetes":"x"}"#, "string kubernetes of type types.Kubernetes"),
            (r#"{"kubernetes":{"kubeconfig":{}}}"#, "object kubernetes.kubeconfig of type string"),
            (r#"{"log_file_max_size":1.5}"#, "number 1.5 log_file_max_size of type int"),
            (r#"{"log_file_max_size":"1"}"#, "string log_file_max_size of type int"),
            (r#"{"qps":"1"}"#, "string qps of type int"),
            (r#"{"qps":0.5}"#, "number 0.5 qps of type int"),
            (r#"{"burst":1.5}"#, "number 1.5 burst of type int"),
            (r#"{"isGateway":"true"}"#, "string isGateway of type bool"),
            (r#"{"args":5}"#, "number args of type types.Args"),
            // If several configuration values have a wrong type, only the first of them is reported.
            (r#"{"qps":"1","ipam":5}"#, "string qps of type int"),
        ];
        for (text, expected) in cases {
            assert_eq!(wrong(text), expected, "{text}");
        }
    }

    #[test]
    fn netconf_cluster_timeout_is_read() {
        let patience = |text: &str| decode(text).unwrap().patience().map(|patience| patience.as_secs());
        assert_eq!(patience("{}").unwrap(), 10);
        assert_eq!(patience(r#"{"datastore_timeout":1}"#).unwrap(), 1);
        assert_eq!(patience(r#"{"Datastore_Timeout":90}"#).unwrap(), 90);
        for wrong in ["0", "-1", "91"] {
            let error = patience(&format!(r#"{{"datastore_timeout":{wrong}}}"#)).unwrap_err();
            assert_eq!(error.code().number(), 7, "{wrong}");
        }
        assert_eq!(wrong(r#"{"datastore_timeout":"10"}"#), "string datastore_timeout of type int");
    }

    #[test]
    fn netconf_network_names_are_checked() {
        let of = |text: &str| {
            check_name(text.as_bytes()).map(|_| ()).map_err(|e| (e.code().number(), e.message().to_owned()))
        };
        of(r#"{"name":"net.1_a-b"}"#).unwrap();
        for text in ["{}", "null", r#"{"name":""}"#, r#"{"name":null}"#] {
            assert_eq!(of(text).unwrap_err(), (7, "missing network name".into()));
        }
        let bad = check_name(br#"{"name":"../x"}"#).unwrap_err();
        assert_eq!((bad.message(), bad.details()), ("invalid characters found in network name", "../x"));
        assert_eq!(
        of(r#"{"name":5}"#).unwrap_err(),
        (6, "error unmarshall network config: json: cannot unmarshal number into Go struct field .name of type string".into())
    );
        assert_eq!(
            of("[]").unwrap_err().1,
            "error unmarshall network config: json: cannot unmarshal array into Go value of type struct { Name string \"json:\\\"name\\\"\" }"
        );
        assert!(of("{not json").unwrap_err().1.starts_with("error unmarshall network config: "));
    }
}
