//! Tests of the sources of etcd's address and credentials: network configuration, environment, TLS files, DNS
//! discovery, user and password.

use etcd_client::Client;
use serde_json::{Value, json};

use crate::certificates::Certificates;
use crate::dns::Dns;
use crate::lab::{Lab, runtime};
use crate::process::Call;
use crate::server::Etcd;

/// The password of the etcd user `root` after [`guard`] has turned authentication on.
pub(crate) const PASSWORD: &str = "hidden-password";

/// Turns etcd's authentication on, with the etcd users `root` and `guest`, of which `guest` has no rights.
pub(crate) fn guard(lab: &Lab) {
    runtime().block_on(async {
        let mut client = Client::connect([lab.etcds[0].url()], None).await.unwrap();
        for user in ["root", "guest"] {
            client.user_add(user, PASSWORD, None).await.unwrap();
            client.role_add(user).await.unwrap();
            client.user_grant_role(user, user).await.unwrap();
        }
        client.auth_enable().await.unwrap();
    });
}

/// Certificate files whose paths can be written to a network configuration.
pub(crate) trait InConf {
    fn text(&self, name: &str) -> String;

    fn add_to(&self, conf: &mut Value);
}

impl InConf for Certificates {
    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn add_to(&self, conf: &mut Value) {
        conf["etcd_ca_cert_file"] = self.text("authority.pem").into();
        conf["etcd_cert_file"] = self.text("client.pem").into();
        conf["etcd_key_file"] = self.text("client.key").into();
    }
}

/// Checks that etcd accepts the credentials of a call: the call fails only because the document of node-1 is missing.
#[track_caller]
pub(crate) fn is_let_in(call: &Call) {
    call.run().refusal().says(&["resource does not exist: Node(node-1)"]);
}

fn lab_of(etcd: Etcd) -> Lab {
    Lab::on_empty(vec![etcd])
}

#[test]
fn certificates_come_from_netconf_or_environment() {
    let certificates = Certificates::make().unwrap();
    let lab = lab_of(certificates.etcd_for_known().unwrap());
    let mut conf = lab.conf();
    certificates.add_to(&mut conf);
    is_let_in(&Call::new("ADD", "c1", &conf));
    Call::new("DEL", "c1", &conf).ok();

    let variables =
        [("ETCD_CA_CERT_FILE", "authority.pem"), ("ETCD_CERT_FILE", "client.pem"), ("ETCD_KEY_FILE", "client.key")];
    let with = |call: Call, prefix: &str| {
        variables
            .iter()
            .fold(call, |call, (name, file)| call.with(&format!("{prefix}{name}"), &certificates.text(file)))
    };
    is_let_in(&with(lab.add("c1"), ""));
    // The network configuration overrides a plain environment variable, and a variable with the prefix `CALICO_`
    // overrides both.
    conf["etcd_key_file"] = "/nowhere/key.pem".into();
    let refusal = with(Call::new("ADD", "c1", &conf), "").run().refusal();
    refusal.says(&["cannot read /nowhere/key.pem"]);
    is_let_in(&with(Call::new("ADD", "c1", &conf), "CALICO_"));
    // A missing TLS key file must not be reported as a missing store. If etcd's TLS key file is missing, DEL cannot
    // release the address and must report a failure.
    Call::new("DEL", "c1", &conf).run().refusal().says(&["cannot read /nowhere/key.pem"]);
}

#[test]
fn endpoints_come_from_netconf_or_environment() {
    let lab = Lab::start();
    let mut conf = lab.conf();
    let dead = format!("http://{}", crate::server::dead_address().unwrap());
    let url = lab.etcds[0].url();
    let call = |conf: &Value, container: &str| Call::new("ADD", container, conf);
    // If the configuration has etcd endpoints but no datastore type, the datastore is etcd.
    conf.as_object_mut().unwrap().remove("datastore_type");
    call(&conf, "c1").ok();
    call(&conf, "c2").with("ETCD_ENDPOINTS", &dead).ok();
    call(&conf, "c3").with("CALICO_ETCD_ENDPOINTS", &dead).run().refusal().says(&[dead.as_str()]);
    conf["etcd_endpoints"] = Value::Null;
    call(&conf, "c4").with("ETCD_ENDPOINTS", &url).ok();
    call(&conf, "c5").with("ETCD_ENDPOINTS", &dead).with("CALICO_ETCD_ENDPOINTS", &format!("{dead},{url}")).ok();
    for (name, value, text) in [
        ("ETCD_DISCOVERY_SRV", "example.org", "multiple discovery or bootstrap options specified"),
        ("DATASTORE_TYPE", "kubernetes", "datastore type kubernetes is not supported"),
        ("ETCD_KEY_FILE", "/k", "a key for etcd is configured without its certificate"),
    ] {
        call(&conf, "c6").with("ETCD_ENDPOINTS", &url).with(name, value).run().refusal().says(&[text]);
    }
    // A bridge network can also use etcd as its store.
    let mut bridged = lab.conf();
    bridged["type"] = "bridge".into();
    bridged["ipam"] = json!({"type": "margay-ipam"});
    assert!(call(&bridged, "c7").ok().cidrs()[0].ends_with("/24"));
    for container in ["c1", "c2", "c4", "c5", "c7"] {
        lab.del(container).ok();
    }
    lab.nothing_is_left();
}

#[test]
fn members_are_found_through_srv_records() {
    let mut lab = Lab::start();
    let dns = Dns::start_at(([127, 0, 0, 77], 53).into()).unwrap();
    dns.set("_etcd-client._tcp.margay.example", &[(1, 1, lab.etcd().address().port())]);
    let resolver = lab.root.path().join("resolv.conf");
    std::fs::write(&resolver, "nameserver 127.0.0.77\n").unwrap();
    // Run the plugin in its own mount namespace, so that no other process uses the test's name server.
    let script = format!("mount --bind {} /etc/resolv.conf && exec \"$0\"", resolver.display());
    let through = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", &script];
    let mut conf = lab.conf();
    conf["etcd_endpoints"] = Value::Null;
    conf["etcd_discovery_srv"] = "margay.example".into();
    let run = |conf: &Value| {
        let call = Call::new("ADD", "c1", conf).with("PATH", "/usr/bin:/bin");
        call.run_as(call.command_through(&through))
    };
    let found = run(&conf);
    assert_eq!(found.exit, 0, "{found:?}");
    conf["etcd_discovery_srv"] = "other.example".into();
    let refusal = run(&conf).refusal();
    refusal.says(&["failed to discover etcd endpoints through SRV discovery", "_etcd-client._tcp.other.example"]);
}

#[test]
fn login_comes_from_environment() {
    let lab = lab_of(Etcd::start_with("http", &[]).unwrap());
    guard(&lab);
    let login = |user: &str, password: &str| lab.add("c1").with("ETCD_USERNAME", user).with("ETCD_PASSWORD", password);
    is_let_in(&login("root", PASSWORD));
    // As in Calico, a user name without a password is an error, and so is a password without a user name.
    login("root", "").run().refusal().says(&["it wants a user and a password"]);
    login("root", "hidden-other").run().refusal().says(&["check user and password"]);
    login("guest", PASSWORD).run().refusal().says(&["the roles of the user do not allow this"]);
}
