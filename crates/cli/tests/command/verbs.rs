//! Tests the basic commands on real sled and redb stores.

use std::fs;
use std::io::{self, Write};

use crate::common::{Lab, Run, margay};
use serde_json::{Value, json};

#[test]
fn pool_from_create_to_delete() {
    for lab in Lab::each() {
        let made = lab.margay("pool create lab 10.70.0.0/28 --gateway 10.70.0.1");
        assert_eq!(
            (made.code, made.out.as_str()),
            (0, "Successfully created pool lab: 10.70.0.0/28 in blocks of /28, gateway 10.70.0.1\n")
        );
        assert_eq!(made.err, "note: the block size is /28, the whole pool, since the usual /26 does not fit in\n");

        let (a, b) = (lab.assign("net1", "c1"), lab.assign("net1", "c2"));
        let table = "\
+----------+--------------+-----------+------------+--------------+----------+
| GROUPING | CIDR         | IPS TOTAL | IPS IN USE | IPS RESERVED | IPS FREE |
+----------+--------------+-----------+------------+--------------+----------+
| IP Pool  | 10.70.0.0/28 |        16 |    2 (12%) |      3 (19%) | 11 (69%) |
| Block    | 10.70.0.0/28 |        16 |    2 (12%) |      3 (19%) | 11 (69%) |
+----------+--------------+-----------+------------+--------------+----------+
";
        assert_eq!(lab.margay("ipam show --show-blocks").answer(), table);

        let in_use = lab.margay("pool delete lab").failure();
        let reported = "error: pool lab still has 2 addresses in use: 2 in 10.70.0.0/28 (node1); it is the pool of a bridged \
                    network with gateway 10.70.0.1\nhint: ";
        assert!(in_use.starts_with(reported), "{in_use}");
        assert!(in_use.contains("margay ipam release"), "{in_use}");
        assert_eq!(lab.margay("pool list -o json").json()["pools"][0]["disabled"], false);

        for ip in [&a, &b] {
            let released = lab.margay(&format!("ipam release --ip {ip}")).answer();
            assert_eq!(released, format!("Successfully released IP address {ip}\n"));
        }
        assert_eq!(lab.margay("pool delete lab").answer(), "Successfully deleted pool lab\n");
        assert_eq!(lab.margay("pool list -o json").json(), json!({"pools": []}));
        assert_eq!(lab.margay("reservation list -o json").json(), json!({"reservations": []}));
        assert_eq!(lab.margay("ipam show -o json").json(), json!({"pools": [], "orphaned": []}));
    }
}

#[test]
fn address_holder_is_shown() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        lab.margay("reservation create infra 10.65.0.200/31").answer();
        let ip = lab.assign("net1", "c1");
        let text = lab.margay(&format!("ipam show --ip {ip}")).answer();
        assert_eq!(
            text,
            format!(
                "IP {ip} is in use\nHandle ID: net1.c1\nActive Owner Attributes:\n  margay.io/boot: 0badcafe\n  \
                 margay.io/ifname: eth0\n  margay.io/net: net1\n  node: node1\n"
            )
        );
        let json = lab.margay(&format!("ipam show --ip {ip} -o json")).json();
        assert_eq!(
            (&json["in_use"], &json["handle"], &json["pool"]),
            (&json!(true), &json!("net1.c1"), &json!("main"))
        );

        let reserved = lab.margay("ipam show --ip 10.65.0.201");
        assert_eq!((reserved.code, reserved.out.as_str()), (0, "10.65.0.201 is not assigned\n"));
        assert_eq!(reserved.err, "note: 10.65.0.201 is reserved by reservation infra\n");
        let outside = lab.margay("ipam show --ip 10.99.0.1");
        assert_eq!(outside.err, "note: 10.99.0.1 is in no pool\n");
    }
}

