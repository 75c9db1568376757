//! Tests of the address probe on a secondary network whose store is an etcd that Calico also reads.

use etcd_client::Client;
use serde_json::{Value, json};

use crate::lab::{Lab, runtime};
use crate::process::Call;
use crate::wire::Wire;

/// Reads from etcd the IPReservation that prevents Calico from assigning quarantined addresses.
fn reservation(lab: &Lab) -> Option<Value> {
    let key = "/calico/resources/v3/projectcalico.org/ipreservations/margay-quarantine";
    let url = lab.etcds[0].url();
    let answer =
        runtime().block_on(async { Client::connect([url], None).await.unwrap().get(key, None).await.unwrap() });
    answer.kvs().first().map(|kv| serde_json::from_slice(kv.value()).unwrap())
}

fn macvlan(lab: &Lab) -> Value {
    let mut conf = lab.conf();
    conf["type"] = "macvlan".into();
    conf["ipam"] = json!({"type": "margay-ipam"});
    conf
}

#[test]
fn device_address_is_reserved_for_calico_too() {
    let other = Lab::start();
    let first = Call::new("ADD", "c1", &macvlan(&other)).ok().address();
    let lab = Lab::start();
    let wire = Wire::new(&[&format!("{first}/24")]);
    let mut conf = macvlan(&lab);
    conf["master"] = wire.interface.as_str().into();
    conf["ipam"]["probe"] = true.into();
    assert_ne!(Call::new("ADD", "c1", &conf).ok().address(), first);
    let found = reservation(&lab).unwrap();
    assert_eq!(found["spec"]["reservedCIDRs"], json!([format!("{first}/32")]));
    let noted: Value =
        serde_json::from_str(found["metadata"]["annotations"]["margay.io/quarantine"].as_str().unwrap()).unwrap();
    assert_eq!(noted[first.to_string()]["node"], "node-1");
    assert_eq!(noted[first.to_string()]["reason"], format!("{} answered on {}", wire.mac(), wire.interface));

    (1..=254_u8).filter(|last| !first.to_string().ends_with(&format!(".{last}"))).for_each(|last| {
        wire.device("add", &format!("10.77.0.{last}/24"));
    });
    let refusal = Call::new("ADD", "c2", &conf).run().refusal();
    assert_eq!(refusal.says(&[&wire.mac(), "margay ipam quarantine list"]).code, 11);
    assert_eq!(reservation(&lab).unwrap()["spec"]["reservedCIDRs"].as_array().unwrap().len(), 4);
    assert_eq!(lab.books().count_of("net1.c2"), 0);
    Call::new("DEL", "c1", &conf).ok();
    lab.nothing_is_left();
    lab.no_notes_are_left();
}
