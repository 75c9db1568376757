//! Property tests: for any input, the plugin prints a valid CNI result or CNI error.

use std::collections::BTreeMap;

use cni_plugin::{PluginName, ProcessOutcome};
use proptest::prelude::*;
use serde_json::Value;

use crate::common::{Scripted, assigned, call, environment};

fn allocator() -> Scripted {
    let address = |text: &str, block, pool| assigned(text.parse().unwrap(), block, pool, None);
    Scripted {
        add: Some(Ok(vec![address("10.0.0.5", 26, 24), address("fd00::5", 122, 64)])),
        del: Some(Ok(())),
        check: Some(Ok(agent::CheckAnswer::Unknown("it was not asked".into()))),
        status: Some(Ok(())),
        ..Scripted::default()
    }
}

/// Checks that a successful plugin call printed nothing or a JSON result, and that a failed call printed a CNI error
/// and exited with 1.
fn is_sane(outcome: &ProcessOutcome) {
    assert_eq!(outcome.stderr, "");
    if outcome.exit == 0 && outcome.stdout.is_empty() {
        return;
    }
    let json: Value = serde_json::from_str(&outcome.stdout).unwrap();
    if outcome.exit == 0 {
        assert!(json["cniVersion"].is_string(), "{json}");
    } else {
        assert_eq!(outcome.exit, 1);
        assert!(json["code"].as_u64().is_some_and(|code| code > 0), "{json}");
        let message = json["msg"].as_str().unwrap();
        assert!(!message.is_empty() && !message.contains("an error of its own"), "{message}");
    }
}

fn verb() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION", "FOO"])
}

/// Generates JSON values of every kind, and strings that are valid values of some setting.
fn value() -> impl Strategy<Value = Value> {
    let texts = [
        "",
        "true",
        "false",
        "first",
        "pool",
        "block",
        "10.0.0.1",
        "10.0.0.0/24",
        "10.0.0.0/31",
        "0.0.0.0/0",
        "::/0",
        "fd00::1",
        "fd00::/64",
        "::ffff:1.2.3.4",
        "sled",
        "redb",
        "etcdv3",
        "/x",
        "1.1.0",
        "0.2.0",
        "calico",
        "bridge",
        "ptp",
        "<&>",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        prop::sample::select(texts.to_vec()).prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key(), inner), 0..6).prop_map(|members| members.into_iter().collect()),
        ]
    })
}

fn key() -> impl Strategy<Value = String> {
    let names = [
        "name",
        "type",
        "cniVersion",
        "ipam",
        "IPAM",
        "assign_ipv4",
        "assign_ipv6",
        "ipv4_pools",
        "mask",
        "gateway",
        "routes",
        "dst",
        "gw",
        "subnet",
        "ranges",
        "rangeStart",
        "rangeEnd",
        "args",
        "cni",
        "ips",
        "runtimeConfig",
        "ipRanges",
        "prevResult",
        "address",
        "datastore_type",
        "datastore_path",
        "etcd_endpoints",
        "kubernetes",
        "kubeconfig",
        "isGateway",
        "nodename",
        "mtu",
    ];
    prop_oneof![9 => prop::sample::select(names.to_vec()).prop_map(str::to_owned), 1 => ".{0,4}"]
}

fn args() -> impl Strategy<Value = String> {
    let pair = prop_oneof![
        prop::sample::select(vec![
            "IgnoreUnknown=1",
            "IP=10.0.0.7",
            "IP=",
            "IP=::1/64",
            "K8S_POD_NAME=p-",
            "K8S_POD_NAMESPACE=n",
            "="
        ])
        .prop_map(str::to_owned),
        ".{0,6}",
    ];
    prop::collection::vec(pair, 0..5).prop_map(|pairs| pairs.join(";"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_bytes_never_panic(verb in verb(), stdin in prop::collection::vec(any::<u8>(), 0..200)) {
        is_sane(&call(PluginName::Margay, &environment(verb), &stdin, &allocator()));
    }

    #[test]
    fn garbage_variables_never_panic(variables in prop::collection::btree_map(
        prop::sample::select(vec!["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH", "CNI_NETNS_OVERRIDE"]).prop_map(str::to_owned),
        ".{0,20}", 0..6,
    ), verb in verb()) {
        let mut env: BTreeMap<String, String> = environment(verb);
        env.extend(variables);
        is_sane(&call(PluginName::Margay, &env, br#"{"name":"a","cniVersion":"1.1.0","datastore_type":"sled"}"#, &allocator()));
    }

    #[test]
    fn garbage_configuration_never_panics(
        verb in verb(),
        version in prop::sample::select(vec!["0.1.0", "0.2.0", "0.4.0", "1.0.0", "1.1.0"]),
        plugin in prop::sample::select(vec!["calico", "bridge", "ptp"]),
        members in prop::collection::vec((key(), value()), 0..8),
        ipam in prop::collection::vec((key(), value()), 0..5),
        args in args(),
        name in prop::sample::select(vec![PluginName::Margay, PluginName::CalicoIpam]),
    ) {
        let mut conf: serde_json::Map<_, _> = members.into_iter().collect();
        conf.entry("ipam").or_insert_with(|| ipam.into_iter().collect());
        conf.insert("name".into(), "net1".into());
        conf.insert("cniVersion".into(), version.into());
        conf.insert("type".into(), plugin.into());
        let mut env = environment(verb);
        env.insert("CNI_ARGS".into(), args);
        is_sane(&call(name, &env, &serde_json::to_vec(&conf).unwrap(), &allocator()));
    }
}