#[test]
fn release_by_address_handle_and_container() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        let free = lab.margay("ipam release --ip 10.65.0.9").failure();
        assert_eq!(free, "error: IP address 10.65.0.9 is not assigned\n");

        let ip = lab.assign("net1", "c1");
        assert_eq!(lab.margay(&format!("ipam release --ip {ip} -o json")).json(), json!({"released": [ip]}),);
        let again = lab.margay(&format!("ipam release --ip {ip}")).failure();
        assert_eq!(again, format!("error: IP address {ip} is not assigned\n"));

        let ip = lab.assign("net1", "c2");
        let released = lab.margay("ipam release --handle net1.c2").answer();
        assert_eq!(released, format!("Successfully released IP address {ip}\n"));
        let unknown = lab.margay("ipam release --handle net1.c2").failure();
        assert_eq!(unknown, "error: no IP address is assigned to handle net1.c2\n");

        let (one, two, other) = (lab.assign("net1", "c3"), lab.assign("net2", "c3"), lab.assign("net1", "c33"));
        let released = lab.margay("ipam release --container c3").answer();
        for ip in [&one, &two] {
            assert!(released.contains(&format!("Successfully released IP address {ip}\n")), "{released}");
        }
        assert_eq!(released.lines().count(), 2, "{released}");
        assert!(lab.margay("ipam release --container c3").failure().starts_with("error: no IP address is assigned to"));
        assert_eq!(lab.margay(&format!("ipam show --ip {other} -o json")).json()["in_use"], true);
    }
}

#[test]
fn reservations_come_and_go() {
    for lab in Lab::each() {
        assert_eq!(lab.margay("pool create main 10.65.0.0/29").code, 0);
        let made = lab.margay("reservation create most 10.65.0.0/30 10.65.0.4 fd00::/64").answer();
        assert_eq!(made, "Successfully created reservation most: 10.65.0.0/30, 10.65.0.4/32, fd00::/64\n");
        assert!(lab.margay("reservation create most 10.0.0.1").failure().contains("reservation most exists already"));
        let listed = lab.margay("reservation list -o json").json();
        let expected = json!({"name": "most", "cidrs": ["10.65.0.0/30", "10.65.0.4/32", "fd00::/64"]});
        assert_eq!(listed, json!({"reservations": [expected]}));
        let pool = lab.margay("ipam show -o json").json()["pools"][0].clone();
        assert_eq!((&pool["reserved"], &pool["available"]), (&json!("5"), &json!("3")));
        assert_eq!(lab.margay("reservation delete most").answer(), "Successfully deleted reservation most\n");
        assert!(lab.margay("reservation delete most").failure().contains("margay reservation list"));
    }
}

#[test]
fn store_is_made_only_by_good_pool() {
    for lab in Lab::each() {
        for verb in [
            "pool list",
            "pool delete a",
            "reservation list",
            "reservation create a 10.0.0.1",
            "reservation delete a",
            "ipam show",
            "ipam show --ip 10.0.0.1",
            "ipam release --ip 10.0.0.1",
            "ipam release --handle a",
            "ipam release --container a",
        ] {
            let error = lab.margay(verb).failure();
            assert!(
                error.starts_with(&format!("error: there is no store at {}\nhint: ", lab.location)),
                "{verb}: {error}"
            );
            assert!(!lab.exists(), "{verb} made something");
        }
        for (request, expected) in [
            ("pool create A 10.0.0.0/24", "IPPool.Name"),
            ("pool create a 10.0.0.0/24 --block-size 19", "not between 20 and 32"),
            ("pool create a 10.0.0.0/28 --block-size 26", "does not fit into pool"),
            ("pool create a 169.254.1.0/24", "Link Local"),
            ("pool create a fe80::/64", "Link Local"),
            ("pool create a 10.0.0.0/24 --node-selector a=", "IPPool.NodeSelector"),
            ("pool create a 10.0.0.0/24 --gateway 10.0.1.1", "gateway 10.0.1.1 is outside of 10.0.0.0/24"),
            ("pool create a 10.0.0.0/24 --gateway fd00::1", "not a host address of 10.0.0.0/24"),
            ("pool create a fd00::/64 --gateway fe80::1", "name it as gateway in the configuration of an IPv6 network"),
        ] {
            let error = lab.margay(request).failure();
            assert!(error.contains(expected), "{request}: {error}");
            assert!(!lab.exists(), "{request} made something");
        }
        lab.margay("pool create a 10.0.0.0/24").answer();
        assert!(lab.exists());
        assert!(lab.margay("pool create b 10.0.0.0/16").failure().contains("overlaps with IPPool(a)"));
        assert!(lab.margay("pool create a 10.1.0.0/16").failure().contains("pool a exists already"));
    }
}

