use super::*;

fn settings(json: &str) -> Result<BridgedSettings> {
    let conf = NetConf::decode(&GoJson::parse(json.as_bytes()).unwrap()).unwrap();
    BridgedSettings::from_conf(&conf)
}

fn wrong(json: &str) -> String {
    let error = settings(json).unwrap_err();
    assert_eq!(error.code().number(), 7, "{error}");
    error.message().to_owned()
}

fn at(address: &str) -> Gateway {
    Gateway::At(address.parse().unwrap())
}

fn gateways(json: &str) -> (Gateway, Gateway) {
    let network = settings(json).unwrap().network;
    (network.gateway_v4, network.gateway_v6)
}

#[test]
fn gateway_default_follows_type() {
    let (none, first) = ((Gateway::Recorded, Gateway::Recorded), (Gateway::First, Gateway::First));
    let cases = [
        (r#"{"type":"ptp"}"#, first),
        (r#"{"type":"bridge"}"#, none),
        (r#"{"type":"bridge","isGateway":true}"#, first),
        (r#"{"type":"bridge","isDefaultGateway":true}"#, first),
        (r#"{"type":"macvlan","isGateway":true}"#, none),
        (r#"{"type":"macvlan","ipam":{"gateway":"first"}}"#, first),
        (r#"{"type":"macvlan","ipam":{"gateway":""}}"#, none),
        (r#"{"type":"macvlan","ipam":{"subnet":"10.0.0.0/24"}}"#, first),
    ];
    for (json, expected) in cases {
        assert_eq!(gateways(json), expected, "{json}");
    }
}

#[test]
fn gateway_is_taken_when_given() {
    assert_eq!(gateways(r#"{"ipam":{"gateway":"10.0.0.1"}}"#), (at("10.0.0.1"), Gateway::Recorded));
    assert_eq!(gateways(r#"{"type":"ptp","ipam":{"gateway":"fd00::1"}}"#), (Gateway::First, at("fd00::1")));
    assert_eq!(gateways(r#"{"ipam":{"gateway":["fd00::1","10.0.0.1"]}}"#), (at("10.0.0.1"), at("fd00::1")));
    assert_eq!(
        wrong(r#"{"ipam":{"gateway":["10.0.0.1","10.0.0.2"]}}"#),
        "ipam.gateway has several addresses of one family"
    );
    assert_eq!(wrong(r#"{"ipam":{"gateway":"last"}}"#), "ipam.gateway must be an address or \"first\", not \"last\"");
    assert_eq!(wrong(r#"{"ipam":{"gateway":5}}"#), "ipam.gateway must be an address or \"first\", not a JSON number");
    assert!(wrong(r#"{"ipam":{"gateway":["first"]}}"#).starts_with("ipam.gateway must be"));
}

#[test]
fn mask_is_read_or_refused() {
    assert_eq!(settings("{}").unwrap().mask, PrefixMask::Pool);
    assert_eq!(settings(r#"{"ipam":{"mask":"pool"}}"#).unwrap().mask, PrefixMask::Pool);
    assert_eq!(settings(r#"{"ipam":{"mask":"block"}}"#).unwrap().mask, PrefixMask::Block);
    for mask in ["\"Pool\"", "24", "\"\"", "[]"] {
        assert_eq!(wrong(&format!(r#"{{"ipam":{{"mask":{mask}}}}}"#)), "ipam.mask must be \"pool\" or \"block\"");
    }
}

#[test]
fn routes_are_read_or_refused() {
    let routes = settings(
        r#"{"ipam":{"routes":[{"dst":"0.0.0.0/0"},{"DST":"fd00::/8","gw":"fd00::1","mtu":1400,"priority":0,"table":0,"x":1},{"dst":"10.1.2.3/8","gw":""}]}}"#,
    )
    .unwrap()
    .routes;
    let to = |dst: &str| ResultRoute::to(dst.parse().unwrap());
    let options = RouteOptions { mtu: Some(1400), table: Some(0), ..RouteOptions::default() };
    let middle = ResultRoute { gw: Some("fd00::1".parse().unwrap()), options, ..to("fd00::/8") };
    assert_eq!(routes, [to("0.0.0.0/0"), middle, to("10.1.2.3/8")]);
    assert!(wrong(r#"{"ipam":{"routes":{}}}"#).starts_with("ipam.routes must be a list"));
    for route in ["{}", "5", r#"{"dst":5}"#] {
        assert_eq!(wrong(&format!(r#"{{"ipam":{{"routes":[{route}]}}}}"#)), "a route in ipam.routes has no dst");
    }
    assert_eq!(wrong(r#"{"ipam":{"routes":[{"dst":"10.0.0.0"}]}}"#), "ipam.routes: dst \"10.0.0.0\" is not a CIDR");
    assert_eq!(
        wrong(r#"{"ipam":{"routes":[{"dst":"0.0.0.0/0","gw":"x"}]}}"#),
        "ipam.routes: gw must be an address, not \"x\""
    );
    assert_eq!(
        wrong(r#"{"ipam":{"routes":[{"dst":"0.0.0.0/0","mtu":"x"}]}}"#),
        "ipam.routes: mtu is not a whole number"
    );
}

#[test]
fn calico_network_takes_no_bridged_keys() {
    let refused = |ipam: &str| {
        let json = format!(r#"{{"type":"calico","ipam":{ipam}}}"#);
        refuse_on_calico(&NetConf::decode(&GoJson::parse(json.as_bytes()).unwrap()).unwrap())
    };
    refused(r#"{"subnet":"10.0.0.0/24"}"#).unwrap();
    refused(r#"{"routes":null}"#).unwrap();
    for key in ["mask", "gateway", "routes", "weights"] {
        let error = refused(&format!(r#"{{"{key}":[]}}"#)).unwrap_err();
        assert_eq!(error.message(), format!("ipam.{key} cannot be used with \"type\": \"calico\""));
        assert_eq!(error.code().number(), 7);
    }
}

fn pools(ipam: &str) -> Vec<String> {
    let network = settings(&format!(r#"{{"ipam":{ipam}}}"#)).unwrap().network;
    let range = |(first, last): &(IpAddr, IpAddr)| format!("{first}-{last}");
    network
        .own_pools
        .iter()
        .map(|p| format!("{} {}", p.subnet, p.ranges.iter().map(range).collect::<Vec<_>>().join(",")))
        .collect()
}

#[test]
fn pools_are_read_from_host_local_keys() {
    assert!(pools("{}").is_empty());
    assert_eq!(pools(r#"{"ranges":[],"subnet":"10.0.0.0/24"}"#), ["10.0.0.0/24 10.0.0.1-10.0.0.254"]);
    assert_eq!(pools(r#"{"range":"","subnet":"10.0.0.0/24"}"#), ["10.0.0.0/24 10.0.0.1-10.0.0.254"]);
    assert_eq!(
        pools(r#"{"rangeStart":"","gateway":"","ranges":[[{"subnet":"10.0.0.0/24","rangeEnd":""}]]}"#),
        ["10.0.0.0/24 10.0.0.1-10.0.0.254"]
    );
    assert_eq!(pools(r#"{"subnet":"10.0.0.0/24"}"#), ["10.0.0.0/24 10.0.0.1-10.0.0.254"]);
    assert_eq!(pools(r#"{"subnet":"fd00::/64"}"#), ["fd00::/64 fd00::1-fd00::ffff:ffff:ffff:ffff"]);
    assert_eq!(pools(r#"{"subnet":"0.0.0.0/0"}"#), ["0.0.0.0/0 0.0.0.1-255.255.255.254"]);
    assert_eq!(
        pools(r#"{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.10","rangeEnd":"10.0.0.20"}"#),
        ["10.0.0.0/24 10.0.0.10-10.0.0.20"]
    );
    let both = r#"{"ranges":[[{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.100"},{"subnet":"10.0.0.0/24","rangeEnd":"10.0.0.9","gateway":"10.0.0.254"}],[{"subnet":"fd00::/120"}]]}"#;
    assert_eq!(pools(both), ["10.0.0.0/24 10.0.0.1-10.0.0.9,10.0.0.100-10.0.0.254", "fd00::/120 fd00::1-fd00::ff"]);
    let of_pools = |ipam: &str| {
        let network = settings(&format!(r#"{{"ipam":{ipam}}}"#)).unwrap().network;
        network.own_pools.iter().map(|pool| pool.gateway.map(|address| address.to_string())).collect::<Vec<_>>()
    };
    assert_eq!(of_pools(both), [Some("10.0.0.254".to_owned()), None]);
    // The key `ipam.gateway` overrides the `gateway` key of a range.
    let outer = r#"{"ipam":{"gateway":"10.0.0.2","ranges":[[{"subnet":"10.0.0.0/24","gateway":"10.0.0.3"}]]}}"#;
    assert_eq!(gateways(outer), (at("10.0.0.2"), Gateway::First));
    assert_eq!(settings(outer).unwrap().network.own_pools[0].gateway, None);
    // Without the key `range`, whereabouts' other keys have no effect.
    let named = settings(r#"{"ipam":{"subnet":"10.0.0.0/24","network_name":"x"}}"#).unwrap().network.own_pools;
    assert_eq!((named.len(), named[0].name.as_deref()), (1, None));
    let runtime = |ranges: &str| settings(&format!(r#"{{"runtimeConfig":{{"ipRanges":{ranges}}}}}"#));
    assert_eq!(runtime(r#"[[{"subnet":"10.0.0.0/24"}]]"#).unwrap().network.own_pools.len(), 1);
    assert!(runtime("[]").unwrap().network.own_pools.is_empty(), "a runtime that has no ranges for the network");
    assert_eq!(runtime("[[]]").unwrap_err().message(), "runtimeConfig.ipRanges has an empty set of ranges");
}

#[test]
fn pools_are_refused_when_malformed() {
    let cases = [
        (r#"{"subnet":"10.0.0.1/24"}"#, "subnet 10.0.0.1/24 has host bits set"),
        (r#"{"subnet":"10.0.0.0"}"#, "subnet \"10.0.0.0\" is not a CIDR"),
        (r#"{"subnet":5}"#, "subnet must be a text, not a JSON number"),
        (r#"{"subnet":["10.0.0.0/24","fd00::/64"]}"#, "subnet must be a text, not a JSON array"),
        (r#"{"subnet":""}"#, "subnet \"\" is not a CIDR"),
        (r#"{"ranges":[]}"#, "ipam.ranges is there, but no range of addresses is"),
        (r#"{"ranges":[],"ipv4_pools":["a"]}"#, "ipam.ranges is there, but no range of addresses is"),
        (r#"{"range":""}"#, "ipam.range is there, but no range of addresses is"),
        (r#"{"range":"","ranges":[]}"#, "ipam.ranges is there, but no range of addresses is"),
        (r#"{"ipRanges":[]}"#, "ipam.ipRanges is there, but no range of addresses is"),
        (r#"{"range_end":"10.0.0.9"}"#, "ipam.range_end is there, but no range of addresses is"),
        (r#"{"exclude":["10.0.0.9"],"ipv4_pools":["a"]}"#, "ipam.exclude is there, but no range of addresses is"),
        (r#"{"ranges":[[]]}"#, "ipam.ranges has an empty set of ranges"),
        (r#"{"ranges":[[],[]]}"#, "ipam.ranges has an empty set of ranges"),
        (r#"{"ranges":[[{"subnet":"10.0.0.0/24"}],[]]}"#, "ipam.ranges has an empty set of ranges"),
        (r#"{"subnet":"10.0.0.0/24","ranges":[[]]}"#, "ipam.ranges has an empty set of ranges"),
        (r#"{"ranges":""}"#, "ipam.ranges must be a list of lists of objects with a subnet"),
        (r#"{"ranges":{}}"#, "ipam.ranges must be a list of lists of objects with a subnet"),
        (r#"{"subnet":"10.0.0.0/31"}"#, "subnet 10.0.0.0/31 is too small for containers' addresses"),
        (r#"{"subnet":"fd00::/128"}"#, "subnet fd00::/128 is too small for containers' addresses"),
        (r#"{"rangeStart":"10.0.0.1"}"#, "ipam.rangeStart and ipam.rangeEnd need ipam.subnet"),
        (r#"{"subnet":"10.0.0.0/24","rangeStart":"10.0.1.1"}"#, "rangeStart 10.0.1.1 is not in subnet 10.0.0.0/24"),
        (r#"{"subnet":"10.0.0.0/24","rangeStart":"fd00::1"}"#, "rangeStart fd00::1 is not in subnet 10.0.0.0/24"),
        (
            r#"{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.9","rangeEnd":"10.0.0.8"}"#,
            "rangeStart 10.0.0.9 is after rangeEnd 10.0.0.8",
        ),
        (r#"{"ranges":[{"subnet":"10.0.0.0/24"}]}"#, "ipam.ranges must be a list of lists of objects with a subnet"),
        (r#"{"ranges":[[{}]]}"#, "ipam.ranges must be a list of lists of objects with a subnet"),
        (
            r#"{"ranges":[[{"subnet":"10.0.0.0/24"},{"subnet":"10.0.0.0/24"}]]}"#,
            "the ranges 10.0.0.1-10.0.0.254 and 10.0.0.1-10.0.0.254 overlap",
        ),
        (
            r#"{"ranges":[[{"subnet":"10.0.0.0/24"}],[{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.9"}]]}"#,
            "the ranges 10.0.0.1-10.0.0.254 and 10.0.0.9-10.0.0.254 overlap",
        ),
        (
            r#"{"ranges":[[{"subnet":"10.0.0.0/24"},{"subnet":"10.0.0.0/16"}]]}"#,
            "the subnets 10.0.0.0/24 and 10.0.0.0/16 overlap",
        ),
        (
            r#"{"ranges":[[{"subnet":"10.0.0.0/24"},{"subnet":"fd00::/64"}]]}"#,
            "a set of ranges has subnets of both families",
        ),
        (
            r#"{"ranges":[[{"subnet":"10.0.0.0/24"},{"subnet":"10.0.1.0/24","gateway":"10.0.0.9"}]]}"#,
            "gateway 10.0.0.9 is outside of subnet 10.0.1.0/24",
        ),
        (
            r#"{"gateway":"10.0.2.1","ranges":[[{"subnet":"10.0.0.0/24"},{"subnet":"10.0.1.0/24"}]]}"#,
            "ipam.gateway 10.0.2.1 is in no subnet of the network",
        ),
        (
            r#"{"ranges":[[{"subnet":"10.0.0.0/24","gateway":"fe80::1"}]]}"#,
            "gateway fe80::1 is of another family than subnet 10.0.0.0/24",
        ),
        (
            r#"{"ranges":[[{"subnet":"fd00::/64","gateway":"10.0.0.1"}]]}"#,
            "gateway 10.0.0.1 is of another family than subnet fd00::/64",
        ),
        (
            r#"{"subnet":"10.0.0.0/24","gateway":"fe80::1"}"#,
            "gateway fe80::1 is of another family than subnet 10.0.0.0/24",
        ),
        (
            r#"{"subnet":"fd00::/64","gateway":["fe80::1","10.0.0.1"]}"#,
            "gateway 10.0.0.1 is of another family than subnet fd00::/64",
        ),
        (
            r#"{"gateway":["10.0.0.1","10.0.0.2"],"ipv4_pools":["a"]}"#,
            "ipam.gateway has several addresses of one family",
        ),
        (
            r#"{"subnet":"auto","ranges":[[{"subnet":"10.0.0.0/24"}]]}"#,
            "ipam.subnet is \"auto\", and there are ranges besides",
        ),
        (r#"{"subnet":"auto","rangeStart":"10.0.0.1"}"#, "ipam.rangeStart and ipam.rangeEnd need ipam.subnet"),
        (r#"{"subnet":"auto","ipv4_pools":["a"]}"#, "ipam defines pools of its own and names others"),
        (r#"{"ranges":[[{"subnet":"auto"}]]}"#, "subnet \"auto\" is not a CIDR"),
        (r#"{"ipv4_pools":["a"],"weights":{"b":1}}"#, "ipam.weights has \"b\", which is no pool of the network"),
        (
            r#"{"ipv4_pools":["a"],"weights":{"a":-1}}"#,
            "ipam.weights must be an object with a whole number for each pool",
        ),
        (r#"{"ipv4_pools":["a"],"weights":["a"]}"#, "ipam.weights must be an object with a whole number for each pool"),
        (r#"{"subnet":"10.0.0.0/24","ipv4_pools":["a"]}"#, "ipam defines pools of its own and names others"),
    ];
    for (ipam, expected) in cases {
        assert_eq!(wrong(&format!(r#"{{"ipam":{ipam}}}"#)), expected, "{ipam}");
    }
}

#[test]
fn subnet_sets_are_read() {
    let ipam = r#"{"ranges":[[{"subnet":"10.0.1.0/24","rangeStart":"10.0.1.20","gateway":"10.0.1.9"},{"subnet":"10.0.0.0/24"},
        {"subnet":"10.0.1.0/24","rangeEnd":"10.0.1.5"}],[{"subnet":"fd00::/64"}],
        [{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.0","rangeEnd":"10.0.0.0"},{"subnet":"10.0.2.0/24"}]],
        "weights":{"10.0.0.0/24":2}}"#;
    let network = settings(&format!(r#"{{"ipam":{ipam}}}"#)).unwrap().network;
    let texts: Vec<_> =
        network.own_pools.iter().map(|pool| format!("{} {} {}", pool.set, pool.subnet, pool.number)).collect();
    assert_eq!(texts, ["0 10.0.1.0/24 0", "0 10.0.0.0/24 1", "1 fd00::/64 0", "2 10.0.0.0/24 1", "2 10.0.2.0/24 2"]);
    assert_eq!(network.own_pools[0].ranges.len(), 2);
    assert_eq!((network.gateway_v4, network.gateways.len()), (Gateway::First, 0));
    assert_eq!(network.own_pools[0].gateway, "10.0.1.9".parse().ok());
    assert_eq!(network.weights, [("10.0.0.0/24".to_owned(), 2)].into());
    let set_of = |address: &str| network.set_of(address.parse().unwrap());
    assert_eq!(["10.0.0.7", "10.0.0.0", "fd00::5", "10.9.9.9"].map(set_of), [0, 2, 1, usize::MAX]);
}

#[test]
fn gateway_of_ipv6_may_lie_outside_subnet() {
    let network = |ipam: &str| settings(&format!(r#"{{"ipam":{ipam}}}"#)).unwrap().network;
    let of = |network: &BridgedNetwork| {
        let of_pools = network.own_pools.iter().map(|pool| pool.gateway.map(|one| one.to_string()));
        (network.gateway_v6, of_pools.collect::<Vec<_>>())
    };
    let two = r#""ranges":[[{"subnet":"fd00::/64","gateway":"fe80::1"}],[{"subnet":"fd01::/64"}]]"#;
    assert_eq!(of(&network(&format!("{{{two}}}"))), (Gateway::First, vec![Some("fe80::1".to_owned()), None]));
    let outer = network(&format!(r#"{{"gateway":"fe80::9",{two}}}"#));
    assert_eq!(of(&outer), (at("fe80::9"), vec![Some("fe80::1".to_owned()), None]));
    let one = network(r#"{"subnet":"fd00::/64","gateway":"fe80::1"}"#);
    assert_eq!(of(&one), (at("fe80::1"), vec![None]));
}

#[test]
fn subnet_is_chosen_when_asked_for() {
    let subnets = |more: &str| {
        let network = settings(&format!(r#"{{"ipam":{{"subnet":"auto"{more}}}}}"#)).unwrap().network;
        assert!(network.own_pools.iter().all(|pool| pool.is_auto));
        network.own_pools.iter().map(OwnPool::text).collect::<Vec<_>>()
    };
    assert_eq!(subnets(""), ["0.0.0.0/24"]);
    assert_eq!(subnets(r#","assign_ipv6":"true""#), ["0.0.0.0/24", "::/64"]);
    assert_eq!(subnets(r#","assign_ipv6":"true","assign_ipv4":"false""#), ["::/64"]);
}

fn orders(weights: &[(&str, u32)]) -> BTreeMap<String, usize> {
    let weights = weights.iter().map(|(name, weight)| ((*name).to_owned(), *weight)).collect();
    let mut counted = BTreeMap::new();
    for number in 0..4000 {
        let mut pools = ["a", "b", "c"].map(str::to_owned);
        choose_first(&weights, &format!("container-{number}"), &mut pools, Clone::clone);
        *counted.entry(pools.concat()).or_default() += 1;
    }
    counted
}

#[test]
fn weights_order_pools_by_their_share() {
    assert_eq!(orders(&[]), [("abc".to_owned(), 4000)].into());
    let counted = orders(&[("a", 3), ("c", 0)]);
    assert_eq!(counted.keys().collect::<Vec<_>>(), ["abc", "bac"]);
    assert!((2850..3150).contains(&counted["abc"]), "{counted:?}");
    let counted = orders(&[("a", 1), ("b", 1), ("c", 2)]);
    assert_eq!(counted.keys().collect::<Vec<_>>(), ["abc", "bac", "cab"]);
    assert!((1850..2150).contains(&counted["cab"]), "{counted:?}");
    assert_eq!(orders(&[("a", 0), ("b", 0), ("c", 0)]).len(), 1);
}

#[test]
fn weights_give_container_same_pool_every_time() {
    let weights = [("a".to_owned(), 1)].into();
    let order = || {
        let mut pools = ["a", "b"].map(str::to_owned);
        choose_first(&weights, "0f3a", &mut pools, Clone::clone);
        pools
    };
    assert_eq!(order(), order());
}
