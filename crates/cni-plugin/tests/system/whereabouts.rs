//! Tests on embedded stores of networks that use whereabouts' configuration keys.

use std::net::IpAddr;

use serde_json::json;

use crate::lab::{ENGINES, Lab};
use crate::process::Call;

#[test]
fn range_makes_its_pool_and_is_kept_to() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let ipam = json!({
            "range": "10.6.0.225/28", "range_end": "10.6.0.231", "exclude": ["10.6.0.226", "10.6.0.228/31"],
            "network_name": "Storage Net", "gateway": "10.6.0.230", "enable_overlapping_ranges": false,
            "ipRanges": [{"range": "fd06::/120", "range_start": "fd06::42", "range_end": "fd06::44"}],
            "routes": [{"dst": "0.0.0.0/0"}], "log_level": "debug", "sleep_for_race": 1,
            "kubernetes": {"kubeconfig": "/none"}, "configuration_path": "/none",
        });
        let conf = lab.conf_with("macvlan", ipam);
        let mut held = Vec::new();
        for container in ["c1", "c2", "c3"] {
            let result = Call::new("ADD", container, &conf).ok().json();
            assert_eq!(result["ips"][0]["gateway"], "10.6.0.230", "{engine:?}: {result}");
            assert!(result["ips"][1].get("gateway").is_none(), "{engine:?}: {result}");
            for (ip, length) in result["ips"].as_array().unwrap().iter().zip(["/28", "/120"]) {
                let address = ip["address"].as_str().unwrap().strip_suffix(length).unwrap();
                held.push(address.parse::<IpAddr>().unwrap());
            }
        }
        held.sort_unstable();
        let expected = ["10.6.0.225", "10.6.0.227", "10.6.0.231", "fd06::42", "fd06::43", "fd06::44"];
        let expected: Vec<IpAddr> = expected.iter().map(|address| address.parse().unwrap()).collect();
        assert_eq!(held, expected, "{engine:?}");
        for container in ["c1", "c2", "c3"] {
            Call::new("DEL", container, &conf).ok();
        }
        lab.nothing_is_left();
    }
}

#[test]
fn range_and_subnet_together_are_refused() {
    let lab = Lab::new(ENGINES[0]);
    let conf = lab.conf_with("macvlan", json!({"range": "10.6.0.0/24", "subnet": "10.7.0.0/24"}));
    let refusal = Call::new("ADD", "c1", &conf).run().refusal();
    assert_eq!(refusal.code, 7);
    refusal.says(&["ipam defines its addresses twice", "either range and ipRanges (whereabouts plugin), or subnet"]);
}