#[test]
fn pool_collides_with_nothing_when_choosing_its_range() {
    for lab in Lab::each() {
        let conf = lab.folder().join("net.d");
        fs::create_dir(&conf).unwrap();
        let network = r#"{"name":"w","type":"macvlan","datastore_type":"redb","ipam":{"type":"margay-ipam","range":"10.200.0.9/23"}}"#;
        fs::write(conf.join("1.conf"), network).unwrap();
        let create = |args: &str| lab.margay(&format!("pool create {args} --cni-conf-dir {}", conf.display()));
        assert!(create("A --auto /24").failure().contains("IPPool.Name"));
        assert!(!lab.exists(), "a pool that cannot be made makes no store");
        let dry = create("a --auto /24 --dry-run").answer();
        assert!(dry.contains("10.200.2.0/24"), "the network above has the two before: {dry}");
        assert!(!lab.exists(), "a dry run makes no store");
        assert!(create("a --auto /24").answer().contains("Successfully created pool a: 10.200.2.0/24"));
        assert!(create("b --auto 24 --manual").answer().contains("pool b: 10.200.3.0/24"));
        assert!(create("c --auto 20").answer().contains("pool c: 10.200.16.0/20"));
        assert!(create("six --auto 64").answer().contains("pool six: fd"));
        assert!(create("a --auto 24").failure().contains("pool a exists already"));
        for (args, expected) in [
            ("x --auto 31", "not a prefix length of 16 to 30, or of 48 to 126 for IPv6"),
            ("x 10.1.0.0/24 --auto 24", "cannot be used with"),
            ("x", "required"),
        ] {
            let failure = create(args).failure();
            assert!(failure.contains(expected), "{args}: {failure}");
        }
    }
}

#[test]
fn pool_list_shows_what_create_was_given() {
    for lab in Lab::each() {
        let args = ["pool", "create", "racks", "fd00:10:65::/48", "--block-size", "120", "--manual"];
        let selectors = ["--node-selector", "rack == 'b'", "--namespace-selector", "has(team)", "--store"];
        let made = margay(args.into_iter().chain(selectors).chain([lab.location.to_string().as_str()]));
        assert_eq!((made.code, made.err.as_str()), (0, ""));
        let expected = json!({
            "name": "racks", "cidr": "fd00:10:65::/48", "block_size": 120, "node_selector": "rack == 'b'",
            "namespace_selector": "has(team)", "assignment_mode": "Manual", "disabled": false,
        });
        assert_eq!(lab.margay("pool list -o json").json(), json!({"pools": [expected]}));
        let document = lab.margay("get ippool racks -o json").json();
        assert_eq!(
            document["spec"]["allowedUses"],
            json!(["Workload"]),
            "Calico refuses a tunnel's in some namespaces"
        );
        let pool = lab.margay("ipam show -o json").json()["pools"][0].clone();
        assert_eq!(pool["capacity"], (1_u128 << 80).to_string());
    }
}

