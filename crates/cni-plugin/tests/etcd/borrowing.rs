//! Tests that a node remembers each other node's block from which it has borrowed an address, so that later scans
//! include that block.

use std::path::Path;

use host::HeldBlocks;

use crate::lab::Lab;
use crate::process::Call;

#[test]
fn borrowed_addresses_are_noted_and_own_ones_are_not() {
    let lab = Lab::start();
    let other = r#"{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node-2"},"spec":{}}"#;
    lab.put("/calico/resources/v3/projectcalico.org/nodes/node-2", other);
    let memory = HeldBlocks::new(Path::new("/run/margay"), &lab.location().to_string(), "node-1");
    // An earlier test etcd may have listened on the same port, and the plugin's hints about that etcd may still exist.
    let noted = || memory.notes().blocks;
    let block_of = |address: std::net::IpAddr| format!("{}/26", ipnet::IpNet::new(address, 26).unwrap().network());
    let own = lab.add("own").ok().address();
    let before = noted();

    let mut conf = lab.conf();
    conf["nodename"] = "node-2".into();
    let theirs = Call::new("ADD", "theirs", &conf).ok().address();
    assert_ne!(block_of(theirs), block_of(own));
    let wanted = match theirs {
        std::net::IpAddr::V4(address) => std::net::Ipv4Addr::from(u32::from(address) ^ 1),
        std::net::IpAddr::V6(_) => panic!("{theirs}"),
    };
    lab.add("borrows").with("CNI_ARGS", &format!("IP={wanted}")).ok();
    let after = noted();
    assert!(after.contains(&block_of(theirs)), "{after:?}");
    assert_eq!(before.contains(&block_of(own)), after.contains(&block_of(own)));
}
