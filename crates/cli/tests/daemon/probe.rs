//! Tests the probe of a secondary network through the daemon, and the quarantine commands.

use serde_json::json;

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::Call;
use crate::wire::Wire;

#[test]
fn device_address_is_quarantined_through_daemon() {
    for engine in ENGINES {
        let pool = "10.252.1.0/24";
        let plain = Lab::with_pool(engine, pool);
        let first = Call::new("ADD", "c1", &plain.conf_with("macvlan", json!({}))).ok().address();
        let wire = Wire::new(&[&format!("{first}/24")]);
        let lab = Lab::with_pool(engine, pool);
        let mut conf = lab.conf_with("macvlan", json!({"probe": true}));
        conf["master"] = wire.interface.as_str().into();
        let daemon = Daemon::start(&lab);
        let answer = Call::new("ADD", "c1", &conf).ok().by_daemon();
        assert_ne!(answer.address(), first);
        assert_eq!(lab.held_there().into_keys().collect::<Vec<_>>(), [answer.address()]);

        let reason = format!("{} answered on {}", wire.mac(), wire.interface);
        let listed = lab.margay("ipam quarantine list -o json").ok().json();
        let entry = &listed["quarantined"][0];
        assert_eq!((&entry["address"], &entry["reason"]), (&json!(first), &json!(reason)));
        assert_eq!(entry["node"], "node-1");
        let shown = lab.margay(&format!("ipam show --ip {first} -o json")).ok().json();
        assert_eq!(shown["reserved_by"], json!(["margay-quarantine"]));
        assert_eq!(shown["quarantined"]["since"], entry["since"]);
        let explained = lab.margay("ipam explain --node node-1 -o json").ok().json();
        assert_eq!(
            (&explained["pools"][0]["quarantined"], &explained["pools"][0]["reserved"]),
            (&json!(1), &json!("3"))
        );
        assert_eq!(lab.margay("ipam map -o json").ok().json()["quarantined"], listed["quarantined"]);
        assert!(lab.margay("ipam map").ok().out.contains(&format!("{first} is in quarantine since")));
        let summary = lab.margay("ipam show").ok();
        assert!(summary.err.contains("1 address is in quarantine"), "{summary:?}");

        lab.margay(&format!("ipam quarantine release {first} --dry-run")).ok();
        lab.margay(&format!("ipam quarantine release {first}")).ok();
        lab.margay(&format!("ipam quarantine release {first}")).failed();
        assert_eq!(lab.margay("ipam quarantine list -o json").ok().json(), json!({"quarantined": []}));
        Call::new("DEL", "c1", &conf).ok().by_daemon();
        daemon.end();
        lab.nothing_is_held();
        lab.is_in_order();
    }
}
