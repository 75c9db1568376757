use serde_json::json;

use super::*;
use crate::gojson::Json;
use crate::netconf::NetConf;

fn assigned(address: &str, gateway: Option<&str>) -> Assigned {
    let address: IpAddr = address.parse().unwrap();
    let (block, pool) = if address.is_ipv4() { (26, 16) } else { (122, 64) };
    let network = |length| IpNet::new(address, length).unwrap().trunc();
    Assigned {
        ip: address,
        prefix_length: None,
        block: network(block),
        pool: network(pool),
        gateway: gateway.map(|gateway| gateway.parse().unwrap()),
    }
}

fn dual() -> [Assigned; 2] {
    [assigned("fd00::5", Some("fd00::1")), assigned("10.0.0.5", Some("10.0.0.1"))]
}

fn bridged(ipam: &str, assigned: &[Assigned]) -> AddResult {
    let json = format!(r#"{{"type":"bridge","ipam":{ipam}}}"#);
    let conf = NetConf::decode(&Json::parse(json.as_bytes()).unwrap()).unwrap();
    AddResult::bridged(assigned, &BridgedSettings::from_conf(&conf).unwrap()).unwrap()
}

/// The text without the indentation, to be read more easily.
fn compact(result: &AddResult, version: &str) -> String {
    let json = result.to_json(version).unwrap();
    json.lines().map(str::trim_start).collect::<String>().replace("\": ", "\":")
}

#[test]
fn calicos_results_have_block_masks_and_self_routes() {
    let result = AddResult::calico(&dual(), &[]).unwrap();
    assert_eq!(
        compact(&result, "1.0.0"),
        r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.5/26"},{"address":"fd00::5/122"}],"routes":[{"dst":"10.0.0.5/26"},{"dst":"fd00::5/122"}]}"#
    );
    let wanted = AddResult::calico(&dual(), &["10.0.0.5".parse().unwrap()]).unwrap();
    assert!(compact(&wanted, "1.0.0").contains(r#""ips":[{"address":"10.0.0.5/32"},{"address":"fd00::5/122"}]"#));
}

const ROUTES: &str = r#"{"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0","gw":"fd00::9","mtu":1400}]}"#;

#[test]
fn bridged_results_in_each_version() {
    let result = bridged(ROUTES, &dual());
    for version in ["0.1.0", "0.2.0"] {
        assert_eq!(
            compact(&result, version),
            format!(
                r#"{{"cniVersion":"{version}","ip4":{{"ip":"10.0.0.5/16","gateway":"10.0.0.1","routes":[{{"dst":"0.0.0.0/0"}}]}},"ip6":{{"ip":"fd00::5/64","gateway":"fd00::1","routes":[{{"dst":"::/0","gw":"fd00::9"}}]}},"dns":{{}}}}"#
            )
        );
    }
    for version in ["0.3.0", "0.3.1", "0.4.0"] {
        assert_eq!(
            compact(&result, version),
            format!(
                r#"{{"cniVersion":"{version}","ips":[{{"version":"4","address":"10.0.0.5/16","gateway":"10.0.0.1"}},{{"version":"6","address":"fd00::5/64","gateway":"fd00::1"}}],"routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"::/0","gw":"fd00::9","mtu":1400}}],"dns":{{}}}}"#
            )
        );
    }
    for version in ["1.0.0", "1.1.0"] {
        assert_eq!(
            compact(&result, version),
            format!(
                r#"{{"cniVersion":"{version}","ips":[{{"address":"10.0.0.5/16","gateway":"10.0.0.1"}},{{"address":"fd00::5/64","gateway":"fd00::1"}}],"routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"::/0","gw":"fd00::9","mtu":1400}}]}}"#
            )
        );
    }
}

#[test]
fn a_route_of_a_family_without_address_is_left_out_of_old_results() {
    let result = bridged(ROUTES, &[assigned("10.0.0.5", None)]);
    assert_eq!(
        compact(&result, "0.2.0"),
        r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.5/16","routes":[{"dst":"0.0.0.0/0"}]},"dns":{}}"#
    );
}

#[test]
fn the_blocks_mask_where_it_is_asked_for() {
    let result = bridged(r#"{"mask":"block"}"#, &[assigned("10.0.0.5", None)]);
    assert_eq!(compact(&result, "1.0.0"), r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.5/26"}]}"#);
}

#[test]
fn no_address_at_all() {
    let nothing = AddResult::calico(&[], &[]).unwrap();
    assert_eq!(nothing.to_json("1.0.0").unwrap(), "{\n    \"cniVersion\": \"1.0.0\"\n}");
    assert_eq!(nothing.to_json("0.4.0").unwrap(), "{\n    \"cniVersion\": \"0.4.0\",\n    \"dns\": {}\n}");
    assert_eq!(nothing.to_json("0.2.0").unwrap_err().message(), "cannot convert: no valid IP addresses");
}

#[test]
fn a_prefix_that_cannot_be() {
    let wrong = Assigned { pool: "fd00::/64".parse().unwrap(), ..assigned("10.0.0.5", None) };
    let conf = NetConf::default();
    assert!(AddResult::bridged(&[wrong], &BridgedSettings::from_conf(&conf).unwrap()).is_err());
}

/// The answer of a main plugin to a result of an IPAM plugin.
fn answered(version: &str, assigned: &[u8], mtu: Option<u32>) -> Value {
    let inside = Interface { name: "eth0".to_owned(), mac: Some("m".to_owned()), mtu, sandbox: Some("/n".to_owned()) };
    let outside = Interface { name: "calic1".to_owned(), ..Interface::default() };
    let answer = AddResult::parse(assigned).unwrap().on([outside, inside]);
    serde_json::from_str(&answer.to_json(version).unwrap()).unwrap()
}

const BOTH: &[u8] = br#"{"ips":[{"address":"10.0.0.1/26","gateway":"10.0.0.2"},{"address":"fd80::1/122"}],
    "routes":[{"dst":"10.0.0.1/26"},{"dst":"fd80::1/122"}]}"#;

#[test]
fn masks_are_of_one_address_and_gateways_go() {
    let new = answered("1.0.0", BOTH, Some(1410));
    assert_eq!(
        new,
        json!({"cniVersion":"1.0.0","interfaces":[{"name":"calic1"},{"name":"eth0","mac":"m","sandbox":"/n","mtu":1410}],
            "ips":[{"address":"10.0.0.1/32","interface":1},{"address":"fd80::1/128","interface":1}],
            "routes":[{"dst":"10.0.0.1/26"},{"dst":"fd80::1/122"}]})
    );
    let older = answered("0.4.0", BOTH, Some(1410));
    assert_eq!(older["interfaces"][1].get("mtu"), None);
    assert_eq!((&older["dns"], &older["ips"][1]["version"]), (&json!({}), &json!("6")));
}

#[test]
fn the_oldest_form_has_an_address_of_each_family() {
    let old = answered("0.2.0", BOTH, None);
    assert_eq!(
        old,
        json!({"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.1/32","routes":[{"dst":"10.0.0.1/26"}]},
            "ip6":{"ip":"fd80::1/128","routes":[{"dst":"fd80::1/122"}]},"dns":{}})
    );
}

#[test]
fn interfaces_of_ipam_stay_in_front() {
    let result = br#"{"interfaces":[{"name":"x"}],"ips":[{"address":"10.0.0.1/26"}],"dns":{"nameservers":["n"]}}"#;
    let new = answered("1.1.0", result, None);
    assert_eq!((&new["interfaces"][0]["name"], &new["ips"][0]["interface"]), (&json!("x"), &json!(2)));
    assert_eq!(new["dns"]["nameservers"][0], "n");
}

#[test]
fn every_version_is_read() {
    let new = AddResult::parse(
        br#"{"cniVersion":"1.0.0","ips":[{"address":"10.9.8.7/24","gateway":"10.9.8.1"}],"routes":[{"dst":"10.0.0.0/8"}],"dns":{}}"#,
    )
    .unwrap();
    assert_eq!(new.addresses(), ["10.9.8.7".parse::<IpAddr>().unwrap()]);
    assert_eq!(new.ips[0].gateway, Some("10.9.8.1".parse().unwrap()));
    assert_eq!((new.routes.len(), new.dns), (1, None));
    let old = AddResult::parse(
        br#"{"ip4":{"ip":"10.9.8.7/24","routes":[{"dst":"1.0.0.0/8"}]},"ip6":{"ip":"fd80::7/64"},"dns":{"nameservers":["a"]}}"#,
    )
    .unwrap();
    assert_eq!((old.ips.len(), old.routes.len(), old.dns.is_some()), (2, 1, true));
    assert_eq!(AddResult::parse(b"{}").unwrap(), AddResult::default());
    let prefix =
        AddResult::parse(br#"{"ips":[{"address":"2001:db8:0:5::1/64"}],"margay.io/prefixes":["2001:db8:0:5::/64"]}"#)
            .unwrap();
    assert_eq!(prefix.prefixes, ["2001:db8:0:5::/64".parse().unwrap()]);
}

#[test]
fn garbage_is_an_error() {
    for text in [
        "",
        "no json here",
        "[]",
        r#"{"ips":5}"#,
        r#"{"ips":[{}]}"#,
        r#"{"ips":[{"address":"x"}]}"#,
        r#"{"margay.io/prefixes":[7]}"#,
    ] {
        let error = AddResult::parse(text.as_bytes()).unwrap_err();
        assert!(error.message().starts_with("failed to unmarshal raw result: "), "{text}: {error}");
    }
}
