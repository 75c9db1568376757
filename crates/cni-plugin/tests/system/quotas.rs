//! Tests of quotas on an embedded store.

use ipam_core::model::{QuotaKind, QuotaSubject};

use crate::lab::{ENGINES, Lab};
use crate::process::Call;
use crate::under_quota::{is_refused, kills_leave_the_quota_exact, limit, of_shop, shop};

#[test]
fn quota_error_says_what_to_do_when_full() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.66.0.0/24");
        let conf = lab.conf_of("bridge");
        limit(&lab, &shop(), 1);
        of_shop("ADD", "c1", &conf).ok();
        of_shop("ADD", "c1", &conf).ok();
        let refusal = of_shop("ADD", "c2", &conf).run().refusal();
        assert_eq!(refusal.code, 999);
        assert!(refusal.text.contains("margay quota set --namespace shop N"), "{}", refusal.text);
        lab.add("other").ok();
        of_shop("DEL", "c1", &conf).ok();
        of_shop("ADD", "c2", &conf).ok();
        assert!(is_refused(&of_shop("ADD", "c3", &conf).run()));
    }
}

#[test]
fn quota_warning_comes_with_status_that_never_fails() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.66.0.0/24");
        let mut conf = lab.conf_of("bridge");
        conf["cniVersion"] = "1.1.0".into();
        limit(&lab, &QuotaSubject::new(QuotaKind::Network, "net1"), 5);
        let status = || Call::new("STATUS", "", &conf).without("CNI_CONTAINERID").without("CNI_IFNAME").ok();
        for (number, warning) in ["", "", "", "nearly used up", "no address is free"].iter().enumerate() {
            lab.add(&format!("c{number}")).ok();
            let log = status().stderr;
            match warning.is_empty() {
                true => assert!(!log.contains("quota"), "{number}: {log}"),
                false => assert!(log.contains("quota") && log.contains(warning), "{number}: {log}"),
            }
        }
    }
}

#[test]
fn quota_is_never_exceeded_by_kills() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.66.0.0/24");
        kills_leave_the_quota_exact(&lab, &lab.conf_of("bridge"));
    }
}
