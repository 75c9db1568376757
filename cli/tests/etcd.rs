//! The command `margay` on a real etcd.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../backend-etcd/tests/support/server.rs"]
mod support;

use std::process::Command;

use support::Etcd;

const HIDDEN: &str = "hidden-password";

/// Exit code, stdout and stderr.
fn margay(args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    let output = command.args(args).env_clear().envs(env.iter().copied()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert!(!out.contains("hidden") && !err.contains("hidden"), "{out}{err}");
    (output.status.code(), out, err)
}

/// Lets in only root with [`HIDDEN`] from now on.
fn guard(etcd: &Etcd) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
        client.user_add("root", HIDDEN, None).await.unwrap();
        client.role_add("root").await.unwrap();
        client.user_grant_role("root", "root").await.unwrap();
        client.auth_enable().await.unwrap();
    });
}

#[test]
fn pools_on_etcd_with_a_login() {
    let etcd = Etcd::start().unwrap();
    guard(&etcd);
    let url = etcd.url().replace("http:", "etcd:");
    let (endpoints, user) = (("ETCD_ENDPOINTS", etcd.url()), ("ETCD_USERNAME", "root"));
    let login = [user, ("ETCD_PASSWORD", HIDDEN)];
    let (code, out, err) = margay(&["pool", "create", "main", "10.65.0.0/16", "--store", &url], &login);
    assert_eq!(code, Some(0), "{out}{err}");
    let env = [(endpoints.0, endpoints.1.as_str()), login[0], login[1]];
    let (code, out, err) = margay(&["pool", "list", "--log-level", "trace"], &env);
    assert!(code == Some(0) && out.contains("10.65.0.0/16"), "{out}{err}");
    assert!(err.starts_with(&format!("store: {url} (from the environment)\n")), "{err}");

    let wrong = [user, ("ETCD_PASSWORD", "hidden-other")];
    for (env, words) in [(&wrong[..], "check user and password"), (&[], "it wants a user and a password")] {
        let (code, out, err) = margay(&["pool", "list", "--store", &url, "-l", "off"], env);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
        assert!(err.starts_with("error: etcd http://") && err.contains(words), "{err}");
    }
}

#[test]
fn bad_input_is_told_in_one_line_and_what_to_do() {
    let dead = format!("etcd://{}", support::dead_address().unwrap());
    let key = [("ETCD_KEY_FILE", "/nowhere/key.pem")];
    let authority = [("ETCD_CA_CERT_FILE", "/nowhere/ca.pem")];
    let cases = [
        (dead.as_str(), &[][..], "check the address, and that etcd runs", "certificates and login come from"),
        ("etcd+https://127.0.0.1:1", &authority, "cannot read /nowhere/ca.pem", "No such file"),
        ("etcd+https://127.0.0.1:1", &key, "a key for etcd is configured without its certificate", "ETCD_CERT_FILE"),
        ("postgres://a:1", &[], "postgres:// is not a kind of store", "hint: store URLs are"),
        ("etcd://root:hidden@a:1", &[], "has a user or a password in it", "hint: remove user and password"),
        ("etcd://a:1/calico", &[], "more in it than hosts and ports", "hint: write it as etcd://host:port"),
    ];
    for (url, env, wrong, advice) in cases {
        let (code, out, err) = margay(&["pool", "list", "--store", url], env);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{url}: {err}");
        let first = err.lines().next().unwrap();
        assert!(first.starts_with("error: ") && first.contains(wrong) && err.contains(advice), "{url}: {err}");
        assert!(err.lines().count() <= 2, "{url}: {err}");
    }
}
