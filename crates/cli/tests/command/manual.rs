//! Tests shell completions and man pages.

use std::fs;

use crate::common::margay;

#[test]
fn completions_exist_for_each_shell() {
    for (shell, sign) in [("bash", "complete -F"), ("zsh", "#compdef margay"), ("fish", "complete -c margay")] {
        let script = margay(["completions", shell]).answer();
        assert!(script.contains(sign) && script.contains("show-blocks"), "{shell}: {script}");
    }
    let unknown = margay(["completions", "sh"]).failure();
    assert!(unknown.contains("possible values: bash,"), "{unknown}");
}

#[test]
fn man_pages_exist_for_every_command_and_lead_to_plugin() {
    let folder = tempfile::tempdir().unwrap();
    // The folder for the man pages does not exist yet.
    let pages = folder.path().join("man1");
    margay(["man-pages".as_ref(), pages.as_os_str()]).answer();
    for name in
        ["margay", "margay-pool", "margay-pool-create", "margay-ipam-show", "margay-install", "margay-completions"]
    {
        let page = fs::read_to_string(pages.join(format!("{name}.1"))).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".BR margay\\-ipam (8)"), "{name}: {page}");
    }
    // Hidden commands have no man page. `margay help` has no man page either, because every command has the option
    // `--help`.
    let names: Vec<_> = fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name == "margay-man-pages.1" || name == "margay-help.1"), "{names:?}");
}

#[test]
fn man_pages_error_names_place_when_not_writable() {
    let failure = margay(["man-pages", "/proc/no/such/folder"]).failure();
    assert!(failure.contains("/proc/no/such/folder") && failure.contains("hint: name a folder"), "{failure}");
}
