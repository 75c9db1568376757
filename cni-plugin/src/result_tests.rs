use super::*;
use crate::gojson::Json;
use crate::netconf::NetConf;

fn assigned(address: &str, gateway: Option<&str>) -> Assigned {
    let address: IpAddr = address.parse().unwrap();
    let (block_prefix, pool_prefix) = if address.is_ipv4() { (26, 16) } else { (122, 64) };
    Assigned {
        address,
        prefix_length: None,
        block_prefix,
        pool_prefix,
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
    let wrong = Assigned { pool_prefix: 33, ..assigned("10.0.0.5", None) };
    let conf = NetConf::default();
    assert!(AddResult::bridged(&[wrong], &BridgedSettings::from_conf(&conf).unwrap()).is_err());
}
