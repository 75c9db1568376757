//! Tests `margay gc --node OLD --move-to NEW`.

use kv::StoreExt;
use serde_json::json;

use crate::common::Lab;
use crate::gone::{Cluster, give, held, in_order, on, pool, release, revision, run};

#[test]
fn move_keeps_container_addresses_when_machine_is_renamed() {
    for lab in Lab::each() {
        let at = &lab.location;
        pool(&lab, "198.18.60.0/24");
        let (one, two) = (give(at, "old", "c1"), give(at, "old", "c2"));
        let before = revision(at);
        let shown = lab.margay("gc --node old --move-to new").answer();
        let last = "would make 1 block and 2 addresses of node old those of new; do it with --apply\n";
        assert!(shown.contains("| 198.18.60.") && shown.ends_with(last), "{shown}");
        assert_eq!(revision(at), before, "a dry run changes nothing");

        let done = lab.margay("gc --node old --move-to new --apply -o json").json();
        let rows = done["blocks"].as_array().unwrap();
        assert_eq!((rows.len(), &rows[0]["own"], &rows[0]["addresses"]), (1, &json!(true), &json!(2)), "{done}");
        assert_eq!((&done["applied"], &done["pinned"]), (&json!(true), &json!(true)));
        assert_eq!((held(at, "new").len(), held(at, "old").len()), (2, 0));
        in_order(at);
        assert_eq!(give(at, "new", "c1"), one, "a repeated ADD gets the same address");
        assert_eq!(release(at, "new", "c2"), [two]);
        let again = lab.margay("gc --node old --move-to new --apply").answer();
        assert!(again.starts_with("node old has nothing in the store\nthose that have: new\n"), "{again}");
        in_order(at);
    }
}

#[test]
fn move_takes_all_that_calico_gave_node() {
    let cluster = Cluster::of_calicos();
    let at = &cluster.location;
    let tunnel = on(at, async |ipam| {
        use ipam_core::assign::{HandleRequest, RequestedAddresses};
        let attributes = [("node", "node3"), ("type", "vxlanTunnelAddress")];
        let attributes = attributes.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let owner = ipam_core::model::Owner::host("node3");
        let request = HandleRequest::new("vxlan-tunnel-addr-node3", owner, RequestedAddresses::any(1, 0))
            .with_attributes(attributes);
        let request = request.with_usage(ipam_core::model::PoolUse::Tunnel);
        ipam.assign_to_handle(&request, kv::Deadline::after(crate::gone::TEST_TIMEOUT)).await.unwrap()[0].ip.to_string()
    });
    let all = held(at, "node3");
    assert!(all.len() > 40 && all.contains(&tunnel), "{all:?}");
    let refused = cluster.margay("gc --node node3 --move-to node9 --apply").failure();
    assert!(refused.contains("node node3 is registered") && refused.contains("margay delete node node3"), "{refused}");
    cluster.margay("delete node node3").answer();
    let refused = cluster.margay("gc --node node3 --move-to node9 --apply").failure();
    assert!(refused.contains("node node9 is not registered") && refused.contains("hint: "), "{refused}");
    let node =
        r#"{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node9"},"spec":{},"status":{}}"#;
    on(at, async |ipam| ipam.store().put("/calico/resources/v3/projectcalico.org/nodes/node9", node).await.unwrap());
    assert_eq!(held(at, "node3"), all);

    let shown = cluster.margay("gc --node node3 --move-to node9").answer();
    let handle = "handle vxlan-tunnel-addr-node3 to vxlan-tunnel-addr-node9\n";
    assert!(shown.contains(&format!("would rename {handle}")), "{shown}");
    let done = cluster.margay("gc --node node3 --move-to node9 --apply").answer();
    assert!(done.contains(&format!("renamed {handle}")), "{done}");
    assert!(done.ends_with(&format!("{} addresses of node node3 those of node9\n", all.len())), "{done}");
    assert_eq!((held(at, "node9"), held(at, "node3").len()), (all, 0));
    in_order(at);
    let released = cluster.margay("ipam release --handle vxlan-tunnel-addr-node9").answer();
    assert!(released.contains(&tunnel), "{released}");
}

#[test]
fn move_is_refused_when_target_cannot_be_node() {
    let [lab, _] = Lab::each();
    pool(&lab, "198.18.61.0/24");
    for new in ["old", "a/b"] {
        let said = lab.margay(&format!("gc --node old --move-to {new}")).failure();
        assert!(said.contains("cannot be the name of another node"), "{said}");
    }
    assert!(lab.margay("gc --move-to new").failure().contains("--node"));
    assert!(lab.margay("gc --node old --move-to new --free").failure().contains("cannot be used with"));
    let said = run(&stores::at("redb:///nowhere/at/all").unwrap(), "gc --node old --move-to new").failure();
    assert!(said.contains("there is no store at"), "{said}");
}