/// The test uses a datastore that Calico wrote, and the numbers that Calico reports about this datastore.
#[test]
fn usage_counts_calico_data_as_calico_does() {
    let fixture = |name: &str| -> Value {
        let path = format!("{}/../../fixtures/calico/{name}", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    };
    let rows = fixture("cluster.json");
    for lab in Lab::each() {
        lab.margay("pool create passing 10.0.0.0/24").answer();
        lab.margay("pool delete passing").answer();
        lab.with_ipam(async |ipam| {
            for row in rows.as_array().unwrap() {
                let (key, value) = (row["key"].as_str().unwrap(), row["value"].as_str().unwrap());
                kv::StoreExt::put(ipam.store(), key, value).await.unwrap();
            }
        });
        let shown = lab.margay("ipam show -o json").json();
        let counts = |of: &Value| {
            ["capacity", "in_use", "reserved", "available"]
                .map(|name| of[name].to_string().trim_matches('"').to_owned())
        };
        let expected = fixture("utilization.json");
        let expected = expected["pools"].as_array().unwrap();
        assert_eq!(shown["pools"].as_array().unwrap().len(), expected.len());
        for (pool, calicos) in shown["pools"].as_array().unwrap().iter().zip(expected) {
            assert_eq!(pool["name"], calicos["pool"]);
            // Calico caps the numbers in its reports at 2^63 addresses.
            if calicos["capacity"].as_f64().unwrap() < 9e18 {
                assert_eq!(counts(pool), counts(calicos), "{}", pool["name"]);
            }
            let blocks = |pool: &Value| -> Vec<(String, [String; 4])> {
                let blocks = pool["blocks"].as_array().unwrap().iter();
                let mut blocks: Vec<_> = blocks.map(|block| (block["cidr"].to_string(), counts(block))).collect();
                blocks.sort();
                blocks
            };
            assert_eq!(blocks(pool), blocks(calicos), "{}", pool["name"]);
        }
    }
}

#[test]
fn conflist_leads_to_store() {
    for lab in Lab::each() {
        let (engine, path) = (lab.location.facts().name, lab.location.path().unwrap());
        let conf_dir = lab.folder().join("net.d");
        fs::create_dir(&conf_dir).unwrap();
        let conf = json!({"name": "lab", "cniVersion": "1.0.0", "plugins": [
            {"type": "bridge", "datastore_type": engine, "datastore_path": path, "ipam": {"type": "margay-ipam"}},
        ]});
        fs::write(conf_dir.join("10-lab.conflist"), conf.to_string()).unwrap();
        let conf_dir = conf_dir.to_str().unwrap();
        let made = margay(["pool", "create", "lab", "10.70.0.0/24", "--cni-conf-dir", conf_dir]);
        assert_eq!(made.code, 0, "{}", made.err);
        assert_eq!(made.err, format!("store: {} (named in {conf_dir}/10-lab.conflist)\n", lab.location));
        let listed = Run::new(["pool", "list", "-o", "json"])
            .env("CALICO_DATASTORE_TYPE", engine)
            .env("DATASTORE_PATH", path.to_str().unwrap())
            .run();
        assert_eq!(listed.err, format!("store: {} (from the environment)\n", lab.location));
        assert_eq!(listed.json()["pools"][0]["name"], "lab");
    }
}

#[test]
fn command_waits_for_its_turn() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        let waiting = lab.with_ipam(async |_| {
            let url = lab.location.to_string();
            let waiting = std::thread::spawn(move || margay(["--store", &url, "pool", "list", "-o", "json"]));
            assert!(!waiting.is_finished());
            waiting
        });
        assert_eq!(waiting.join().unwrap().json()["pools"][0]["name"], "main");
    }
}

struct Broken(io::ErrorKind);

impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(self.0.into())
    }
}

#[test]
fn answer_that_cannot_be_written_is_error() {
    let [lab, _] = Lab::each();
    lab.margay("pool create main 10.65.0.0/24").answer();
    let url = lab.location.to_string();
    for args in [vec!["margay", "--store", &url, "ipam", "show"], vec!["margay", "--help"]] {
        for (kind, code, said) in [
            (io::ErrorKind::BrokenPipe, 0, ""),
            (io::ErrorKind::StorageFull, 1, "error: cannot write the answer: no storage space\n"),
        ] {
            let mut err = Vec::new();
            let done =
                cli::run(&stores::drivers(), args.iter().map(Into::into), &|_| None, &mut Broken(kind), &mut err);
            assert_eq!((done, String::from_utf8(err).unwrap().as_str()), (code, said));
        }
    }
}
